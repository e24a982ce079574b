"""What a lane asks of its device: marks, waits and copies that never make the host wait where the device can.

On CUDA everything is ordered on the lane's stream. Memory that another lane reads is noted with the allocator
(``record_stream``), so it is not handed out again before that lane's stream has come past the read.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

log = logging.getLogger(__name__)

PROBE_NUMBERS = 1 << 16


class Mark(Protocol):
    """A point in a lane's work."""

    @property
    def time_s(self) -> float:
        """When the device came past it, on the clock of ``time.perf_counter``; only after ``wait``."""
        ...

    def passed(self) -> bool:
        """Return whether the device has come past it, without waiting; raise what the device has met."""
        ...

    def wait(self) -> None:
        """Block the calling thread until the device has come past it."""
        ...


class DeviceOps(Protocol):
    """Work on one device. Only the lane's own thread calls it."""

    def mark(self) -> Mark:
        """Return the point after everything that has been asked of the device so far."""
        ...

    def wait_for(self, mark: Mark) -> None:
        """Let what is asked from here on come after another lane's ``mark``."""
        ...

    def put(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` on the device, itself when it is there already."""
        ...

    def fetch(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` on the CPU; its values are there once a later mark has passed."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy ``source``, of whatever device, into ``target`` on this one."""
        ...


@dataclass(frozen=True, slots=True)
class HostMark:
    """A point that has passed: a CPU has done what it was asked when the call returns."""

    time_s: float

    def passed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class HostOps:
    """Work on a CPU."""

    def mark(self) -> HostMark:
        return HostMark(time.perf_counter())

    def wait_for(self, mark: Mark) -> None:
        mark.wait()

    def put(self, tensor: Tensor) -> Tensor:
        return tensor.cpu()

    def fetch(self, tensor: Tensor) -> Tensor:
        return tensor

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)


@dataclass(frozen=True, slots=True)
class CudaMark:
    """A point on a stream; ``zero`` is an event of the same stream that passed at ``zero_s``."""

    event: Any
    zero: Any
    zero_s: float

    @property
    def time_s(self) -> float:
        elapsed: float = self.zero.elapsed_time(self.event)
        return self.zero_s + elapsed / 1000

    def passed(self) -> bool:
        done: bool = self.event.query()
        return done

    def wait(self) -> None:
        self.event.synchronize()


class CudaOps:
    """Work on one CUDA device's stream, which is the current one of the calling thread."""

    def __init__(self, device: torch.device, stream: Any, *, name: str) -> None:
        """``name`` is the lane's."""
        self._device = device
        self._stream = stream
        self._name = name
        self._zero = self._event()
        self._zero.synchronize()
        self._zero_s = time.perf_counter()

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def mark(self) -> CudaMark:
        return CudaMark(self._event(), self._zero, self._zero_s)

    def wait_for(self, mark: Mark) -> None:
        if isinstance(mark, CudaMark):
            self._stream.wait_event(mark.event)
        else:
            mark.wait()

    def put(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu":
            return tensor.pin_memory().to(self._device, non_blocking=True)
        return tensor.to(self._device)

    def fetch(self, tensor: Tensor) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        if source.device.type == "cpu":
            target.copy_(source)
        elif source.device == self._device:
            target.copy_(source, non_blocking=True)
            source.record_stream(self._stream)
        elif pair_works(source.device, self._device):
            self._copy_from_peer(target, source)
        else:
            self._stream.synchronize()  # and so everything that was waited for: ``source`` is complete
            target.copy_(source.cpu())

    def _copy_from_peer(self, target: Tensor, source: Tensor) -> None:
        """Copy on a stream of the source's device that only this lane uses: others' copies never wait for it."""
        remote = stream_for(source.device, f"to {self._name}")
        remote.wait_stream(self._stream)  # it has waited for whoever wrote the source
        with torch.cuda.stream(remote), torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        self._stream.wait_stream(remote)
        source.record_stream(remote)
        source.record_stream(self._stream)


@cache
def stream_for(device: torch.device, purpose: str) -> Any:
    """Return the CUDA stream of one purpose, the same in every rollout: libraries keep a workspace for each stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@cache
def pair_works(source: torch.device, target: torch.device) -> bool:
    """Return whether copies from ``source`` to ``target`` arrive; probed once per process, with one warning if not."""

    def copy(tensor: Tensor, device: torch.device) -> Tensor:
        return tensor.to(device, copy=True)

    if carries(copy, source=source, target=target):
        return True
    log.warning("copies from %s to %s do not arrive; going through host memory, which is slower", source, target)
    return False


def carries(copy: Callable[[Tensor, torch.device], Tensor], *, source: torch.device, target: torch.device) -> bool:
    """Write a pattern on ``source``, copy it to ``target`` and back, and compare it where it came from."""
    for turn in range(2):  # two patterns: what a first copy left behind must not pass for the second
        pattern = torch.arange(PROBE_NUMBERS, dtype=torch.int32, device=source) * 7919 + turn
        try:
            back = copy(copy(pattern, target), source)
        except RuntimeError as error:
            log.info("a copy between %s and %s failed: %s", source, target, error)
            return False
        if not torch.equal(back, pattern):
            return False
    return True
