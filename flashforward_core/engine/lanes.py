"""Lanes: where tasks run. One thread each, with a CPU of its own in name (virtual) or a CUDA device and stream.

A lane runs what it is given in order. Tensors carry the name of their lane, and nothing mixes them by accident: moving
one is a call. Threads enter inference mode themselves, since it is a setting of the thread, not of the process; the
number of intra-op threads is left as the process has it, on every layout, since kernels may split their sums by it.
"""

import contextlib
import logging
import queue
import re
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

log = logging.getLogger(__name__)

Work = Callable[[], None]


class Lane(Protocol):
    """Runs work in order, on one device."""

    name: str
    device: torch.device

    def submit(self, work: Work) -> None:
        """Queue ``work``, which must not raise; it runs in the lane's thread, in inference mode."""
        ...

    def synchronise(self) -> None:
        """Wait until the device has done what the running work asked of it. Only for work of this lane."""
        ...

    def close(self) -> None:
        """Wait for the queued work and end the lane; a second call does nothing."""
        ...


@dataclass(frozen=True, slots=True)
class LaneTensor:
    """A tensor and the lane that may touch it."""

    lane: str
    tensor: Any
    """A Tensor, or a state that stays on its lane."""

    def on(self, lane: Lane) -> Any:
        """Return the tensor or state; assert that ``lane`` is its own."""
        assert self.lane == lane.name, f"a tensor of {self.lane} is used on {lane.name}; move it first"
        return self.tensor

    def moved_to(self, lane: Lane) -> "LaneTensor":
        """Return a copy on ``lane``, or itself when it is there already."""
        if self.lane == lane.name:
            return self
        assert isinstance(self.tensor, torch.Tensor), f"a {type(self.tensor).__name__} cannot leave {self.lane}"
        return LaneTensor(lane.name, self.tensor.to(lane.device, copy=True))


class Signals:
    """What has finished, and whether to stop: lanes wait for each other here."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._finished: set[Hashable] = set()
        self._stopped = False

    def finish(self, key: Hashable) -> None:
        with self._changed:
            self._finished.add(key)
            self._changed.notify_all()

    def stop(self) -> None:
        """Make every wait, present and future, return False."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def wait(self, keys: Iterable[Hashable]) -> bool:
        """Wait until all ``keys`` are finished; return whether to go on."""
        needed = set(keys)
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or needed <= self._finished)
            return not self._stopped


class CallerLane:
    """Runs work at once, in the calling thread: the sequential executor's lane."""

    def __init__(self, name: str = "caller", device: str | torch.device = "cpu") -> None:
        self.name = name
        self.device = torch.device(device)

    def submit(self, work: Work) -> None:
        with torch.inference_mode():
            work()

    def synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        pass


class ThreadLane:
    """A thread for one device; on CUDA also a stream, so that devices and copies overlap."""

    def __init__(self, name: str, device: str | torch.device) -> None:
        self.name = name
        self.device = torch.device(device)
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._stream: torch.cuda.Stream | None = None
        self._thread = threading.Thread(target=self._run, name=f"flashforward-{name}", daemon=True)
        self._thread.start()

    def submit(self, work: Work) -> None:
        self._work.put(work)

    def synchronise(self) -> None:
        assert threading.current_thread() is self._thread, f"only work of {self.name} waits for its device"
        if self._stream is not None:
            self._stream.synchronize()

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        with torch.inference_mode(), self._on_device():
            for work in iter(self._work.get, None):
                work()

    def _on_device(self) -> contextlib.AbstractContextManager[object]:
        if self.device.type != "cuda":
            return contextlib.nullcontext()
        torch.cuda.set_device(self.device)
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.default_stream(self.device))  # weights may still be on their way
        return torch.cuda.stream(self._stream)


@contextlib.contextmanager
def open_lanes(named: Sequence[tuple[str, str]]) -> Iterator[list[Lane]]:
    """Start a lane for each (name, device) and join them all at the end, whatever happens in between."""
    lanes: list[Lane] = []
    try:
        for name, device in named:
            lanes.append(ThreadLane(name, device))
        yield lanes
    finally:
        for lane in lanes:
            lane.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """Which devices to spread a rollout over, and how."""

    devices: tuple[str, ...] = ("auto",)
    """``auto``, ``cpu``, ``cpu*4`` (four virtual lanes), ``cuda:0``; an entry may hold several, with commas."""
    layout: str = "auto"
    """A layout of ``engine.placement``."""
    order: str = "latency"
    """``latency`` (first frames early) or ``memory`` (one stage's KV at a time)."""

    def resolve(self) -> tuple[str, ...]:
        """Return the device of each lane: ``auto`` is every CUDA device, or one CPU.

        What names no device of this machine is left out, with one warning that tells both counts.
        """
        asked = [name for entry in self.devices for part in entry.split(",") for name in _expand(part.strip())]
        usable = [name for name in asked if _is_present(name)]
        if len(usable) < len(asked):
            lost = ", ".join(dict.fromkeys(name for name in asked if name not in usable))
            used = ", ".join(usable) or "cpu"
            log.warning("devices: %d asked for, %d present (not %s); using %s", len(asked), len(usable), lost, used)
        return tuple(usable) or ("cpu",)


def _expand(text: str) -> list[str]:
    """Read one entry of a device list; text that names no device comes back as it is."""
    if text in ("auto", ""):
        return [f"cuda:{n}" for n in range(torch.cuda.device_count())] or ["cpu"]
    match = re.fullmatch(r"(cpu|cuda:\d+)(?:\*([1-9]\d*))?", "cuda:0" if text == "cuda" else text)
    return [text] if match is None else [match[1]] * int(match[2] or 1)


def _is_present(name: str) -> bool:
    match = re.fullmatch(r"cuda:(\d+)", name)
    return name == "cpu" or (match is not None and int(match[1]) < torch.cuda.device_count())
