"""One training loop for every step: accelerate for devices, EMA weights, exact resumption.

A step's data is a function of (seed, step, process), so a resumed run sees what an uninterrupted one would.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

log = logging.getLogger(__name__)

Losses = Mapping[str, Tensor]
"""``loss`` is minimised; the others are logged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    """How long and how fast to train."""

    out: Path
    """Folder of the checkpoints; a state found there is resumed."""
    steps: int
    """Optimiser steps in all."""
    lr: float
    """Peak learning rate."""
    warmup: int = 100
    """Steps of linear warm-up; a cosine falls to 2 % of the peak after it."""
    ema_decay: float = 0.996
    """Decay of the averaged weights, which are what is exported."""
    clip_norm: float = 1.0
    """Bound of the gradient's norm."""
    seed: int = 0
    save_every: int = 1000
    """Steps between checkpoints."""
    log_every: int = 50
    """Steps between log lines."""
    max_s: float = math.inf
    """Stop early after this many seconds: the cosine follows whichever of steps and time is further along."""


AGREE_EVERY = 20  # steps between looks at the clock, at which all processes agree


def step_seed(seed: int, step: int, process: int) -> int:
    """Mix the three into one generator seed; distinct for fewer than 1,024 processes and 2^32 steps."""
    return (seed << 42) + (step << 10) + process


def rate(progress: float, step: int, warmup: int) -> float:
    """Learning-rate factor: linear warm-up, then a cosine from 1 to 0.02 over ``progress`` 0..1."""
    cosine = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return min(1.0, (step + 1) / max(1, warmup)) * cosine


class _Progress:
    """The step counter, in a form that accelerate saves and restores."""

    def __init__(self) -> None:
        self.step = 0
        self.seconds = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"step": self.step, "seconds": self.seconds}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.step, self.seconds = int(state["step"]), float(state["seconds"])


def train(
    module: nn.Module,
    config: LoopConfig,
    *,
    accelerator: Accelerator,
    batch: Callable[[torch.Generator, int], tuple[object, ...]],
    prepare: Callable[[], None] | None = None,
) -> nn.Module:
    """Train ``module``, whose forward takes ``batch(generator, step)`` and returns ``Losses``; return the EMA module.

    ``prepare`` runs once the averaged copy exists, for what must not be copied (compiled parts).
    The generator lives on the accelerator's device. Mutates ``module``. Interrupted runs continue from the last
    state in ``config.out``; the EMA weights are averaged on every process alike.
    """
    params = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=config.lr, betas=(0.9, 0.99), weight_decay=0.0, fused=accelerator.device.type == "cuda")
    module.to(accelerator.device)
    ema = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(config.ema_decay))
    if prepare is not None:
        prepare()
    progress = _Progress()
    prepared, optimizer = accelerator.prepare(module, optimizer)
    accelerator.register_for_checkpointing(ema, progress)
    state = config.out / "state"
    if (state / "done.txt").exists():
        accelerator.load_state(str(state))
        log.info("resumed %s at step %d", config.out, progress.step)
    _run(prepared, ema, module, optimizer, progress, config, accelerator=accelerator, batch=batch)
    _save(state, accelerator)
    accelerator.free_memory()  # else the next loop's state would hold this one's modules too
    accelerator._custom_objects.clear()
    return ema.module


def _run(prepared, ema, module, optimizer, progress, config, *, accelerator, batch) -> None:  # type: ignore[no-untyped-def]
    began = time.monotonic() - progress.seconds
    generator = torch.Generator(accelerator.device)
    share = 0.0
    while progress.step < config.steps:
        if progress.step % AGREE_EVERY == 0:
            elapsed = (time.monotonic() - began) / config.max_s
            share = _largest(max(progress.step / config.steps, elapsed), accelerator)
            if share >= 1.0:
                break
        for group in optimizer.param_groups:
            group["lr"] = config.lr * rate(share, progress.step, config.warmup)
        generator.manual_seed(step_seed(config.seed, progress.step, accelerator.process_index))
        losses = prepared(*batch(generator, progress.step))
        accelerator.backward(losses["loss"])
        accelerator.clip_grad_norm_(prepared.parameters(), config.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        ema.update_parameters(module)
        progress.step += 1
        progress.seconds = time.monotonic() - began
        if progress.step % config.log_every == 0 and accelerator.is_main_process:
            shown = " ".join(f"{name} {value.item():.4f}" for name, value in losses.items())
            log.info("step %d/%d %.0fs %s", progress.step, config.steps, progress.seconds, shown)
        if progress.step % config.save_every == 0:
            _save(config.out / "state", accelerator)


def _largest(value: float, accelerator: Accelerator) -> float:
    """Return the largest ``value`` of all processes, so that none stops alone."""
    if accelerator.num_processes == 1:
        return value
    return float(accelerator.gather(torch.tensor([value], device=accelerator.device)).max())


def _save(state: Path, accelerator: Accelerator) -> None:
    """Save everything that the run needs to continue; the marker tells a whole state from a broken one."""
    marker = state / "done.txt"
    if accelerator.is_main_process:
        marker.unlink(missing_ok=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(state))
    if accelerator.is_main_process:
        marker.write_text("complete\n")
