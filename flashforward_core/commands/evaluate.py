"""``evaluate``: measure a video file."""

import argparse
import json
from pathlib import Path

from ..media import probe, read_frames
from ..metrics import Evaluation, Layout, evaluate
from ..metrics.plot import require_matplotlib, save_plot
from ..scenes import SceneWords, parse_caption

CHUNK = 16  # frames decoded at once


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("video", type=Path, metavar="VIDEO", help="a video file")
    parser.add_argument(
        "--caption",
        help="what the video should show; palette and faithfulness are measured for captions of the embedded model's "
        'scenes, such as "a red balloon drifts right over green hills at dusk"',
    )
    parser.add_argument("--chunk-frames", type=int, default=3, metavar="N", help="latent frames per chunk (3)")
    parser.add_argument("--anchor-stride", type=int, default=10, metavar="N", help="latent frames between anchors (10)")
    parser.add_argument(
        "--vbench",
        action="store_true",
        help="VBench too: consistency of subject and background, motion, flicker; needs its package and weights",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a PNG; needs matplotlib")


def run(args: argparse.Namespace) -> int:
    """Measure the video and print what was found."""
    if not args.video.is_file():
        raise ValueError(f"video={str(args.video)!r} is no file; give a video file")
    if args.plot is not None:
        _check_plot(args.plot)
    if args.vbench:
        _check_vbench()
    scene = _scene(args.caption)
    try:
        fps = float(probe(args.video).fps)
        layout = Layout(chunk_frames=args.chunk_frames, anchor_stride=args.anchor_stride, fps=fps or 16.0)
        found = evaluate(read_frames(args.video, chunk=CHUNK), scene=scene, layout=layout)
    except ValueError as error:
        raise ValueError(f"{args.video}: {error}") from error
    if args.plot is not None:
        save_plot(found, args.plot, layout=layout, title=args.video.name)
    scores = _vbench(args.video) if args.vbench else {}
    if args.json:
        print(json.dumps(found.to_json() | ({"vbench": scores} if scores else {})))
    else:
        print(table(found))
        for name, score in scores.items():
            print(f"{name.replace('_', ' '):<22}  {score:.2%} (VBench)")
    return 0


def _check_vbench() -> None:
    """Refuse before anything is measured: what is missing is known at once."""
    from ..metrics.vbench import require_vbench

    require_vbench()


def _vbench(video: Path) -> dict[str, float]:
    import torch

    from ..metrics.vbench import vbench_scores

    return vbench_scores(video, device="cuda" if torch.cuda.is_available() else "cpu")


def _check_plot(path: Path) -> None:
    require_matplotlib()
    if path.suffix.lower() != ".png":
        raise ValueError(f"plot={str(path)!r} does not end in .png; use {str(path.with_suffix('.png'))!r}")
    if not path.parent.is_dir():
        raise ValueError(f"plot={str(path)!r} is in a folder that does not exist; make {str(path.parent)!r} first")


def _scene(caption: str | None) -> SceneWords | None:
    """Read the caption; one that is given but describes no scene of the embedded model is an error."""
    scene = None if caption is None else parse_caption(caption)
    if caption is not None and scene is None:
        raise ValueError(
            "caption is none of the embedded model's scenes, so nothing can be checked; leave it out, or use "
            'the form "a red balloon drifts right over green hills at dusk"'
        )
    return scene


def table(found: Evaluation) -> str:
    """Return the findings as lines for people: what, how much, in which unit."""
    rows = [
        ("frames", f"{found.video.frames} frames"),
        ("flicker", f"{found.video.flicker:.2%} of full steadiness from frame to frame (100 % is still)"),
        ("motion", f"{found.video.motion:.1%} of pixels change within 8 frames"),
    ]
    for name, seam in (("chunk", found.seam_chunk), ("anchor", found.seam_anchor)):
        text = "too short to tell"
        if seam is not None:
            text = f"{seam.excess:+.1%} change beside elsewhere; {seam.peak:.1f} times the median power"
        rows.append((f"{name} seams", text))
    rows += [
        ("colour drift", f"{found.drift.colour:.2f} of 255 levels from beginning to end"),
        ("sharpness drift", f"{found.drift.sharpness:+.2f} octaves from beginning to end (-1 is half as sharp)"),
    ]
    if found.scene is not None:
        scene = found.scene
        parts = f"sky {scene.sky:.0%}, hills {scene.hills:.0%}, colours {scene.colour:.0%}, paths {scene.motion:.0%}"
        rows += [
            ("faithfulness", f"{scene.faithfulness:.1%} of what the caption says ({parts})"),
            ("palette error", f"{scene.palette_error:.1f} of 255 levels, {scene.palette_drift:+.1f} levels by the end"),
        ]
    return "\n".join(f"{name:<22}  {value}" for name, value in rows)
