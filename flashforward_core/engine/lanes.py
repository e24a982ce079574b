"""Lanes: where tasks run. One thread each, with a CPU of its own in name (virtual) or a CUDA device and stream.

A lane runs what it is given in order. Tensors carry the name of their lane, and nothing mixes them by accident: moving
one is a call. Threads enter inference mode themselves, since it is a setting of the thread, not of the process; the
number of intra-op threads is left as the process has it, on every layout, since kernels may split their sums by it.
"""

import collections
import contextlib
import logging
import queue
import re
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol, runtime_checkable

import torch

from ..specs import MAX_DEVICES, RolloutSpec
from .forward import FastOptions
from .memory import MemoryOptions
from .pairing import Pairable, pairable
from .transfer import CudaOps, DeviceOps, HostOps, Mark, stream_for

log = logging.getLogger(__name__)

Work = Callable[[], None]

IDLE_S = 0.002  # how long a lane with nothing to launch waits before it looks what its device has done

OTHER_DEVICES = "mps|xpu|npu|mlu|privateuseone"  # PyTorch's names for devices that no lane runs on


class Lane(Protocol):
    """Runs work in order, on one device."""

    name: str
    device: torch.device
    ops: DeviceOps
    """Only for work of this lane."""

    def submit(self, work: Work) -> None:
        """Queue ``work``, which must not raise; it runs in the lane's thread, in inference mode."""
        ...

    def defer(self, mark: Mark, work: Work) -> None:
        """Run ``work`` once the device has come past ``mark``; in the lane's thread and in the order of the calls.

        A lane lets its device fall behind by ``lookahead`` such marks and waits for more. Only for work of this lane.
        """
        ...

    def deliver(self) -> bool:
        """Run what is deferred and has come to pass, without waiting; return whether more is. Only for its own work."""
        ...

    def close(self) -> None:
        """Wait for the queued and deferred work and end the lane; a second call does nothing."""
        ...


@dataclass(frozen=True, slots=True)
class LaneTensor:
    """A tensor and the lane that may touch it."""

    lane: str
    tensor: Any
    """A Tensor, or a state."""

    def on(self, lane: Lane) -> Any:
        """Return the tensor or state; assert that ``lane`` is its own."""
        assert self.lane == lane.name, f"a tensor of {self.lane} is used on {lane.name}; move it first"
        return self.tensor

    def moved_to(self, lane: Lane) -> "LaneTensor":
        """Return a copy on ``lane``, or itself when it is there already."""
        if self.lane == lane.name:
            return self
        if isinstance(self.tensor, torch.Tensor):
            return LaneTensor(lane.name, _copied(self.tensor, lane=lane))
        assert isinstance(self.tensor, Movable), f"a {type(self.tensor).__name__} cannot leave {self.lane}"
        return LaneTensor(lane.name, self.tensor.mapped(partial(_copied, lane=lane)))


@runtime_checkable
class Movable(Protocol):
    """A state that can go to another lane."""

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """Return the state with ``change`` done to each of its tensors."""
        ...


def _copied(tensor: torch.Tensor, *, lane: Lane) -> torch.Tensor:
    copied = torch.empty_like(tensor, device=lane.device)
    lane.ops.copy(copied, tensor)
    return copied


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

    def wait(self, keys: Iterable[Hashable], *, most_s: float | None = None) -> bool | None:
        """Wait until all ``keys`` are finished; return whether to go on, None when ``most_s`` is over before that."""
        needed = set(keys)
        with self._changed:
            ended = self._changed.wait_for(lambda: self._stopped or needed <= self._finished, most_s)
            return not self._stopped if ended else None


class CallerLane:
    """Runs work at once, in the calling thread: the sequential executor's lane."""

    def __init__(self, name: str = "caller", device: str | torch.device = "cpu") -> None:
        self.name = name
        self.device = torch.device(device)
        self.ops = _ops(self.device, _current_stream(self.device), name=name)

    def submit(self, work: Work) -> None:
        with torch.inference_mode():
            work()

    def defer(self, mark: Mark, work: Work) -> None:
        mark.wait()
        work()

    def deliver(self) -> bool:
        return False

    def close(self) -> None:
        pass


class ThreadLane:
    """A thread for one device; on CUDA also a stream, so that devices and copies overlap."""

    def __init__(self, name: str, device: str | torch.device, *, lookahead: int | None = None) -> None:
        """``lookahead`` is 1 on CUDA: one task runs, the next one waits on the device. A cancel waits for both."""
        self.name = name
        self.device = torch.device(device)
        self._lookahead = int(self.device.type == "cuda") if lookahead is None else lookahead
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._deferred: collections.deque[tuple[Mark, Work]] = collections.deque()
        self._stream = _own_stream(self.device, name)
        self.ops = _ops(self.device, self._stream, name=name)
        self._thread = threading.current_thread()  # until its own one runs
        self._pool: ThreadPoolExecutor | None = _thread_for(self.device, name)
        self._running = self._pool.submit(self._run)

    def submit(self, work: Work) -> None:
        self._work.put(work)

    def defer(self, mark: Mark, work: Work) -> None:
        self._check_thread()
        self._deferred.append((mark, work))
        self._catch_up(self._lookahead)

    def deliver(self) -> bool:
        self._check_thread()
        while self._deferred and _has_passed(self._deferred[0][0]):
            self._deferred.popleft()[1]()
        return bool(self._deferred)

    def close(self) -> None:
        if self._pool is None:
            return
        self._work.put(None)
        if (error := self._running.exception()) is not None:  # waits for the thread
            log.error("%s has ended early", self.name, exc_info=error)
        _end_thread(self._pool, self.device)
        self._pool = None

    def _check_thread(self) -> None:
        assert threading.current_thread() is self._thread, f"only work of {self.name} waits for its device"

    def _catch_up(self, allowed: int) -> None:
        while len(self._deferred) > allowed:
            mark, work = self._deferred.popleft()
            with contextlib.suppress(RuntimeError):  # of a failed device: it fails again for who looks at the results
                mark.wait()
            work()

    def _run(self) -> None:
        self._thread = threading.current_thread()
        torch.get_num_threads()  # a new thread takes the process's number when first asked; some kernels do not ask
        with torch.inference_mode(), _current(self.device, self._stream):
            for work in iter(self._work.get, None):
                work()
                if self._work.empty():
                    self._catch_up(0)
            self._catch_up(0)
            with contextlib.suppress(RuntimeError):  # as above
                self.ops.mark().wait()  # a task that failed on the way may have left work on the device


def _has_passed(mark: Mark) -> bool:
    with contextlib.suppress(RuntimeError):  # of a failed device: it fails again for who looks at the results
        return mark.passed()
    return True


def _thread_for(device: torch.device, name: str) -> ThreadPoolExecutor:
    """Return a thread for a lane: on CUDA one that an earlier lane has ended with, if there is one.

    cuDNN's plans belong to threads, so a new one would make them again.
    """
    with contextlib.suppress(IndexError):
        return _kept_threads(device).popleft()
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"flashforward-{name}")


def _end_thread(thread: ThreadPoolExecutor, device: torch.device) -> None:
    """Keep a CUDA device's thread for the next lane; end any other."""
    if device.type == "cuda":
        _kept_threads(device).append(thread)
    else:
        thread.shutdown()


@cache
def _kept_threads(device: torch.device) -> collections.deque[ThreadPoolExecutor]:
    """Threads of ``device`` that no lane uses."""
    return collections.deque()


def _own_stream(device: torch.device, name: str) -> Any:
    """Return the stream of ``device`` for the lane of that name, or None for a CPU."""
    if device.type != "cuda":
        return None
    stream = stream_for(device, name)
    stream.wait_stream(torch.cuda.current_stream(device))  # prompts may still be on their way
    return stream


def _current_stream(device: torch.device) -> Any:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def _ops(device: torch.device, stream: Any, *, name: str) -> DeviceOps:
    return HostOps() if stream is None else CudaOps(device, stream, name=name)


def _current(device: torch.device, stream: Any) -> contextlib.AbstractContextManager[object]:
    """Make ``device`` and ``stream`` the calling thread's current ones."""
    if stream is None:
        return contextlib.nullcontext()
    torch.cuda.set_device(device)
    return torch.cuda.stream(stream)


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
    decode: str = "auto"
    """``own`` (a lane that does nothing else), ``split`` (two, each with half of the decoder's layers), ``shared`` (the
    last stage's lane), ``any`` or ``auto``."""
    ray_address: str = ""
    """A Ray cluster to run on, ``auto`` or HOST:PORT; empty: this machine."""
    fast: FastOptions = FastOptions()  # noqa: RUF009 (frozen)
    """How forwards may be sped up."""
    memory: MemoryOptions = MemoryOptions()  # noqa: RUF009 (frozen)
    """How memory may be saved, and how much there is."""

    def pairable(self, spec: RolloutSpec) -> Pairable | None:
        """Return what tells which forwards may run as one, None if none are to; ``ValueError`` where that cannot be."""
        if not self.fast.batch_diagonal:
            return None
        if self.ray_address:
            raise ValueError("batch_diagonal=True does not go with ray_address; use batch_diagonal=False")
        return pairable(spec)

    def resolve(self) -> tuple[str, ...]:
        """Return the device of each lane: ``auto`` is every CUDA device, or one CPU.

        A device that this machine lacks is left out, with one warning that tells both counts; for a Ray cluster see
        ``ray_lanes.cluster_devices``. A word that is no device, and a count outside 1 to ``MAX_DEVICES``, raise
        ``ValueError``.
        """
        parts = [part.strip() for entry in self.devices for part in entry.split(",")]
        asked = [name for part in parts for name in _expand(part, remote=bool(self.ray_address))]
        if len(asked) > MAX_DEVICES:
            raise ValueError(f"devices={','.join(self.devices)!r} are {len(asked)}, above {MAX_DEVICES}; use fewer")
        if self.ray_address:
            from .ray_lanes import cluster_devices

            return cluster_devices(self.ray_address, asked)
        usable = [name for name in asked if _is_present(name)]
        if len(usable) < len(asked):
            lost = ", ".join(dict.fromkeys(name for name in asked if name not in usable))
            used = ", ".join(usable) or "cpu"
            log.warning("devices: %d asked for, %d present (not %s); using %s", len(asked), len(usable), lost, used)
        return tuple(usable) or ("cpu",)


def _expand(text: str, *, remote: bool) -> list[str]:
    """Read one entry of a device list; what ``auto`` is elsewhere is not known here."""
    if text in ("auto", ""):
        if remote:
            return ["auto"]
        return [f"cuda:{n}" for n in range(torch.cuda.device_count())] or ["cpu"]
    match = re.fullmatch(rf"(cpu|cuda|cuda:\d+|(?:{OTHER_DEVICES})(?::\d+)?)(?:\*(\d{{1,9}}))?", text)
    if match is None:
        raise ValueError(f"devices={text!r} is no device; use auto, cpu, cpu*4 or cuda:0")
    count = int(match[2] or 1)
    if not 1 <= count <= MAX_DEVICES:
        raise ValueError(f"devices={text!r} has a count outside 1 to {MAX_DEVICES}; use {match[1]}*2, for example")
    return ["cuda:0" if match[1] == "cuda" else match[1]] * count


def _is_present(name: str) -> bool:
    match = re.fullmatch(r"cuda:(\d+)", name)
    return name == "cpu" or (match is not None and int(match[1]) < torch.cuda.device_count())
