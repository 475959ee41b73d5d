"""SIGTERM and Ctrl-C end a process soon, even if it is blocked in native code.

Python runs a signal's handler only between its own instructions. A process that waits in native code (a rank that
connects, a collective, a compiler) would ignore the signal for as long as it waits. So a thread reads the signals
beside the main thread (`signal.set_wakeup_fd`), and ends the process when no handler ran in time.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FrameType

HANDLER_SECONDS = 1.5
"""Seconds in which a handler must start."""
TOGETHER_SECONDS = 0.2
"""Python handles signals that arrive within this time together."""


@contextmanager
def prompt_signals(raised: Mapping[signal.Signals, Callable[[int], BaseException]]) -> Iterator[None]:
    """Signals raise an exception in the main thread. If it is blocked in native code, they end the process.

    A handler that the body installs instead decides for itself, and a signal that is ignored at the start stays so.
    Does nothing outside the main thread.

    Args:
        raised: Makes the exception from the signal's number.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handled = [-math.inf]

    def handle(number: int, frame: FrameType | None) -> None:
        handled[0] = time.monotonic()
        raise raised[signal.Signals(number)](number)

    def watch() -> None:
        for found in iter(partial(os.read, reader, 1), b""):
            which, since = signal.Signals(found[0]), time.monotonic()
            while signal.getsignal(which) is handle and handled[0] < since - TOGETHER_SECONDS:
                if time.monotonic() > since + HANDLER_SECONDS:
                    os.write(2, f"{which.name}: ended while it waited\n".encode())
                    os._exit(128 + which)
                time.sleep(0.05)
        os.close(reader)

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    heeded = [which for which in raised if signal.getsignal(which) != signal.SIG_IGN]
    before = {which: signal.signal(which, handle) for which in heeded}
    earlier = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=watch, name="signals", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(earlier)
        for which, handler in before.items():
            signal.signal(which, handler)
        os.close(writer)  # ends the thread
