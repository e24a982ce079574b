"""One training loop for every step: accelerate for devices, EMA weights, exact resumption.

A step's data is a function of (seed, step, process), so a resumed run sees what an uninterrupted one would.
Ctrl-C and SIGTERM end a run after the step under way, with its state saved; a later one ends it at once.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flashforward_core.train.progress import Progress
from flashforward_core.train.sharding import gather, local, part_of, shard, whole
from flashforward_core.train.state import read_run, write_run
from flashforward_core.train.stopping import alone, asked_to_stop

log = logging.getLogger(__name__)

Losses = Mapping[str, Tensor]
"""``loss`` is minimised; the others are logged."""

Batch = Callable[[torch.Generator, int], tuple[object, ...]]
"""(generator on the accelerator's device, step) -> arguments of the module's forward."""

Snapshot = Callable[[nn.Module, int], None]
"""(the module with its averaged weights, steps so far): called on the main process whenever the state is saved, with
whole tensors whether the run is sharded or not."""

AGREE_EVERY = 20  # steps between looks at whether to stop early and at whether all is finite


class TrainingDiverged(ValueError):
    """Gradients are no numbers any more; the state saved last is from before."""


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
    """Decay of the averaged weights, which are what is exported; less at first (``averaging``)."""
    clip_norm: float = 1.0
    """Bound of the gradient's norm."""
    seed: int = 0
    save_every: int = 1000
    """Steps between saved states."""
    save_every_s: float = math.inf
    """Seconds between saved states, whichever comes first."""
    origin: Mapping[str, str] = field(default_factory=dict)
    """What the run is made from, in words: a state that was made from something else is not continued."""
    accumulate: int = 1
    """Batches whose gradients one step averages: for batches that do not fit in memory at once."""
    shard: bool = False
    """Whether each process holds a part of the weights (``train/sharding.py``) in the place of a copy."""
    logs: bool = False
    """Whether to write TensorBoard logs into ``out``; needs the extra ``train``."""
    log_every: int = 50
    """Steps between log lines."""
    lr_scales: Mapping[str, float] = field(default_factory=dict)
    """Factors of the learning rate, by the prefix of parameters' names."""
    max_s: float = math.inf
    """Stop early after this many seconds: the cosine follows whichever of steps and time is further along."""

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("accumulate", 1), ("save_every", 1), ("log_every", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} is below {least}; use {name}={least} or more")


def step_seed(seed: int, step: int, process: int) -> int:
    """Mix the three into one generator seed; distinct for fewer than 1,024 processes and 2^32 steps."""
    return (seed << 42) + (step << 10) + process


def rate(share: float, step: int, warmup: int) -> float:
    """Learning-rate factor: linear warm-up, then a cosine from 1 to 0.02 as ``share`` of the run goes from 0 to 1."""
    cosine = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
    return min(1.0, (step + 1) / max(1, warmup)) * cosine


def averaging(step: int, decay: float) -> float:
    """Return how much of the average stays at ``step`` (from 0), 0 at first: it spans a tenth of a short run.

    With 0.996 from the start, the average after 90 steps would be to 70 % the weights of the first one.
    """
    return min(decay, step / (9 + step))


def train(
    module: nn.Module,
    config: LoopConfig,
    *,
    accelerator: Accelerator,
    batch: Batch,
    prepare: Callable[[], None] | None = None,
    snapshot: Snapshot | None = None,
) -> nn.Module:
    """Train ``module``, whose forward returns ``Losses``, on what ``batch`` gives; return it with averaged weights.

    ``batch`` is called ``config.accumulate`` times a step. ``prepare`` runs before the first step, for what changes the
    module (compiled parts). A state in ``config.out`` is continued. Raises ``TrainingDiverged`` when gradients are no
    longer finite; the saved state is then from before. ``ValueError`` says that another run is at work in
    ``config.out``, or that the state there has another ``origin``.
    """
    with alone(config.out, accelerator):
        run = _Run(module, config, accelerator=accelerator, prepare=prepare, snapshot=snapshot)
        run.resume()
        with run.progress, asked_to_stop() as asked:
            while run.share < 1.0:
                run.advance(batch)
                if run.agree(float(asked.is_set())) > 0 and run.share < 1.0:
                    run.save_once()
                    raise KeyboardInterrupt(f"stopped at step {run.step}; run the same again to go on from there")
            run.note()
            run.save_once()
        return run.finish()


def _groups(module: nn.Module, scales: Mapping[str, float]) -> list[dict[str, object]]:
    """Return the trained parameters in groups of one learning rate each."""
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            scale = next((scale for prefix, scale in scales.items() if name.startswith(prefix)), 1.0)
            groups.setdefault(scale, []).append(parameter)
    return [{"params": parameters, "scale": scale} for scale, parameters in groups.items()]


class _Average:
    """The averaged weights of what is trained, tensor by tensor: a sharded module's are sharded like it."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.averaged = [local(parameter.detach()).clone() for parameter in self.parameters]
        self.decay = decay

    @torch.no_grad()
    def update(self, *, step: int) -> None:
        """Take the weights after ``step`` (from 0) in."""
        current = [local(p.detach()) for p in self.parameters]
        torch._foreach_lerp_(self.averaged, current, 1 - averaging(step, self.decay))

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange current and averaged weights."""
        for parameter, averaged in zip(self.parameters, self.averaged, strict=True):
            held = local(parameter.detach())
            current = held.clone()
            held.copy_(averaged)
            averaged.copy_(current)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the module hold its averaged weights."""
        self.swap()
        try:
            yield
        finally:
            self.swap()


class _Run:
    """The state of one run; ``step``, ``seconds`` and the average are saved and restored with it."""

    def __init__(
        self,
        module: nn.Module,
        config: LoopConfig,
        *,
        accelerator: Accelerator,
        prepare: Callable[[], None] | None,
        snapshot: Snapshot | None,
    ) -> None:
        self.config, self.accelerator, self.snapshot = config, accelerator, snapshot
        self.module = module
        if config.shard:
            shard(module, device=accelerator.device)
        else:
            module.to(accelerator.device)
        if prepare is not None:
            prepare()
        self.fused = accelerator.device.type == "cuda"
        groups = _groups(module, config.lr_scales)
        self.optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.99), weight_decay=0.0, fused=self.fused)
        self.prepared = module if config.shard else accelerator.prepare(module)
        self.average = _Average(module, config.ema_decay)
        self.generator = torch.Generator(accelerator.device)
        self.step, self.share, self.seconds = 0, 0.0, 0.0
        self._began, self._saved_at = time.monotonic(), 0.0
        self._losses: Losses | None = None
        self._saved: int | None = None
        self._finite = torch.ones((), dtype=torch.bool, device=accelerator.device)
        self.progress = Progress(
            config.steps, folder=config.out if config.logs else None, shown=accelerator.is_main_process
        )

    def state(self) -> dict[str, Any]:
        """Return everything that the run needs to continue; this process's part of what is trained."""
        trained = self.average.parameters
        return {
            "origin": dict(self.config.origin),
            "step": self.step,
            "seconds": self.seconds,
            "trained": [local(parameter.detach()) for parameter in trained],
            "averaged": self.average.averaged,
            "optimizer": [{k: local(v) for k, v in self.optimizer.state[p].items()} for p in trained],
            "buffers": dict(self.module.named_buffers()),
        }

    @torch.no_grad()
    def resume(self) -> None:
        """Continue from the saved state, if there is a whole one."""
        state = read_run(self._folder, accelerator=self.accelerator, sharded=self.config.shard)
        if state is None:
            return
        self._check_origin(state.get("origin", {}))
        trained = [local(parameter.detach()) for parameter in self.average.parameters]
        if [tensor.shape for tensor in state["trained"]] != [tensor.shape for tensor in trained]:
            raise ValueError(f"{self._folder} holds other weights than this run trains; name another out=")
        for kept, saved in (
            *zip(trained, state["trained"], strict=True),
            *zip(self.average.averaged, state["averaged"], strict=True),
        ):
            kept.copy_(saved)
        for parameter, moments in zip(self.average.parameters, state["optimizer"], strict=True):
            if moments:  # none of what has had no gradient yet
                self.optimizer.state[parameter] = {k: self._placed(k, v, parameter) for k, v in moments.items()}
        for name, buffer in self.module.named_buffers():
            buffer.copy_(state["buffers"][name])
        self.step, self.seconds = int(state["step"]), float(state["seconds"])
        self._began, self._saved_at = time.monotonic() - self.seconds, self.seconds
        self.share = self._share()
        log.info("resumed %s at step %d", self.config.out, self.step)
        self.progress.resume(self.step)

    def _check_origin(self, found: Mapping[str, str]) -> None:
        for name, wanted in self.config.origin.items():
            if found.get(name, wanted) != wanted:
                raise ValueError(
                    f"{self._folder} holds a run with {name}={found[name]}, this one has {name}={wanted}; name another "
                    f"out=, or remove {self.config.out} to begin again"
                )

    def _placed(self, name: str, saved: Tensor, parameter: nn.Parameter) -> Tensor:
        """Return a value of the optimiser's state where it belongs: the count of steps on the CPU unless fused."""
        if name == "step":
            return saved.to(parameter.device) if self.fused else saved
        return part_of(parameter, saved.to(parameter.device))

    def advance(self, batch: Batch) -> None:
        """Take one optimiser step."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr * group["scale"] * rate(self.share, self.step, self.config.warmup)
        self.generator.manual_seed(step_seed(self.config.seed, self.step, self.accelerator.process_index))
        for part in range(self.config.accumulate):
            last = part == self.config.accumulate - 1
            # a sharded run always sums up at once: gradients of all weights would not fit
            with nullcontext() if last or self.config.shard else self.accelerator.no_sync(self.prepared):
                losses: Losses = self.prepared(*batch(self.generator, self.step))
                (losses["loss"] / self.config.accumulate).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.average.parameters, self.config.clip_norm)
        self._finite &= (norm.full_tensor() if isinstance(norm, DTensor) else norm).isfinite()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.average.update(step=self.step)
        self.step += 1
        self._after_step(losses)

    def _after_step(self, losses: Losses) -> None:
        self.seconds = time.monotonic() - self._began
        first, self._losses = self._losses is None, losses
        if self.step % AGREE_EVERY == 0 or self.step >= self.config.steps:
            self.share = self._share()
            self._check_finite()
        if first or self.step % self.config.log_every == 0:
            self.note()
        late = (
            self.config.save_every_s < math.inf
            and self.agree(self.seconds - self._saved_at) >= self.config.save_every_s
        )
        if late or self.step % self.config.save_every == 0:
            self.save()

    def note(self) -> None:
        """Show the last step's losses, once."""
        if self._losses:
            self.progress.note(self.step, self.seconds, self._losses)
            self._losses = {}

    def _check_finite(self) -> None:
        if not bool(self._finite):
            raise TrainingDiverged(
                f"gradients were not finite in the {AGREE_EVERY} steps before step {self.step}; run again with lr "
                f"below {self.config.lr}: it goes on from the state saved before"
            )

    def _share(self) -> float:
        """How much of the run is done, 0 to 1: the largest answer of all processes, so that none stops alone."""
        done = self.step >= self.config.steps
        agreed = self.step if done else self.step - self.step % AGREE_EVERY  # so that resuming changes nothing
        return self.agree(max(agreed / self.config.steps, self.seconds / self.config.max_s))

    def agree(self, number: float) -> float:
        """Return the largest of all processes' numbers."""
        if self.accelerator.num_processes == 1:
            return number
        return float(self.accelerator.gather(torch.tensor([number], device=self.accelerator.device)).max())

    @property
    def _folder(self) -> Path:
        return self.config.out / "state"

    def save(self) -> None:
        """Save everything that the run needs to continue, and hand out a snapshot."""
        self._check_finite()
        write_run(self._folder, self.state(), accelerator=self.accelerator, sharded=self.config.shard)
        self._saved_at, self._saved = self.seconds, self.step
        if self.snapshot is not None:
            main = self.accelerator.is_main_process
            with self.average.in_place(), whole(self.module, keep=main):
                if main:
                    self.snapshot(self.module, self.step)
            self.accelerator.wait_for_everyone()

    def save_once(self) -> None:
        """Save, unless this step's state is there."""
        if self._saved != self.step:
            self.save()

    def finish(self) -> nn.Module:
        """Let go of the accelerator, so that the next run does not hold this one's weights; return the average.

        Of a sharded module only the main process has whole tensors then, on the CPU.
        """
        self.average.swap()
        gather(self.module, keep=self.accelerator.is_main_process)
        self.accelerator.free_memory()
        return self.module
