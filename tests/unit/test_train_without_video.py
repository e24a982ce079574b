"""Training on drawn scenes reads no video and writes none, so it runs without PyAV, Ray and TensorBoard."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashforward_core.cli import main
from flashforward_core.model.files import fingerprint
from flashforward_core.model.loading import ASSETS
from flashforward_core.train.data import LatentPool
from flashforward_core.train.weights import new_models

pytestmark = pytest.mark.cpu

WITHOUT = """
import importlib, pkgutil, sys
for name in ("av", "ray", "tensorboard"):
    sys.modules[name] = None
from flashforward_core import train
for module in pkgutil.walk_packages(train.__path__, train.__name__ + "."):
    importlib.import_module(module.name)
from flashforward_core.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_step_on_drawn_scenes_runs(tmp_path: Path) -> None:
    """Distillation does what the other steps do and exports too. Its clip is made up: encoding one takes longer."""
    weights = fingerprint(sorted((ASSETS / "vae").glob("*.safetensors")))[:16]
    clip = LatentPool.of_clips(new_models()[1], torch.randn(1, 16, 21, 16, 24), ["a boat"], device=torch.device("cpu"))
    clip.save(tmp_path / "latents" / f"{weights}-1-0of1.safetensors")
    shipped = ("--init", str(ASSETS), "--teacher", str(ASSETS))
    tiny = ("--scenes", "1", "--steps", "1", "--clips", "1", "--latents", "21", "--no-compile")
    command = [sys.executable, "-c", WITHOUT, "train", "distill", *shipped, *tiny, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "distilled" / "planner_lora.safetensors").is_file()


def test_videos_say_what_they_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    monkeypatch.delitem(sys.modules, "flashforward_core.media", raising=False)
    (tmp_path / "walk.mp4").write_bytes(b"a video")
    (tmp_path / "walk.txt").write_text("a walk")
    assert main(["train", "base", "--data", str(tmp_path), "--init", str(ASSETS), "--out", str(tmp_path / "out")]) == 2
    assert "needs the Python package 'av'" in capsys.readouterr().err
