"""One lane in a process of its own, perhaps on another machine: what ``engine.ray_lanes`` makes an actor of.

Results are plain: events with packed tensors, times of this process's clock, and errors as words. The caller runs one
method at a time, except ``clock`` and ``stop``, which may come while another runs.
"""

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..graph.task import Slot
from ..kv.pages import PagePlan, kv_slots
from ..model.loading import load_again
from ..model.roles import Backbone, WeightsFrom
from .budget import Fit
from .events import Event, TaskFinished
from .forward import FastOptions
from .lanes import CallerLane, LaneTensor
from .ops import NotFinite, RunInputs
from .reuse import Resume
from .run import HostPage, Run
from .shares import Share
from .wire import Packed, PackedModules, pack, unpack, unpack_modules

PROBE_SIZE = 1024  # rows of the matrices that a lane's speed is measured with
KNOWN_ERRORS = {"NotFinite": NotFinite, "OutOfMemoryError": torch.OutOfMemoryError}


class LaneError(Exception):
    """A task failed: its id, the kind of the error and its words. Made of strings, so that any process can read it."""

    def __init__(self, task: str, kind: str, words: str) -> None:
        super().__init__(task, kind, words)
        self.task, self.kind, self.words = task, kind, words

    def rebuilt(self) -> Exception:
        """Return the error as the lane's process saw it, where this one knows its kind."""
        return KNOWN_ERRORS.get(self.kind, RuntimeError)(self.words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """What every lane of a rollout is told."""

    run: int
    """Tells this rollout from earlier ones on the same lanes."""
    inputs: RunInputs
    pages: PagePlan
    """Of the whole rollout: its order of keys is that of one machine."""
    fast: FastOptions
    fit: Fit
    poison: bool


class LaneWorker:
    """Runs a lane's share of one rollout after the other."""

    def __init__(self, name: str, device: str, num_threads: int) -> None:
        """``num_threads`` is the caller's: kernels may split their sums by it.

        ``device`` is ``cpu`` or ``cuda``, the GPU that this process has been given: the only one it sees.
        """
        _take_priority()
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # nobody writes to it
        self._device = torch.device("cuda:0" if device == "cuda" else device)
        self._num_threads = num_threads
        self._lane_name = name
        self._lane: CallerLane | None = None
        self._backbone: Backbone | None = None
        self._run: Run | None = None
        self._share: Share | None = None
        self._tasks: dict[str, Any] = {}
        self._running = -1
        self._stopped = -1

    def load(self, source: WeightsFrom) -> str | None:
        """Load the weights from this machine's disk and return their fingerprint; None where the files are missing."""
        self._enter()
        try:
            self._backbone = load_again(source, device=self._device)
        except FileNotFoundError:
            return None
        return self._backbone.fingerprint

    def receive(self, backbone: Backbone, modules: PackedModules) -> str:
        """Take weights that were sent: ``backbone`` comes without its modules."""
        self._enter()
        models, vae = unpack_modules(modules)
        self._backbone = replace(backbone, models=models, vae=vae)
        return backbone.fingerprint

    def speed(self) -> float:
        """Return the multiplications and additions per second of a matrix product in the weights' dtype."""
        self._enter()
        assert self._backbone is not None
        left = torch.ones(PROBE_SIZE, PROBE_SIZE, dtype=self._backbone.dtype, device=self._device)
        best = float("inf")
        for _ in range(3):  # the first one sets things up
            began = time.perf_counter()
            (left @ left)[0, 0].item()
            best = min(best, time.perf_counter() - began)
        return 2 * PROBE_SIZE**3 / best

    def weigh(self, packed: Packed) -> int:
        """Return how many bytes have arrived."""
        return int(packed.data.copy().nbytes)

    def begin(self, rollout: Rollout, share: Share) -> float:
        """Get ready for a rollout; return when it began, by this process's clock."""
        self._enter()
        assert self._backbone is not None and self._lane is not None
        self.end()
        keep = frozenset(slot for slots in share.leaves.values() for slot in slots)
        self._run = Run(
            Resume(graph=share.graph, pages=rollout.pages, keep=keep),
            rollout.inputs,
            self._backbone,
            lanes=[self._lane],
            poison=rollout.poison,
            fast=rollout.fast,
            fit=rollout.fit,
        )
        self._share, self._running, self._tasks = share, rollout.run, share.graph.by_id()
        return self._run.began

    def run(self, run: int, task_id: str, slots: tuple[Slot, ...], *arrived: Packed) -> Any:
        """Run one task. ``arrived`` are the values of ``slots``, which other lanes wrote.

        Returns its events and then what it wrote for other lanes, as ``Share.leaves`` lists it; a single value where
        there is nothing else. Nones after ``stop``. Raises ``LaneError``.
        """
        assert self._share is not None and run == self._running, f"{task_id} is of another rollout"
        leaves = self._share.leaves.get(task_id, ())
        if self._stopped == run:
            return (None,) * (1 + len(leaves)) if leaves else None
        try:
            events = self._launch(task_id, dict(zip(slots, map(unpack, arrived), strict=True)))
            sent = [pack(self._kept(slot)) for slot in leaves]
        except Exception as error:
            raise LaneError(task_id, type(error).__name__, str(error)) from None
        return (events, *sent) if sent else events

    def _launch(self, task_id: str, arrived: Mapping[Slot, Tensor]) -> list[Event]:
        run, lane = self._run, self._lane
        assert run is not None and lane is not None
        events: list[Event] = []

        def work() -> None:
            for slot, value in arrived.items():
                if kv_slots([slot]):
                    run.homes[slot] = HostPage(value)
                else:
                    run.values[slot] = LaneTensor(lane.name, lane.ops.put(value))
            launched = run.launch(self._tasks[task_id], lane=0)
            launched.end.wait()
            events.extend(run.complete(launched))

        lane.submit(work)
        return [packed_event(event, pack) for event in events]

    def _kept(self, slot: Slot) -> Tensor:
        assert self._run is not None
        return self._run.kept.pop(slot)

    def end(self) -> int:
        """Free what the rollout held; return the most bytes that its banks had."""
        run, self._run = self._run, None
        if run is None:
            return 0
        peak = run.report([]).peak_kv_bytes[0]
        run.free()
        del run
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return peak

    def stop(self, run: int) -> None:
        """Let the tasks of a rollout that wait here end at once."""
        self._stopped = run

    def clock(self) -> float:
        """Return this process's time, which means nothing elsewhere."""
        return time.perf_counter()

    def _enter(self) -> None:
        """Set what is a matter of the thread that works."""
        torch.set_num_threads(self._num_threads)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        if self._lane is None:
            self._lane = CallerLane(self._lane_name, self._device)


def _take_priority() -> None:
    """Give this process's threads the usual priority, where that is allowed: Ray's processes begin with a low one.

    Else a lane waits for all other work of its machine, such as encoding the video. New threads have their parent's.
    """
    with contextlib.suppress(OSError, AttributeError):  # not allowed, or not this system's way
        for thread in os.listdir("/proc/self/task"):
            os.setpriority(os.PRIO_PROCESS, int(thread), 0)


def packed_event(event: Event, change: Callable[[Any], Any]) -> Event:
    """Return ``event`` with ``change`` done to its tensor, if it has one."""
    if isinstance(event, TaskFinished):
        return event
    name = "frames" if type(event).__name__ == "FramesReady" else "latents"
    return replace(event, **{name: change(getattr(event, name))})
