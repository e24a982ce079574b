"""What a run is made from, in words that a saved state keeps: another one is not continued (``LoopConfig.origin``)."""

import argparse
import hashlib
import json
from pathlib import Path

from flashforward_core.model.files import quick_fingerprint
from flashforward_core.train.folder import captioned_videos


def origin_of(args: argparse.Namespace, *, init: Path | None, **more: object) -> dict[str, str]:
    """Say what a run is made from, for a run that goes on to have the same; what may change is left out."""
    made = {"init": weights_of(init), "data": _clips(args), "seed": args.seed, **more}
    return {name: str(value) for name, value in made.items()}


def weights_of(path: Path | None) -> str:
    """Tell weights apart, wherever they lie."""
    if path is None:
        return "noise"
    return quick_fingerprint([path] if path.is_file() else sorted(path.rglob("*.safetensors")))[:16]


def _clips(args: argparse.Namespace) -> str:
    if args.data is None:
        return f"{args.scenes} scenes"
    videos = [(video.path.name, video.path.stat().st_size, video.caption) for video in captioned_videos(args.data)]
    return hashlib.sha256(json.dumps(videos).encode()).hexdigest()[:16]
