"""Four dimensions of VBench for one video file, by its own package and weights, which must be there already.

Source: VBench 0.1.5, custom input, local weights. The package fetches what it misses; here it is refused by name.
"""

import contextlib
import importlib
import json
import pickle
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

DIMENSIONS = ("subject_consistency", "background_consistency", "motion_smoothness", "temporal_flickering")
"""Those that need neither a prompt nor more than an image encoder and an interpolator; each a share of 1."""

INSTALL = (
    "pip install --no-deps vbench openai-clip && "
    "pip install decord opencv-python-headless omegaconf imageio ftfy regex torchvision 'setuptools<70'"
)
"""Without vbench's own pins (numpy<2, transformers==4.33.2), for other dimensions; this project needs newer ones."""


def require_vbench() -> Any:
    """Return VBench's class. Raises ``ValueError`` that says what to install, or which weights to put where."""
    try:
        package, utils = (importlib.import_module(name) for name in ("vbench", "vbench.utils"))
        for dimension in DIMENSIONS:
            importlib.import_module(f"vbench.{dimension}")
    except ImportError as error:
        raise ValueError(f"vbench=True cannot be used ({error}); install it with: {INSTALL}") from error
    missing = [str(path) for path in _weights(Path(utils.CACHE_DIR)) if not path.is_file()]
    if missing:
        raise ValueError(
            f"vbench=True lacks {', '.join(missing)}; get them as "
            "https://github.com/Vchitect/VBench/tree/master/pretrained says, or set VBENCH_CACHE_DIR to where they are"
        )
    return package.VBench


def _weights(cache: Path) -> tuple[Path, ...]:
    """Return every file that the dimensions read from VBench's ``cache`` or that torch.hub would fetch for them."""
    dino = "dino_vitbase16_pretrain.pth"
    return (
        cache / "clip_model" / "ViT-B-32.pt",
        cache / "amt_model" / "amt-s.pth",
        cache / "dino_model" / "facebookresearch_dino_main" / "hubconf.py",
        cache / "dino_model" / dino,
        Path(torch.hub.get_dir()) / "checkpoints" / dino,  # the repository's own code reads it there
    )


def vbench_scores(video: Path, *, device: str) -> dict[str, float]:
    """Return the score of each of ``DIMENSIONS`` for an mp4 file, 0 to 1; ``device`` is ``cuda`` or ``cpu``.

    What VBench prints goes to stderr. Raises ``ValueError`` for another kind of file and as ``require_vbench`` does.
    """
    if video.suffix != ".mp4":
        raise ValueError(f"vbench=True reads files that end in .mp4, not {video.name!r}; give it one")
    bench = require_vbench()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        try:
            bench(device, "", folder).evaluate(
                videos_path=str(video), name="video", dimension_list=list(DIMENSIONS), local=True, mode="custom_input"
            )
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"vbench's weights hold more than tensors ({str(error).splitlines()[0]}); if you trust them, set "
                "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1"
            ) from error
        found = json.loads((Path(folder) / "video_eval_results.json").read_text(encoding="utf-8"))
    return {dimension: float(found[dimension][0]) for dimension in DIMENSIONS}
