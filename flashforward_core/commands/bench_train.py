"""``bench train``: one optimiser step of each training phase, with its time and its peak of memory.

The steps are those of ``train``, on random clips, prompts and, for the large models, random weights: neither time nor
memory depends on them.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ..engine.lanes import DevicePlan
from ..model.config import MODELS, WanConfig
from ..model.roles import attach_roles, shared_copy
from ..model.transformer import CausalWanTransformer
from ..specs import RolloutSpec, VideoShape
from ..train.base import half_precision
from ..train.distill import DistillConfig, DistillStep, Turn, lora_critic
from ..train.rollout import layout_for
from ..train.sft import SftStep, layouts_for, packed_sigmas
from .bench_models import random_transformer
from .bench_rows import RowBook, commit, machine

SIZES = {"128p": (192, 128), "480p": (832, 480), "720p": (1280, 720)}
PHASES = ("sft", "critic", "student")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--model", choices=MODELS, default="1.3B", help="whose sizes the weights have (1.3B)")
    parser.add_argument("--resolution", choices=SIZES, default="480p", help="of the clips (480p)")
    parser.add_argument("--latents", type=int, default=81, help="latent frames per clip (81)")
    parser.add_argument("--window", type=int, default=21, help="latent frames that teacher and critic judge (21)")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES, help="which steps (all)")
    parser.add_argument("--rank", type=int, default=64, help="of the LoRAs (64)")
    parser.add_argument(
        "--frozen",
        action="store_true",
        help="train LoRAs alone, the critic's too, on bfloat16 weights that student, critic and teacher share",
    )
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
    if args.rank < 1:
        raise ValueError(f"rank={args.rank} is below 1; use rank=64")
    device = torch.device(DevicePlan(devices=(args.device,)).resolve()[0])
    width, height = SIZES[args.resolution]
    spec = RolloutSpec(shape=VideoShape(width=width, height=height, latent_frames=args.latents))
    common = {"model": args.model, "resolution": args.resolution, "latents": args.latents, "devices": 1, "batch": 1}
    common |= {"rank": args.rank, "frozen": args.frozen}
    book = RowBook(path=args.json, machine=machine(device), common=common, commit=args.commit or commit())
    models = _Models(config=MODELS[args.model], device=device, rank=args.rank, frozen=args.frozen)
    if "sft" in args.phases:
        _measure(book, {"sft": _sft(models, spec)}, device=device, repeats=args.repeats)
    both = [name for name in ("critic", "student") if name in args.phases]
    if both:
        module, steps = _distill(models, spec, window=args.window)
        _measure(book, {name: (module, steps[name]) for name in both}, device=device, repeats=args.repeats)
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Models:
    """Makes models with random weights as training keeps them."""

    config: WanConfig
    device: torch.device
    rank: int
    frozen: bool

    def base(self) -> CausalWanTransformer:
        """Return frozen weights: bfloat16 if they stay so, else float32."""
        return random_transformer(
            self.config, device=self.device, dtype=torch.bfloat16 if self.frozen else torch.float32
        )

    def student(self, base: CausalWanTransformer) -> CausalWanTransformer:
        """Return a model with roles, trained whole, or its LoRAs in float32 in the memory of ``base``."""
        model = shared_copy(base) if self.frozen else self.base().requires_grad_(True)
        for factor in attach_roles(model, rank=self.rank, alpha=self.rank):
            factor.data = factor.data.float()
        return model.train()

    def critic(self, teacher: CausalWanTransformer) -> CausalWanTransformer:
        return lora_critic(teacher, rank=self.rank) if self.frozen else self.base().requires_grad_(True)


class _Prompt(nn.Module):
    """Stands for a text encoder whose embeddings were computed before training, as they are for large models."""

    def __init__(self, embedding_1LC: Tensor) -> None:
        super().__init__()
        self.embedding = embedding_1LC

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.embedding


def _embedding(config: WanConfig, generator: torch.Generator) -> Tensor:
    return torch.randn(1, config.text_len, config.text_dim, generator=generator, device=generator.device)


def _sft(models: _Models, spec: RolloutSpec) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return the packed step's module and its loss."""
    config, device = models.config, models.device
    shape, generator = spec.shape, torch.Generator(device).manual_seed(0)
    student = models.student(models.base())
    module = SftStep(
        student,
        _Prompt(_embedding(config, generator)),
        autocast=half_precision(student, device),
        checkpoint_blocks=True,
    )
    steps = [(1, shape.latent_frames, False)]
    layout = layouts_for(steps, width=shape.width, height=shape.height, device=device)[0]
    size = (1, config.channels, len(layout.packing.frames), shape.latent_height, shape.latent_width)
    clean, noise = (torch.randn(size, generator=generator, device=device) for _ in range(2))
    sigma = packed_sigmas(layout.packing, 1, generator, device=device)
    unused = torch.zeros(1, 1, dtype=torch.long, device=device)
    return module, lambda: module(clean, noise, sigma, unused, unused, layout, layout.weights)["loss"]


def _distill(models: _Models, spec: RolloutSpec, *, window: int) -> tuple[nn.Module, dict[str, Callable[[], Tensor]]]:
    """Return the module of student and critic, and the loss of a step of either; both roll out through all stages."""
    device = models.device
    generator = torch.Generator(device).manual_seed(0)
    teacher = models.base()
    module = DistillStep(
        models.student(teacher),
        models.critic(teacher),
        layout_for(spec, device=device),
        DistillConfig(window=window, checkpoint_blocks=True),
        autocast=half_precision(teacher, device),
    )
    text, empty = (_embedding(models.config, generator) for _ in range(2))

    def loss(of_student: bool) -> Tensor:
        turn = Turn(
            of_student=of_student,
            exit_stage=spec.stages.num_stages - 1,
            window_starts=(0,),
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
