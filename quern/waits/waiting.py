"""Says for whom a process waits, and until when."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

SILENT_SECONDS = 2.0
"""Shorter waits say nothing."""


def to_stderr(line: str) -> None:
    with suppress(OSError):  # the reader may be gone
        sys.stderr.write(line + "\n")  # one write, because other ranks write there too
        sys.stderr.flush()


@contextmanager
def waiting(
    whom: str | Callable[[], str], seconds: float | None = None, log: Callable[[str], None] = to_stderr
) -> Iterator[Callable[[], None]]:
    """Says once what the body waits for and until when, if it takes longer than two seconds.

    Args:
        whom: For whom the body waits; a function is called in a thread.
        seconds: The body's own time limit, from its start or the last arrival; None for none.
        log: Takes the line.

    Yields:
        A function to call whenever something has arrived: the two seconds begin again, until the line is said.
    """
    ended, since = threading.Event(), [time.monotonic()]

    def watch() -> None:
        while not ended.wait(max(0.0, since[0] + SILENT_SECONDS - time.monotonic())):
            if time.monotonic() - since[0] >= SILENT_SECONDS:
                end = time.localtime(time.time() + (seconds or 0) - SILENT_SECONDS)
                limit = "without a time limit" if seconds is None else f"until {time.strftime('%H:%M:%S', end)}"
                log(f"waiting for {whom if isinstance(whom, str) else whom()}, {limit}")
                return

    threading.Thread(target=watch, name="waiting", daemon=True).start()
    try:
        yield lambda: since.__setitem__(0, time.monotonic())
    finally:
        ended.set()
