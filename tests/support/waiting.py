"""Waits for something that happens in another thread or process."""

import time
from collections.abc import Callable


def until(holds: Callable[[], object], seconds: float = 60) -> float:
    """Returns after how many seconds it holds; fails when it still does not after so many."""
    start = time.monotonic()
    while not holds():
        assert time.monotonic() < start + seconds, f"not within {seconds} s"
        time.sleep(0.02)
    return time.monotonic() - start
