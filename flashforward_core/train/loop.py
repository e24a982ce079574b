"""One training loop for every step: accelerate for devices, EMA weights, exact resumption.

A step's data is a function of (seed, step, process), so a resumed run sees what an uninterrupted one would.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

log = logging.getLogger(__name__)

Losses = Mapping[str, Tensor]
"""``loss`` is minimised; the others are logged."""

Batch = Callable[[torch.Generator, int], tuple[object, ...]]
"""(generator on the accelerator's device, step) -> arguments of the module's forward."""

AGREE_EVERY = 20  # steps between looks at the clock, at which all processes agree


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    """How long and how fast to train."""

    out: Path
    """Folder of the run's state; one found there is resumed."""
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
    """Steps between saved states."""
    log_every: int = 50
    """Steps between log lines."""
    lr_scales: Mapping[str, float] = field(default_factory=dict)
    """Factors of the learning rate, by the prefix of parameters' names."""
    max_s: float = math.inf
    """Stop early after this many seconds: the cosine follows whichever of steps and time is further along."""


def step_seed(seed: int, step: int, process: int) -> int:
    """Mix the three into one generator seed; distinct for fewer than 1,024 processes and 2^32 steps."""
    return (seed << 42) + (step << 10) + process


def rate(share: float, step: int, warmup: int) -> float:
    """Learning-rate factor: linear warm-up, then a cosine from 1 to 0.02 as ``share`` of the run goes from 0 to 1."""
    cosine = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
    return min(1.0, (step + 1) / max(1, warmup)) * cosine


def train(
    module: nn.Module,
    config: LoopConfig,
    *,
    accelerator: Accelerator,
    batch: Batch,
    prepare: Callable[[], None] | None = None,
) -> nn.Module:
    """Train ``module``, whose forward returns ``Losses``, on what ``batch`` gives; return its averaged copy.

    Mutates ``module``. ``prepare`` runs once the averaged copy exists, for what must not be copied (compiled parts).
    A state in ``config.out`` is continued; each process averages the weights alike.
    """
    run = _Run(module, config, accelerator=accelerator, prepare=prepare)
    run.resume()
    while run.share < 1.0:
        run.advance(batch)
    run.save()
    return run.finish()


def _groups(module: nn.Module, scales: Mapping[str, float]) -> list[dict[str, object]]:
    """Return the trained parameters in groups of one learning rate each."""
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            scale = next((scale for prefix, scale in scales.items() if name.startswith(prefix)), 1.0)
            groups.setdefault(scale, []).append(parameter)
    return [{"params": parameters, "scale": scale} for scale, parameters in groups.items()]


class _Run:
    """The state of one run; ``step`` and ``seconds`` are saved and restored with it."""

    def __init__(
        self,
        module: nn.Module,
        config: LoopConfig,
        *,
        accelerator: Accelerator,
        prepare: Callable[[], None] | None,
    ) -> None:
        self.config, self.accelerator = config, accelerator
        self.module = module.to(accelerator.device)
        self.ema = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(config.ema_decay))
        if prepare is not None:
            prepare()
        fused = accelerator.device.type == "cuda"
        groups = _groups(module, config.lr_scales)
        optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.99), weight_decay=0.0, fused=fused)
        self.prepared, self.optimizer = accelerator.prepare(module, optimizer)
        accelerator.register_for_checkpointing(self.ema, self)
        self.generator = torch.Generator(accelerator.device)
        self.step, self.share, self.seconds = 0, 0.0, 0.0
        self._began = time.monotonic()

    def state_dict(self) -> dict[str, float]:
        return {"step": self.step, "seconds": self.seconds}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.step, self.seconds = int(state["step"]), float(state["seconds"])
        self._began = time.monotonic() - self.seconds
        self.share = self._share()

    def resume(self) -> None:
        """Continue from the saved state, if there is a whole one."""
        if self._marker.exists():
            self.accelerator.load_state(str(self.config.out / "state"))
            log.info("resumed %s at step %d", self.config.out, self.step)

    def advance(self, batch: Batch) -> None:
        """Take one optimiser step."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr * group["scale"] * rate(self.share, self.step, self.config.warmup)
        self.generator.manual_seed(step_seed(self.config.seed, self.step, self.accelerator.process_index))
        losses: Losses = self.prepared(*batch(self.generator, self.step))
        self.accelerator.backward(losses["loss"])
        self.accelerator.clip_grad_norm_(self.prepared.parameters(), self.config.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.ema.update_parameters(self.module)
        self.step += 1
        self._after_step(losses)

    def _after_step(self, losses: Losses) -> None:
        self.seconds = time.monotonic() - self._began
        if self.step % AGREE_EVERY == 0 or self.step >= self.config.steps:
            self.share = self._share()
        if self.step % self.config.log_every == 0 and self.accelerator.is_main_process:
            shown = " ".join(f"{name} {value.item():.4f}" for name, value in losses.items())
            log.info("step %d/%d %.0fs %s", self.step, self.config.steps, self.seconds, shown)
        if self.step % self.config.save_every == 0:
            self.save()

    def _share(self) -> float:
        """How much of the run is done, 0 to 1: the largest answer of all processes, so that none stops alone."""
        done = self.step >= self.config.steps
        agreed = self.step if done else self.step - self.step % AGREE_EVERY  # so that resuming changes nothing
        share = max(agreed / self.config.steps, self.seconds / self.config.max_s)
        if self.accelerator.num_processes == 1:
            return share
        return float(self.accelerator.gather(torch.tensor([share], device=self.accelerator.device)).max())

    @property
    def _marker(self) -> Path:
        return self.config.out / "state" / "whole.txt"

    def save(self) -> None:
        """Save everything that the run needs to continue; the marker tells a whole state from a broken one."""
        if self.accelerator.is_main_process:
            self._marker.unlink(missing_ok=True)
        self.accelerator.wait_for_everyone()
        self.accelerator.save_state(str(self.config.out / "state"))
        if self.accelerator.is_main_process:
            self._marker.write_text("complete\n")

    def finish(self) -> nn.Module:
        """Let go of the accelerator, so that the next run's state does not hold this one's; return the average."""
        self.accelerator.free_memory()
        self.accelerator._custom_objects.clear()  # free_memory keeps what was registered for checkpoints
        averaged: nn.Module = self.ema.module
        return averaged
