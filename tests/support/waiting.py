"""Waits for something that happens in another thread or process."""

import time
from collections.abc import Callable


def until(holds: Callable[[], object], seconds: float = 60) -> None:
    """Returns when it holds; fails when it still does not after so many seconds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)
