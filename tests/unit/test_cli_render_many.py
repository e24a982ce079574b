"""Claims about ``render --prompts``: each video as if alone, recorded, and gone on with after whatever stopped it."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flashforward_core.cli import main
from flashforward_core.commands import render_many
from flashforward_core.engine.rollout import render
from flashforward_core.media import VideoWriter, probe
from flashforward_core.model.loading import load_embedded
from flashforward_core.specs import RolloutSpec, VideoShape

pytestmark = pytest.mark.cpu

NOON, NIGHT = "a red ball bounces over green hills at noon", "a blue boat drifts left over snowy hills at night"
ROWS = (
    {"prompt": NOON, "seconds": 0.3},
    {"prompt": NIGHT, "seconds": 0.3, "seed": 7, "out": "night/boat.mp4"},
    {"prompt": NIGHT, "seconds": 0.1},
)
OUTS = ("0001.mp4", "night/boat.mp4", "0003.mp4")


def command(folder: Path, *words: str) -> int:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("\n".join(map(json.dumps, ROWS)))
    return main(["render", "--prompts", str(prompts), "--out", str(folder / "out"), "--devices", "cpu*2", *words])


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out" / "results.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    assert command(folder, "--quiet") == 0
    return folder


def test_each_is_rendered_as_if_alone_and_recorded(finished: Path) -> None:
    found = {line["path"]: line for line in lines(finished)}
    assert set(found) == set(OUTS)
    assert [found[out]["seed"] for out in OUTS] == [0, 7, 2]
    assert {line["status"] for line in found.values()} == {"done"}
    assert [probe(finished / "out" / out).frames for out in OUTS] == [5, 5, 1]
    backbone = load_embedded()
    spec = RolloutSpec(shape=VideoShape(width=192, height=128, latent_frames=2), seed=7)
    alone = render(backbone, spec, [backbone.text_encoder.encode([NIGHT])])
    assert found["night/boat.mp4"]["sha256"] == alone.sha256


def test_what_is_damaged_or_missing_is_made_again_and_nothing_else(finished: Path, capsys: Any) -> None:
    before = {line["path"]: line["file_sha256"] for line in lines(finished)}
    (finished / "out" / OUTS[0]).unlink()
    kept = (finished / "out" / OUTS[1]).stat().st_mtime_ns
    with (finished / "out" / OUTS[2]).open("ab") as file:
        file.write(b"x")
    assert command(finished) == 0
    again = {line["path"]: line["file_sha256"] for line in lines(finished)[3:]}
    assert again == {out: before[out] for out in (OUTS[0], OUTS[2])}
    assert (finished / "out" / OUTS[1]).stat().st_mtime_ns == kept
    assert "1 of 3 are there already" in capsys.readouterr().err


def test_a_failure_is_recorded_and_the_rest_goes_on(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    class FullDisk(VideoWriter):
        def write(self, frames_FHWC: Any) -> None:
            if self.path.name == OUTS[0]:
                raise OSError(28, "No space left on device")
            super().write(frames_FHWC)

    monkeypatch.setattr(render_many, "VideoWriter", FullDisk)
    assert command(tmp_path) == 1
    found = {line["path"]: line for line in lines(tmp_path)}
    assert [found[out]["status"] for out in OUTS] == ["failed", "done", "done"]
    assert "No space left" in found[OUTS[0]]["error"]
    files = {path.name for path in (tmp_path / "out").rglob("*.mp4")}
    assert files == {"boat.mp4", "0003.mp4"}  # no partial file is left either
    assert "1 of 3 failed; the same command tries them again" in capsys.readouterr().err


def test_control_c_loses_nothing_that_is_done(tmp_path: Path, capsys: Any) -> None:
    ended = threading.Event()

    def interrupt_after_the_first() -> None:
        results = tmp_path / "out" / "results.jsonl"
        while not ended.is_set():
            if results.exists() and results.stat().st_size:
                os.kill(os.getpid(), signal.SIGINT)
                return
            time.sleep(0.005)

    watcher = threading.Thread(target=interrupt_after_the_first)
    watcher.start()
    try:
        status = command(tmp_path, "--in-flight", "1")
    finally:
        ended.set()
        watcher.join()
    assert status == 130
    assert "the same command goes on from there" in capsys.readouterr().err
    done = {line["path"] for line in lines(tmp_path)}
    assert {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.mp4")} == done
    assert 1 <= len(done) < 3


def test_an_option_that_changes_the_bytes_makes_videos_again_and_another_name_of_the_same_does_not(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """One prompt of one latent frame, in bf16, loaded once. On a CPU ``auto`` is ``cpu``."""
    backbone = load_embedded(dtype=torch.bfloat16)
    monkeypatch.setattr(render_many, "load", lambda *_: backbone)
    (tmp_path / "one.txt").write_text(NOON)
    made = 0
    for words, new in (
        ([], True),
        (["--kv", "fp8"], True),
        (["--kv", "fp8", "--in-flight", "3", "--quiet"], False),
        (["--sparse", "both"], True),
        (["--sparse", "both", "--sparse-attention", "cpu"], False),
    ):
        options = ["--devices", "cpu", "--dtype", "bf16", "--latent-frames", "1", *words]
        assert main(["render", "--prompts", str(tmp_path / "one.txt"), "--out", str(tmp_path / "out"), *options]) == 0
        made += new
        assert len(lines(tmp_path)) == made, words


def test_advice_for_several_videos_is_given_once(
    tmp_path: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Two of the three are two latent frames long."""

    def stop(*_: object) -> None:
        raise ValueError("far enough")

    monkeypatch.setattr(render_many, "load", stop)
    assert command(tmp_path, "--kv-policy", "window", "--kv-budget", "9000") == 2
    assert caplog.text.count("a budget of 9000 keeps all that 2 latent frames look back at") == 1


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "out").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out" / "night").symlink_to(tmp_path / "elsewhere")
    yield tmp_path / "elsewhere"
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_no_link_leads_out_of_the_folder(tmp_path: Path, outside: Path, capsys: Any) -> None:
    assert command(tmp_path) == 2
    assert "prompt 2: out='night/boat.mp4' leads out of the output folder by a link" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--shard", "3/2"], "shard='3/2'"),
        (["--in-flight", "0"], "in_flight=0"),
        (["--schedule", "fast"], "prompt 1: schedule='fast' is unknown"),
    ],
)
def test_what_cannot_work_is_one_line(tmp_path: Path, capsys: Any, words: list[str], said: str) -> None:
    assert command(tmp_path, *words) == 2
    shown = capsys.readouterr().err
    assert said in shown and shown.count("\n") == 1


def test_a_shard_needs_a_file_of_prompts(tmp_path: Path, capsys: Any) -> None:
    out = str(tmp_path / "x.mp4")
    assert main(["render", "--prompt", NOON, "--out", out, "--shard", "1/2"]) == 2
    assert "shard goes with a file of prompts only" in capsys.readouterr().err
