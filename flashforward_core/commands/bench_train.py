"""``bench train``: one optimiser step of each training phase, with its time and its peak of memory.

The steps are those of ``train``, on random clips, prompts and, for the large models, random weights: neither time nor
memory depends on them.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from ..engine.lanes import DevicePlan
from ..model.config import MODELS, WanConfig
from ..model.roles import attach_roles
from ..model.transformer import CausalWanTransformer
from ..specs import RolloutSpec, VideoShape
from ..train.distill import DistillConfig, DistillStep, Turn
from ..train.rollout import layout_for
from ..train.sft import SftStep, layouts_for, packed_sigmas
from .bench_models import random_transformer
from .bench_rows import RowBook, commit, machine

RANK = 64
SIZES = {"128p": (192, 128), "480p": (832, 480), "720p": (1280, 720)}
PHASES = ("sft", "critic", "student")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--model", choices=MODELS, default="1.3B", help="whose sizes the weights have (1.3B)")
    parser.add_argument("--resolution", choices=SIZES, default="480p", help="of the clips (480p)")
    parser.add_argument("--latents", type=int, default=81, help="latent frames per clip (81)")
    parser.add_argument("--window", type=int, default=21, help="latent frames that teacher and critic judge (21)")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES, help="which steps (all)")
    parser.add_argument("--repeats", type=int, default=1, help="measured steps, after one that is not (1)")
    parser.add_argument("--device", default="auto", help="auto (the first CUDA device, or the CPU), cpu, cuda:0 (auto)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add rows to this file, one after each measurement")
    parser.add_argument(
        "--commit", default="", metavar="TEXT", help="what rows say was measured, where there is no git"
    )


def run(args: argparse.Namespace) -> int:
    """Measure the chosen phases."""
    if args.repeats < 1:
        raise ValueError(f"repeats={args.repeats} is below 1; use repeats=1 or more")
    device = torch.device(DevicePlan(devices=(args.device,)).resolve()[0])
    width, height = SIZES[args.resolution]
    spec = RolloutSpec(shape=VideoShape(width=width, height=height, latent_frames=args.latents))
    common = {"model": args.model, "resolution": args.resolution, "latents": args.latents, "devices": 1, "batch": 1}
    book = RowBook(
        path=args.json, machine=machine(device), common=common | {"rank": RANK}, commit=args.commit or commit()
    )
    config = MODELS[args.model]
    if "sft" in args.phases:
        _measure(book, {"sft": _sft(config, spec, device)}, device=device, repeats=args.repeats)
    both = [name for name in ("critic", "student") if name in args.phases]
    if both:
        module, steps = _distill(config, spec, device, window=args.window)
        _measure(book, {name: (module, steps[name]) for name in both}, device=device, repeats=args.repeats)
    return 0


def _trained(config: WanConfig, device: torch.device, *, roles: bool) -> CausalWanTransformer:
    """Return random weights in float32, as training keeps them, all of them trained."""
    model = random_transformer(config, device=device, dtype=torch.float32)
    if roles:
        attach_roles(model, rank=RANK, alpha=RANK)
    return model.to(device).requires_grad_(True).train()


class _Prompt(nn.Module):
    """Stands for a text encoder whose embeddings were computed before training, as they are for large models."""

    def __init__(self, embedding_1LC: Tensor) -> None:
        super().__init__()
        self.embedding = embedding_1LC

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.embedding


def _embedding(config: WanConfig, generator: torch.Generator) -> Tensor:
    return torch.randn(1, config.text_len, config.text_dim, generator=generator, device=generator.device)


def _sft(config: WanConfig, spec: RolloutSpec, device: torch.device) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return the packed step's module and its loss."""
    shape, generator = spec.shape, torch.Generator(device).manual_seed(0)
    module = SftStep(
        _trained(config, device, roles=True),
        _Prompt(_embedding(config, generator)),
        autocast=device.type == "cuda",
        checkpoint_blocks=True,
    )
    steps = [(1, shape.latent_frames, False)]
    layout = layouts_for(steps, width=shape.width, height=shape.height, device=device)[0]
    size = (1, config.channels, len(layout.packing.frames), shape.latent_height, shape.latent_width)
    clean, noise = (torch.randn(size, generator=generator, device=device) for _ in range(2))
    sigma = packed_sigmas(layout.packing, 1, generator, device=device)
    unused = torch.zeros(1, 1, dtype=torch.long, device=device)
    return module, lambda: module(clean, noise, sigma, unused, unused, layout, layout.weights)["loss"]


def _distill(
    config: WanConfig, spec: RolloutSpec, device: torch.device, *, window: int
) -> tuple[nn.Module, dict[str, Callable[[], Tensor]]]:
    """Return the module of student and critic, and the loss of a step of either; both roll out through all stages."""
    generator = torch.Generator(device).manual_seed(0)
    teacher = random_transformer(config, device=device, dtype=torch.float32)  # as train distill keeps it
    module = DistillStep(
        _trained(config, device, roles=True),
        _trained(config, device, roles=False),
        layout_for(spec, device=device),
        DistillConfig(window=window, checkpoint_blocks=True),
        autocast=device.type == "cuda",
    )
    text, empty = (_embedding(config, generator) for _ in range(2))

    def loss(of_student: bool) -> Tensor:
        turn = Turn(
            of_student=of_student,
            exit_stage=spec.stages.num_stages - 1,
            window_start=0,
            student_text=text,
            teacher_text=text,
            empty_text=empty,
            real=None,
            teacher=teacher,
            generator=generator,
        )
        found: Tensor = module(turn)["loss"]
        return found

    return module, {"critic": lambda: loss(False), "student": lambda: loss(True)}


def _measure(
    book: RowBook,
    steps: dict[str, tuple[nn.Module, Callable[[], Tensor]]],
    *,
    device: torch.device,
    repeats: int,
) -> None:
    """Time whole optimiser steps of modules that share their weights."""
    module = next(iter(steps.values()))[0]
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=device.type == "cuda")
    for phase, (_, loss) in steps.items():
        for number in range(repeats + 1):
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            began = time.perf_counter()
            value = loss()
            value.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            finite = bool(torch.isfinite(value))  # waits for the device
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds = time.perf_counter() - began
            if not finite:
                raise ValueError(f"the loss of phase {phase} is not finite; measure with another device or model")
            if number == 0:
                continue  # the first one makes the optimiser's state and finds kernels
            book.add("train_step_s", seconds, "s", phase=phase)
            if device.type == "cuda":
                peak = torch.cuda.max_memory_allocated(device) / 2**30
                book.add("train_peak_gib", peak, "GiB", phase=phase)
