"""How one lane runs a forward: eagerly, with compiled blocks, or by replaying a recording. Same arithmetic each way."""

import contextlib
import importlib.util
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..graph.task import ForwardTask, Role
from ..kv.bank import BankView
from ..kv.pages import View
from ..kv.policies import PolicyView
from ..kv.sparse import SparseForward
from ..model.attention import AttentionBackend
from ..model.compiled import PLAIN, compiled_parts
from ..model.transformer import BlockParts, CausalWanTransformer, KVContext, TextContext
from .events import Launches
from .graphs import CudaRecorder, Inputs, Recorder, Recordings, Rerun, captures_work
from .memory import RECORDED_BLOCK_BYTES
from .pair_view import PairView
from .recorded_parts import ALONE_BLOCK_BYTES, RecordedParts, block_bytes
from .transfer import stream_for

CHOICES = ("auto", "on", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class FastOptions:
    """What may be done to make forwards faster."""

    compile: str = "auto"
    """Compile the blocks' parts: ``on``, ``off``, or ``auto``, which is on for CUDA devices."""
    graphs: str = "auto"
    """Record forwards and replay them: ``on``, ``off``, or ``auto``, which is on for several CUDA lanes.

    It is on for one, too, if launching its blocks takes longer than they do: if they are small. It is off with the
    allocator cudaMallocAsync: a capture's memory does not exist yet, so Triton refuses to launch on it, and freeing
    what a failed capture asked for ends the process.
    """
    channels_last: str = "auto"
    """Decode in channels-last memory: ``on``, ``off``, or ``auto``, which is on for CUDA devices."""
    batch_diagonal: bool = False
    """Run two forwards that are ready on one lane as one batch (``engine.paired``), which rounds differently."""

    def __post_init__(self) -> None:
        for name in ("compile", "graphs", "channels_last"):
            if getattr(self, name) not in CHOICES:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; use one of: {', '.join(CHOICES)}")

    def compiles(self, device: torch.device) -> bool:
        if self.compile == "auto":  # torch's compiler for CUDA needs Triton; without it there is nothing to try
            return device.type == "cuda" and importlib.util.find_spec("triton") is not None
        return self.compile == "on"

    def decodes_channels_last(self, device: torch.device) -> bool:
        return self.channels_last == "on" or (self.channels_last == "auto" and device.type == "cuda")

    def records(self, device: torch.device) -> bool:
        """Whether to record on ``device``. Raises ``ValueError`` where it was asked for and cannot be."""
        if device.type == "cuda" and self.graphs != "off" and not captures_work():
            if self.graphs == "on":
                raise ValueError(
                    "graphs='on' cannot record with the allocator cudaMallocAsync; use graphs='auto', or start ComfyUI "
                    "with --disable-cuda-malloc"
                )
            return False
        return self.graphs == "on" or (self.graphs == "auto" and device.type == "cuda")


Kind = tuple[Role | None, int, tuple[str, int, Hashable]]
"""Role, prompt, and memory in use (bank, own latent frames, ranges). One kind's forwards differ in values only."""


def kind_of(task: ForwardTask, view: View | BankView, *, prompt: int) -> Kind:
    """Return what one recording can serve."""
    place = view.kind if isinstance(view, BankView) else (view.own.bank, view.own.frames, view.ranges)
    return (task.role, prompt, place)


class Forwarder:
    """Runs the forwards of one lane, in its thread."""

    def __init__(
        self,
        models: Mapping[Role, CausalWanTransformer],
        attention: AttentionBackend,
        *,
        device: torch.device,
        compiles: bool = False,
        recorder: Recorder | None = None,
        uses: Counter[Kind] | None = None,
        turn: "threading.RLock | None" = None,
    ) -> None:
        """With ``recorder`` forwards are recorded, whole or in parts; ``uses`` says how often each kind will run.

        ``turn`` is shared by lanes that record: one at a time does, or launches what might have to be compiled.
        """
        self._models = models
        self._attention = attention
        self._device = device
        self._compiles = compiles
        self._recorder = recorder
        self._recordings = None if recorder is None else Recordings(recorder, uses or Counter())
        self._recorded_parts: dict[tuple[Role | None, int], RecordedParts | None] = {}
        self._turn = turn or threading.RLock()
        self.launches = Launches()

    def __call__(
        self,
        task: ForwardTask,
        x_BCFHW: Tensor,
        *,
        timestep_BF: Tensor,
        frames: Tensor,
        text: TextContext,
        prompt: int,
        view: Any,
        sparse: SparseForward | None = None,
    ) -> Tensor:
        """Return the velocity; use it before the next call, which overwrites it. ``prompt`` is the index of its text.

        ``view`` is what ``LaneBanks.open`` gave; its own page is written. ``sparse`` attends, if given; what it skips
        depends on the values, so such a forward is not recorded.
        """
        with self._timed():
            compute = partial(self._compute, task, text=text, sparse=sparse)
            inputs = Inputs(x_BCFHW, timestep_BF, frames)
            if sparse is not None or not isinstance(view, BankView):
                return self._eager(inputs, compute, view)
            return self._over_bank(task, inputs, compute, prompt, view)

    def pair(
        self,
        tasks: Sequence[ForwardTask],
        inputs: Inputs,
        *,
        text: TextContext,
        prompt: int,
        views: Sequence[BankView],
        view: Any,
    ) -> Tensor:
        """Return the velocities of two forwards as one batch, [2B, C, F, H, W].

        ``view`` extends and attends for both of ``views``. A pair is not recorded.
        """
        with self._timed():
            v = self._eager(inputs, partial(self._compute, tasks[0], text=text, sparse=None), view)
            for task, own in zip(tasks, views, strict=True):
                if self._recordings is not None:
                    self._recordings.count(kind_of(task, own, prompt=prompt))
            return v

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """Count the time in here as launching, but for that of waiting."""
        began, waited_s = time.perf_counter(), self.launches.waited_s
        try:
            yield
        finally:
            waited_s = self.launches.waited_s - waited_s
            self.launches.launching_s += time.perf_counter() - began - waited_s

    @contextlib.contextmanager
    def _my_turn(self) -> Iterator[None]:
        asked = time.perf_counter()
        with self._turn:
            self.launches.waited_s += time.perf_counter() - asked
            yield

    def _over_bank(
        self, task: ForwardTask, inputs: Inputs, compute: Callable[..., Tensor], prompt: int, view: BankView
    ) -> Tensor:
        """Replay a forward that is recorded; launch another in parts, and then record it if that pays."""
        recordings = self._recordings
        if recordings is None:
            return self._eager(inputs, compute, view)
        kind, indexed = kind_of(task, view, prompt=prompt), view.indexed()
        if indexed is not None and recordings.has(kind):
            self.launches.replayed += 1
            v = recordings.replay(kind, inputs, indexed)
            recordings.count(kind)
            return v
        recordings.count(kind)
        parts = self._parts_for(task, inputs)
        if parts is None:
            v = self._eager(inputs, compute, view)
        else:
            self.launches.in_parts += 1
            v = compute(inputs, view, parts=parts.parts)
        # Its device has work now, but all wait for the first. If somebody is recording, the next of this kind will do.
        pays = task.index > 0 and recordings.pays(kind)
        if indexed is not None and pays and self._turn.acquire(blocking=False):
            try:
                self.launches.recorded += recordings.record(kind, inputs, indexed, compute)
            finally:
                self._turn.release()
        return v

    def _parts_for(self, task: ForwardTask, inputs: Inputs) -> RecordedParts | None:
        """Return the recorded parts for this role and size, None where blocks are too large for that to pay."""
        assert task.role is not None and self._recorder is not None
        key = task.role, inputs.x_BCFHW.shape[2]
        if key not in self._recorded_parts:
            parts = self._parts(task.role, inputs.x_BCFHW) or PLAIN
            small = block_bytes(self._models[task.role]) <= RECORDED_BLOCK_BYTES
            self._recorded_parts[key] = RecordedParts(parts, self._recorder, self._my_turn) if small else None
        return self._recorded_parts[key]

    def _eager(self, inputs: Inputs, compute: Callable[..., Tensor], view: Any) -> Tensor:
        """Launch piece by piece, which may compile: not while somebody records."""
        self.launches.eager += 1
        with self._my_turn():
            return compute(inputs, view)

    def _compute(
        self,
        task: ForwardTask,
        inputs: Inputs,
        view: KVContext,
        *,
        text: TextContext,
        sparse: SparseForward | None,
        parts: BlockParts | None = None,
    ) -> Tensor:
        assert task.role is not None
        attend = self._attention.attend
        dense = attend if sparse is None else sparse.self_attend
        self_attend = view.attend if isinstance(view, PolicyView | PairView) else dense
        v: Tensor = self._models[task.role](
            inputs.x_BCFHW,
            timestep_BF=inputs.timestep_BF,
            text=text,
            frames=inputs.frames,
            role=task.role,
            kv=view,
            self_attend=self_attend,
            cross_attend=attend if sparse is None else sparse.cross_attend,
            parts=parts or self._parts(task.role, inputs.x_BCFHW),
        )
        return v

    def _parts(self, role: Role, x_BCFHW: Tensor) -> BlockParts | None:
        return compiled_parts(self._device, role, tuple(x_BCFHW.shape)) if self._compiles else None

    def free(self) -> None:
        """Drop recordings; only when the device has finished."""
        for parts in filter(None, self._recorded_parts.values()):
            parts.free()
        self._recorded_parts.clear()
        if self._recordings is not None:
            self._recordings.free()


class Forwarders:
    """Makes the forwarders of a rollout's lanes."""

    def __init__(self, options: FastOptions, *, uses: Iterable[Kind], devices: Iterable[torch.device]) -> None:
        """``uses`` has the kind of every forward that is going to run, ``devices`` one entry per lane."""
        self._options = options
        self._uses = Counter(uses)
        recording = [options.records(device) for device in devices]
        self._alone = options.graphs == "auto" and sum(recording) == 1
        self._lock = threading.RLock()
        self._count = itertools.count()

    def make(
        self, models: Mapping[Role, CausalWanTransformer], attention: AttentionBackend, *, device: torch.device
    ) -> Forwarder:
        """Return a forwarder for a lane on ``device``. On a CPU recordings run their forward again."""
        recorder: Recorder | None = None
        turn = None
        quick = self._alone and block_bytes(models[Role.RENDERER]) > ALONE_BLOCK_BYTES
        if self._options.records(device) and not quick:
            name = f"recording {next(self._count)}"
            recorder, turn = CudaRecorder(stream_for(device, name)) if device.type == "cuda" else Rerun(), self._lock
        compiles = self._options.compiles(device)
        return Forwarder(
            models, attention, device=device, compiles=compiles, recorder=recorder, uses=self._uses, turn=turn
        )
