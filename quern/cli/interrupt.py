"""Ctrl-C during imports: one line and exit code 130.

Without this, Python prints a traceback, and some libraries ignore the signal.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = "interrupted; nothing half-written was left behind"
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """Ends the process at the first SIGINT, without cleanup; for imports only.

    Does nothing outside the main thread, or if SIGINT already has a handler.
    """
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(number: int, frame: FrameType | None) -> None:
    os.write(2, f"{INTERRUPTED}\n".encode())
    os._exit(EXIT_INTERRUPTED)
