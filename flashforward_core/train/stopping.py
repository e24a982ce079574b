"""One run per folder, and an end between two of its steps when it is asked for."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from filelock import FileLock, Timeout

REPEATED_S = 5.0
"""A launcher may pass on a signal that its processes have had already: within this time that is one."""


@contextmanager
def alone(folder: Path, accelerator: Accelerator) -> Iterator[None]:
    """Keep a second run out of ``folder``; a lock goes with its process, however that ends."""
    if not accelerator.is_main_process:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / "lock", timeout=0):
            yield
    except Timeout as error:
        raise ValueError(f"another run is at work in {folder}; wait for it, or name another out=") from error


@contextmanager
def asked_to_stop() -> Iterator[threading.Event]:
    """Have the first Ctrl-C or SIGTERM set an event; one that comes ``REPEATED_S`` later does what it always does."""
    asked = threading.Event()
    before: dict[int, Any] = {}
    first = 0.0

    def ask(number: int, frame: Any) -> None:
        nonlocal first
        if not asked.is_set():
            first = time.monotonic()
            asked.set()
        elif time.monotonic() - first > REPEATED_S:
            signal.signal(number, before[number])
            signal.raise_signal(number)

    if threading.current_thread() is threading.main_thread():  # only there can signals be handled
        found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        before = {number: old for number, old in found.items() if old not in (None, signal.SIG_IGN)}
    try:
        for number in before:
            signal.signal(number, ask)
        yield asked
    finally:
        for number, old in before.items():
            signal.signal(number, old)
