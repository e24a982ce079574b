"""Forwards recorded once and replayed: on CUDA one launch instead of some thousands, so lanes need little of Python.

A recorded forward reads and writes the same memory every time. What changes goes into fixed tensors before a replay:
the latents, the timestep, the positions and the tokens of the forward's own page. The number of keys and the bank are
fixed, so each needs a recording of its own.
"""

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from ..kv.bank import IndexedView

log = logging.getLogger(__name__)

MIN_REPLAYS = 5
"""A recording takes Python about as long as launching two forwards piece by piece: fewer replays do not pay."""

Body = Callable[[], None]
Velocity = Callable[["Inputs", Any], Tensor]


class Recorder(Protocol):
    """Turns a body into something that does the same again on the same memory."""

    def record(self, body: Body, *, run: bool = True) -> Body | None:
        """Run ``body`` once and return what repeats it, or None if that cannot be had.

        Without ``run`` only record it: its like has run before.
        """
        ...

    def free(self) -> None:
        """Drop all recordings; only when the device has finished with them."""
        ...


class Rerun:
    """Repeats a body by running it again: what recordings do, on any device, for tests."""

    def record(self, body: Body, *, run: bool = True) -> Body:
        if run:
            body()
        return body

    def free(self) -> None:
        pass


class CudaRecorder:
    """Captures CUDA graphs on a stream that nothing else uses; they share one memory pool."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._graphs: list[Any] = []

    def record(self, body: Body, *, run: bool = True) -> Body | None:
        lane = torch.cuda.current_stream(self._stream.device)
        if run:
            self._stream.wait_stream(lane)
        with torch.cuda.stream(self._stream):
            if run:
                body()  # the real thing, and the warm-up: kernels load and libraries take their workspace
            repeat = captured(self._capture, body)
        if run:
            lane.wait_stream(self._stream)
        return repeat

    def _capture(self, body: Body) -> Body:
        pool = self._graphs[0].pool() if self._graphs else None
        graph = torch.cuda.CUDAGraph()
        # torch.cuda.graph would wait for all devices and empty the allocator's cache.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            body()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # of a broken capture; what broke it is told
                graph.capture_end()
            raise
        graph.capture_end()
        self._graphs.append(graph)  # until the end: a graph must not go while it runs
        replay: Body = graph.replay
        return replay

    def free(self) -> None:
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()


def captures_work() -> bool:
    """Whether torch's allocator lets compiled forwards be captured: all but cudaMallocAsync do (``FastOptions``)."""
    return not torch.version.cuda or torch.cuda.get_allocator_backend() != "cudaMallocAsync"


def captured(capture: Callable[[Body], Body], body: Body) -> Body | None:
    """Return the recording of ``body``, or None when it cannot be captured, after a warning."""
    try:
        return capture(body)
    except RuntimeError as error:
        _warn(str(error).splitlines()[0])
        return None


@cache
def _warn(reason: str) -> None:
    """Warn once per process and reason."""
    log.warning("forwards cannot be recorded here (%s) and are launched piece by piece; set graphs='off'", reason)


def _writable(tensor: Tensor) -> Tensor:
    """Return a copy that may be written in inference mode and outside of it."""
    with torch.inference_mode(False):
        return tensor.clone()


@dataclass(frozen=True, slots=True)
class Inputs:
    """What changes from one forward to the next of the same kind."""

    x_BCFHW: Tensor
    timestep_BF: Tensor
    frames: Tensor
    """Absolute latent indices [F]."""

    def tensors(self) -> tuple[Tensor, ...]:
        return self.x_BCFHW, self.timestep_BF, self.frames

    def clone(self) -> "Inputs":
        return Inputs(*(_writable(tensor) for tensor in self.tensors()))

    def fill(self, source: "Inputs") -> None:
        for target, tensor in zip(self.tensors(), source.tensors(), strict=True):
            target.copy_(tensor, non_blocking=True)


@dataclass(slots=True)
class _Recording:
    inputs: Inputs
    own: Tensor
    output: Tensor
    replay: Body


class Recordings:
    """One lane's recordings, by kind of forward. ``uses`` says how often each kind is going to run."""

    def __init__(self, recorder: Recorder, uses: Mapping[Any, int]) -> None:
        self._recorder = recorder
        self._left: Counter[Hashable] = Counter(uses)
        self._made: dict[Hashable, _Recording] = {}

    def has(self, kind: Hashable) -> bool:
        return kind in self._made

    def pays(self, kind: Hashable) -> bool:
        """Return whether to record ``kind``: it is not yet, and will run often enough."""
        return kind not in self._made and self._left[kind] >= MIN_REPLAYS

    def count(self, kind: Hashable) -> None:
        """Note one run of ``kind``; after its last one its recording is dropped, so that its bank can go."""
        self._left[kind] -= 1
        if self._left[kind] <= 0:
            self._made.pop(kind, None)

    def record(self, kind: Hashable, inputs: Inputs, view: IndexedView, compute: Velocity) -> bool:
        """Record a forward without running it: its like has run, so that kernels and workspaces are there.

        Return whether it could be; if not, its kind is not tried again.
        """
        fixed, own = inputs.clone(), _writable(view.own)
        with torch.inference_mode(False):
            output = torch.empty_like(inputs.x_BCFHW, dtype=view.dtype)
        fixed_view = view.at(own)

        def body() -> None:
            output.copy_(compute(fixed, fixed_view))

        replay = self._recorder.record(body, run=False)
        if replay is None:
            self._left[kind] = 0
            return False
        self._made[kind] = _Recording(inputs=fixed, own=own, output=output, replay=replay)
        return True

    def replay(self, kind: Hashable, inputs: Inputs, view: IndexedView) -> Tensor:
        """Return the velocity, in memory that the next call overwrites: use it before that, on the same stream."""
        made = self._made[kind]
        made.inputs.fill(inputs)
        made.own.copy_(view.own, non_blocking=True)
        made.replay()
        return made.output

    def free(self) -> None:
        """Drop everything; only when the device has finished."""
        self._made.clear()
        self._recorder.free()
