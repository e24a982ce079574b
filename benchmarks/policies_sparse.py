"""Measures what sparse attention does to the embedded model's videos: held-out captions, the same seeds for all.

python benchmarks/policies_sparse.py --json benchmarks/results/2026-11-30-sparse-quality.json
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from flashforward_core.commands.bench_quality import held_out_scenes, mean_and_ci95
from flashforward_core.commands.bench_rows import RowBook, commit, machine
from flashforward_core.engine.lanes import DevicePlan
from flashforward_core.engine.rollout import render
from flashforward_core.kv_policy import SPARSE_CHOICES, sparse_named
from flashforward_core.metrics import Evaluation, evaluate, psnr
from flashforward_core.metrics.numbers import METRICS, numbers
from flashforward_core.model.loading import EMBEDDED_SIZE, load_embedded
from flashforward_core.model.roles import Backbone
from flashforward_core.model.vae import StreamingDecoder
from flashforward_core.scenes import parse_caption
from flashforward_core.specs import RolloutSpec, VideoShape

DEVICE = "cpu"
DENSE = "none"
PARTS = ("sky", "hills", "colour", "motion")
"""What faithfulness is the mean of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Video:
    """One video as it was measured, before any coding."""

    evaluation: Evaluation
    frames_FHWC: np.ndarray


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--captions", type=int, default=6, metavar="N", help="held-out captions, 2 or more (6)")
    parser.add_argument("--latents", type=int, default=30, metavar="N", help="length in latent frames (30)")
    parser.add_argument("--schedule", default="flashforward", help="of all videos (flashforward)")
    parser.add_argument(
        "--commit", default="", metavar="TEXT", help="what rows say was measured, where there is no git"
    )
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="add rows to this file")
    args = parser.parse_args(argv)
    if args.captions < 2:
        raise ValueError(f"captions={args.captions} gives no interval; use captions=2 or more")
    backbone = load_embedded(None, device=DEVICE, dtype=torch.float32)
    captions = [scene.caption for scene in held_out_scenes(args.captions)]
    common = {
        "model": "embedded",
        "fingerprint": backbone.fingerprint[:16],
        "resolution": "128x192",
        "latents": args.latents,
        "schedule": args.schedule,
        "captions": len(captions),
        "seed": 0,
        "precision": "float32",
    }
    book = RowBook(path=args.json, machine=machine(DEVICE), common=common, commit=args.commit or commit())
    made: dict[str, list[Video]] = {}
    for name in SPARSE_CHOICES:
        made[name] = [video(backbone, args, caption, seed=seed, sparse=name) for seed, caption in enumerate(captions)]
        by_video = [numbers(each.evaluation) for each in made[name]]
        for metric, unit in METRICS.items():
            _file(book, metric, unit, [each[metric] for each in by_video if metric in each], sparse=name)
        for part in PARTS:
            _file(
                book, f"caption_{part}", "1", [getattr(each.evaluation.scene, part) for each in made[name]], sparse=name
            )
        if name != DENSE:
            pairs = zip(made[name], made[DENSE], strict=True)
            likeness = [float(psnr(ours.frames_FHWC, dense.frames_FHWC).mean()) for ours, dense in pairs]
            _file(book, "psnr", "dB", likeness, sparse=name)
    return 0


def video(backbone: Backbone, args: argparse.Namespace, caption: str, *, seed: int, sparse: str) -> Video:
    """Render a caption as ``render --sparse`` does, decode and measure it."""
    began = time.perf_counter()
    width, height = EMBEDDED_SIZE
    shape = VideoShape(width=width, height=height, latent_frames=args.latents)
    spec = RolloutSpec(shape=shape, schedule=args.schedule, seed=seed, sparse=sparse_named(sparse))
    text = backbone.text_encoder.encode([caption])
    latents_BCFHW = render(backbone, spec, [text], devices=DevicePlan(devices=(DEVICE,))).latents_BCFHW
    frames_FHWC = StreamingDecoder(backbone.vae).decode(latents_BCFHW, None)[0][0].numpy()
    found = evaluate(iter([frames_FHWC]), scene=parse_caption(caption))
    assert found.scene is not None
    took = time.perf_counter() - began
    print(f"{sparse:<6} {found.scene.faithfulness:.3f} {took:.0f} s  {caption}", flush=True)
    return Video(evaluation=found, frames_FHWC=frames_FHWC)


def _file(book: RowBook, metric: str, unit: str, values: Sequence[float], *, sparse: str) -> None:
    if len(values) > 1:
        mean, ci95 = mean_and_ci95(values)
        book.add(metric, mean, unit, ci95=ci95, values=[round(value, 6) for value in values], sparse=sparse)


if __name__ == "__main__":
    raise SystemExit(main())
