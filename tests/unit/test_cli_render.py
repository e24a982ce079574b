"""Claims about ``python -m flashforward_core render``: what it leaves behind, and what it says to users."""

import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from flashforward_core.cli import build_parser, main
from flashforward_core.commands.render import spec_of
from flashforward_core.engine.rollout import render
from flashforward_core.kv_policy import FutureForcingOptions
from flashforward_core.media import probe, read_frames
from flashforward_core.model.loading import load_embedded
from flashforward_core.specs import PromptSpan, RolloutSpec, VideoShape

pytestmark = pytest.mark.cpu

SIZE = (192, 128)
PROMPT = "a red ball bounces over green hills at noon"


def command(out: Path, *words: str) -> int:
    return main(["render", "--prompt", PROMPT, "--out", str(out), *words])


def test_it_writes_the_video_of_the_library_s_latents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "clip.mp4"
    assert command(out, "--latent-frames", "4", "--seed", "3", "--devices", "cpu*2") == 0
    shown = capsys.readouterr()
    *_, digest, path = shown.out.splitlines()
    backbone = load_embedded()
    spec = RolloutSpec(shape=VideoShape(width=192, height=128, latent_frames=4), seed=3)
    latents = render(backbone, spec, [backbone.text_encoder.encode([PROMPT])]).latents_BCFHW
    assert digest == "latents sha256 " + hashlib.sha256(latents.numpy().tobytes()).hexdigest()
    assert path == str(out)
    info = probe(out)
    assert (info.width, info.height, info.frames, info.fps) == (192, 128, 13, 16)
    assert re.search(r"13/13 frames", shown.err)
    assert not out.with_name("clip.partial.mp4").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_control_c_leaves_a_playable_partial_video(
    number: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, partial = tmp_path / "clip.mp4", tmp_path / "clip.partial.mp4"
    ended = threading.Event()

    def interrupt_after_first_frames() -> None:
        while not ended.is_set():
            if "frames" in capsys.readouterr().err:
                os.kill(os.getpid(), number)
                return
            time.sleep(0.02)

    watcher = threading.Thread(target=interrupt_after_first_frames)
    watcher.start()
    try:
        status = command(out, "--latent-frames", "30")
    finally:
        ended.set()
        watcher.join()
    assert status == 130
    assert not out.exists()
    frames = sum(len(chunk) for chunk in read_frames(partial))
    assert 9 <= frames < 117  # the first chunk is 9 frames; the whole video 117
    assert str(partial) in capsys.readouterr().err
    assert threading.active_count() < 4  # no lane is left


def test_a_prompt_schedule_is_rendered_as_the_library_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, later = tmp_path / "clip.mp4", "a blue boat drifts left over snowy hills at night"
    words = ["--latent-frames", "4", "--quiet", "--prompt", f"{PROMPT} [9f] | {later} [#]"]
    assert main(["render", "--out", str(out), *words]) == 0
    digest = capsys.readouterr().out.splitlines()[0]
    backbone = load_embedded()
    spans = (PromptSpan(), PromptSpan(start=3, prompt=1, hard_cut=True))  # 9 video frames are 3 latent frames
    spec = RolloutSpec(shape=VideoShape(width=192, height=128, latent_frames=4), prompts=spans)
    texts = [backbone.text_encoder.encode([prompt]) for prompt in (PROMPT, later)]
    assert digest.endswith(render(backbone, spec, texts).sha256)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--latent-frames", "0"], "latent_frames=0"),
        (["--seconds", "-1"], "seconds=-1"),
        (["--schedule", "fast"], "schedule='fast' is unknown; use one of: flashforward"),
        (["--layout", "fast"], "layout='fast' is unknown"),
        (["--order", "fast", "--latent-frames", "1"], "order='fast' is unknown"),
        (["--kv", "int4"], "kv='int4' is unknown"),
        (["--offload", "maybe"], "offload='maybe' is unknown"),
        (["--budget-gib", "0.05", "--latent-frames", "1"], "memory: cpu needs about"),
        (["--anchor-rule", "fast"], "anchor_rule='fast' is unknown"),
        (
            ["--sparse", "both", "--sparse-attention", "triton", "--latent-frames", "1"],
            "'triton' cannot run on cpu: it needs",
        ),
        (["--sparse-attention", "torch"], "has no use with sparse='none'; use --sparse both"),
        (["--kv-policy", "drop"], "kv_policy='drop' is unknown; use one of: keep, window"),
        (["--kv-policy", "window", "--history", "3"], "history=3 has no use with kv_policy='window', which keeps"),
        (["--kv-policy", "window", "--sink", "0"], "sink=0 has no use with kv_policy='window', which keeps frames of"),
        (["--kv-policy", "temp_cache", "--sink", "3"], "frames of its own; leave it out, or --kv-policy keep"),
        (["--kv-sink", "3"], "kv_sink=3 has no use with kv_policy='keep'; it is for: window, future_forcing"),
        (["--sparse", "some"], "sparse='some' is unknown; use one of: none, cross, self, both"),
        (
            ["--batch-diagonal", "--sparse", "both", "--latent-frames", "1"],
            "batch_diagonal=True does not go with sparse",
        ),
        (["--crf", "99", "--latent-frames", "1"], "crf=99"),
        (["--seed", "-1"], "seed=-1"),
        (["--prompt", "a | b"], "has no length"),
    ],
)
def test_what_users_can_correct_is_one_line_and_status_2(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path / "clip.mp4", *words) == 2
    shown = capsys.readouterr().err
    assert said in shown and shown.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kv-budget", "nine"], "argument --kv-budget: invalid int value: 'nine'"),
        (["--sparse"], "argument --sparse: expected one argument"),
        (["--speed", "on"], "unrecognized arguments: --speed on"),
    ],
)
def test_what_the_parser_refuses_is_one_line_too(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command(tmp_path / "clip.mp4", *words)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"flashforward_core render: {said}; see flashforward_core render --help\n"


def test_the_help_says_every_default_of_the_policies(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the node's widgets: tests/nodes/test_schema.py."""
    with pytest.raises(SystemExit):
        main(["render", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for option, default in (
        ("--history N", "5"),
        ("--sink N", "0"),
        ("--kv-budget N", "9"),
        ("--kv-sink N", "3"),
        ("--kv-future-weight W", "0.5"),
        ("--kv-threshold X", "0.9"),
    ):
        assert re.search(rf"{option} [^-][^(]*\({re.escape(default)}\)", shown.rpartition("options:")[2]), option


def test_a_policy_s_settings_reach_the_rollout() -> None:
    words = ["--kv-policy", "future_forcing", "--kv-budget", "12", "--kv-sink", "1", "--kv-future-weight", "0.25"]
    spec = spec_of(build_parser("render").parse_args(["render", "--prompt", PROMPT, "--out", "x", *words]), size=SIZE)
    assert spec.kv_policy == FutureForcingOptions(budget_frames=12, sink_frames=1, future_weight=0.25)
    words = ["--history", "2", "--sink", "3"]
    spec = spec_of(build_parser("render").parse_args(["render", "--prompt", PROMPT, "--out", "x", *words]), size=SIZE)
    assert (spec.history.chunks, spec.history.sink, spec.history.planner_blocks) == (2, 3, 6)


def test_a_soft_change_of_prompt_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise ValueError("far enough")

    monkeypatch.setattr("flashforward_core.commands.render_one.load_embedded", stop)
    later = "a blue boat drifts left over snowy hills at night"
    for end, words, times in (("", [], 1), ("#", [], 0), ("", ["--planner-history", "0"], 0)):
        caplog.clear()
        text = f"{PROMPT} [8s] | {later} [4s{end}] | {later} [#]"
        assert main(["render", "--prompt", text, "--out", str(tmp_path / "clip.mp4"), *words]) == 2
        assert caplog.text.count("without # may hardly show") == times


def test_the_path_is_checked_before_anything_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(tmp_path / "clip.gif") == 2
    assert command(tmp_path / "none" / "clip.mp4") == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "clip.mp4" in first and "does not exist" in second


def test_more_control_c_while_it_stops_changes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "clip.mp4"
    words = ["render", "--prompt", PROMPT, "--out", str(out), "--latent-frames", "24"]
    run = subprocess.Popen([sys.executable, "-m", "flashforward_core", *words], stderr=subprocess.PIPE, text=True)
    assert run.stderr is not None
    said = ""
    for line in run.stderr:
        said += line
        if "frames" in line and "stopping" not in said:
            for _ in range(5):
                run.send_signal(signal.SIGINT)
                time.sleep(0.01)
    assert run.wait(timeout=60) == 130
    assert said.count("stopping...") == 1 and "Traceback" not in said
    assert sum(len(chunk) for chunk in read_frames(tmp_path / "clip.partial.mp4")) >= 9


def test_control_c_before_rendering_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for name in ("load_embedded", "parse"):
        monkeypatch.setattr(f"flashforward_core.commands.render_one.{name}", interrupted)
        assert command(tmp_path / "clip.mp4") == 130
        assert capsys.readouterr().err == "flashforward_core render: interrupted\n"


def test_a_closed_stdout_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    words = [sys.executable, "-m", "flashforward_core", "simulate"]
    done = subprocess.run(words, stdout=writing, stderr=subprocess.PIPE, check=False, timeout=60)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


def test_what_cannot_work_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("flashforward_core.commands.render_one.load_embedded", lambda *_, **__: pytest.fail("loaded"))
    (tmp_path / "folder.mp4").mkdir()
    assert command(tmp_path / "folder.mp4") == 2
    assert command(tmp_path / ("n" * 250 + ".mp4")) == 2
    assert command(tmp_path / "clip.mp4", "--crf", "52") == 2
    assert command(tmp_path / "clip.mp4", "--sparse", "both", "--sparse-attention", "nope") == 2
    assert (
        command(tmp_path / "clip.mp4", "--devices", "cpu", "--sparse", "both", "--sparse-attention", "flashinfer") == 2
    )
    monkeypatch.setattr("os.access", lambda *_: False)
    assert command(tmp_path / "clip.mp4") == 2
    folder, name, crf, sparse, kernel, access = capsys.readouterr().err.splitlines()
    assert "is a folder" in folder and "254 bytes" in name and "crf=52" in crf and "may not write" in access
    assert "sparse_attention='nope' is unknown; use one of: auto, triton, flashinfer" in sparse
    assert "'flashinfer' cannot run on cpu: it needs a CUDA device" in kernel
