"""Claims about ``python -m flashforward_core evaluate``."""

import json
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

from flashforward_core.cli import main
from flashforward_core.media import VideoWriter
from flashforward_core.metrics.vbench import DIMENSIONS
from flashforward_core.scenes import sample_scene
from flashforward_core.train.synthetic import render_scene

pytestmark = pytest.mark.cpu

SEED = 2


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten seconds of a drawn scene, as a file."""
    path = tmp_path_factory.mktemp("videos") / "scene.mp4"
    video, _ = render_scene(sample_scene(SEED), 161)
    frames = ((video.permute(1, 2, 3, 0) + 1) * 127.5).round().byte().numpy()
    with VideoWriter(path, width=192, height=128, fps=16) as writer:
        writer.write(frames)
    return path


def test_json_has_every_metric(clip: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(clip), "--json", "--caption", sample_scene(SEED).caption]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["frames"] == 161
    assert 0.95 < found["flicker"] < 1 and found["motion"] > 0
    for seam in ("seam_chunk", "seam_anchor"):  # it has none, but a dozen places of a coded video vary
        assert abs(found[seam]["excess"]) < 0.5 and found[seam]["count"] > 3
    assert found["drift"]["colour"] < 5
    assert found["scene"]["faithfulness"] > 0.95  # H.264 changes colours a little


def test_the_table_is_for_people(clip: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(clip)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["frames", "161", "frames"]
    units = ("frames", "%", "%", "power", "power", "levels", "octaves")
    assert [unit in line for unit, line in zip(units, lines, strict=True)] == [True] * len(units)
    assert not any(line.startswith("faithfulness") for line in lines)  # there was no caption


def test_the_plot_is_a_png(clip: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main(["evaluate", str(clip), "--plot", str(tmp_path / "found.png")]) == 0
    data = (tmp_path / "found.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    assert width > 800 and height > 500


def test_without_matplotlib_the_plot_is_refused_before_measuring(
    clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as if it were not installed
    assert main(["evaluate", str(clip), "--plot", str(tmp_path / "found.png")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--caption", "a cat"], "none of the embedded model's scenes"),
        (["--chunk-frames", "1"], "chunk_frames=1"),
    ],
)
def test_what_users_can_correct_is_one_line(
    clip: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(clip), *words]) == 2
    shown = capsys.readouterr().err
    assert said in shown and shown.count("\n") == 1


def test_what_is_no_video_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "notes.mp4"
    other.write_bytes(np.arange(100, dtype=np.uint8).tobytes())
    assert main(["evaluate", str(other)]) == 2
    assert main(["evaluate", str(tmp_path / "none.mp4")]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "notes.mp4" in first and "none.mp4" in second


VBENCH = """
import json, os
class VBench:
    def __init__(self, device, full_info_dir, output_path):
        self.folder = output_path
    def evaluate(self, videos_path, name, prompt_list=[], dimension_list=None, local=False, read_frame=False, mode=""):
        assert local and mode == "custom_input" and os.path.isfile(videos_path), "would fetch weights or want prompts"
        print("as much as VBench prints")
        found = {name: [0.5 + place / 8, []] for place, name in enumerate(dimension_list)}
        with open(os.path.join(self.folder, name + "_eval_results.json"), "w") as file:
            json.dump(found, file)
"""


@pytest.fixture
def vbench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with VBench 0.1.5's interface, and the folder of its weights, still empty."""
    package = tmp_path / "site" / "vbench"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(VBENCH)
    (package / "utils.py").write_text(f"CACHE_DIR = {str(tmp_path / 'cache')!r}")
    for dimension in DIMENSIONS:
        (package / f"{dimension}.py").write_text("")
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    for name in ("vbench", "vbench.utils", *(f"vbench.{dimension}" for dimension in DIMENSIONS)):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_vbench_is_run_on_weights_that_are_there_and_fetches_none(
    clip: Path, vbench: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(clip), "--vbench"]) == 2
    said = capsys.readouterr().err
    weights = [
        "cache/clip_model/ViT-B-32.pt",
        "cache/amt_model/amt-s.pth",
        "cache/dino_model/dino_vitbase16_pretrain.pth",
    ]
    weights += ["cache/dino_model/facebookresearch_dino_main/hubconf.py"]
    weights += ["torch/hub/checkpoints/dino_vitbase16_pretrain.pth"]
    for name in weights:
        assert str(vbench / name) in said
        (vbench / name).parent.mkdir(parents=True, exist_ok=True)
        (vbench / name).touch()
    assert main(["evaluate", str(clip), "--vbench", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["vbench"] == dict(
        zip(DIMENSIONS, (0.5, 0.625, 0.75, 0.875), strict=True)
    )


def test_without_vbench_it_says_what_to_install(
    clip: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vbench", None)  # as if it were not installed
    assert main(["evaluate", str(clip), "--vbench"]) == 2
    assert "install it with: pip install --no-deps vbench openai-clip" in capsys.readouterr().err
