"""Quiet ends: Ctrl-C during imports (one line and exit code 130), and output that nobody reads (exit code 141).

Without this, Python prints a traceback, and some libraries ignore the signal.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = "interrupted"
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
EXIT_UNREAD = 141  # 128 + SIGPIPE. The signal stays ignored, because the default action would also end servers.


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


def discard_unread() -> bool:
    """Redirects to nowhere those of stdout and stderr whose reader closed the pipe. Returns whether there was one."""
    poll = select.poll()
    for file in (1, 2):
        poll.register(file, 0)
    unread = [file for file, event in poll.poll(0) if event & (select.POLLERR | select.POLLHUP)]
    for file in unread:
        os.dup2(os.open(os.devnull, os.O_WRONLY), file)
    return bool(unread)
