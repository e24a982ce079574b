"""Ctrl-C and SIGTERM: once, and in time to clean up."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def one_interrupt() -> Iterator[None]:
    """Raise ``KeyboardInterrupt`` at the first ctrl-C or SIGTERM; ignore later ones, so that cleaning up completes."""
    stopping = False

    def stop(number: int, frame: Any) -> None:
        nonlocal stopping
        if stopping:
            return
        stopping = True
        with contextlib.suppress(OSError):
            os.write(2, b"\nstopping...\n")  # print may be what was interrupted, and cannot be entered twice
        raise KeyboardInterrupt

    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        handlers = {number: old for number, old in found.items() if old not in (None, signal.SIG_IGN)}
    try:
        for number in handlers:
            signal.signal(number, stop)
        yield
    finally:
        for number, old in handlers.items():
            signal.signal(number, old)
