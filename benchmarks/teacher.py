"""What a teacher of distillation makes itself: the student ends up near it, so look before hours go into that.

    python benchmarks/teacher.py TEACHER --guidance 0 0.5 1 --captions 32

TEACHER is a base.pt, or an exported folder, taken without its roles. Its bidirectional samples of held-out captions are
measured as ``bench quality`` measures videos, for each weight of guidance. A teacher that was trained on crops from
anywhere begins most clips in their middle, so their first second tells nothing of it: the settled palette error leaves
that out.
"""

import argparse
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from flashforward_core.commands.bench_quality import held_out_scenes
from flashforward_core.metrics.batched import BatchedProbe, Measured
from flashforward_core.metrics.numbers import numbers
from flashforward_core.model.loading import EMBEDDED_SIZE, load_embedded
from flashforward_core.model.vae import StreamingDecoder
from flashforward_core.scenes import FPS, Scene, parse_caption
from flashforward_core.specs import VideoShape, shifted_sigma
from flashforward_core.train.distill import DistillConfig, Judge
from flashforward_core.train.weights import base_model

SHOWN = ("faithfulness", "motion", "flicker", "palette_error", "settled_palette_error")


@torch.no_grad()
def sample(judge: Judge, noise: Tensor, *, steps: int) -> Tensor:
    """Follow the velocity from ``noise`` [B, C, F, h, w] by Euler's method."""
    x = noise
    levels = (shifted_sigma(1 - step / steps, DistillConfig().shift) for step in range(steps + 1))
    frames = torch.arange(noise.shape[2], device=noise.device)
    for now, after in pairwise(levels):
        sigma = torch.full((len(x),), now, device=x.device)
        x = x + (after - now) * judge.velocity(x, sigma, frames=frames)
    return x


def measured(latents: Tensor, scenes: Sequence[Scene], *, device: str) -> list[Measured]:
    words = [found for scene in scenes if (found := parse_caption(scene.caption)) is not None]
    probe, state = BatchedProbe(words, device=device), None
    decoder = StreamingDecoder(load_embedded(None, device=device).vae)
    for part in torch.split(latents, 8, dim=2):
        frames, state = decoder.decode_in_place(part, state)
        probe(frames)
    return probe.report()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher", type=Path)
    parser.add_argument("--guidance", type=float, nargs="+", default=[0.0, 0.5, 1.0])
    parser.add_argument("--captions", type=int, default=32)
    parser.add_argument("--latents", type=int, default=21)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    model, text = base_model(args.teacher, argparse.Namespace(wan=None), Accelerator(cpu=args.device == "cpu"))
    model.to(args.device).eval().requires_grad_(False)
    scenes = held_out_scenes(args.captions)
    prompts = text.encode([scene.caption for scene in scenes]).to(args.device)
    empty = text.encode([""]).to(args.device)
    shape = VideoShape(width=EMBEDDED_SIZE[0], height=EMBEDDED_SIZE[1], latent_frames=args.latents)
    size = (args.captions, model.config.channels, args.latents, shape.latent_height, shape.latent_width)
    noise = torch.randn(size, generator=torch.Generator(args.device).manual_seed(1), device=args.device)
    print("guidance", *SHOWN, sep="\t")
    for guidance in args.guidance:
        judge = Judge(model=model, text=prompts, empty=empty, guidance=guidance)
        found = measured(sample(judge, noise, steps=args.steps), scenes, device=args.device)
        rows = [
            {**numbers(each.evaluation), "settled_palette_error": each.palette_error[FPS:].mean()} for each in found
        ]
        print(guidance, *(f"{np.mean([row[name] for row in rows]):.4f}" for name in SHOWN), sep="\t", flush=True)


if __name__ == "__main__":
    main()
