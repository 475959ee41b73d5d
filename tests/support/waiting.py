"""Waits for something that happens in another thread or process."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from quern.temporaries import alone_in

Made = TypeVar("Made")


def until(holds: Callable[[], object], seconds: float = 60) -> float:
    """Returns after how many seconds it holds; fails when it still does not after so many."""
    start = time.monotonic()
    while not holds():
        assert time.monotonic() < start + seconds, f"not within {seconds} s"
        time.sleep(0.02)
    return time.monotonic() - start


def second(prepare: Callable[[Callable[[str], None]], Made], manifest: Path) -> tuple[Made, str]:
    """Prepares what a first process has prepared, as if it had not ended: it ends when this one says that it waits.
    Returns what is found and the last line that is said, and fails if anything is prepared again."""
    whole, said, kept = manifest.read_text(encoding="utf-8"), list[str](), list[int]()
    manifest.unlink()
    with ExitStack() as first:
        first.enter_context(alone_in(manifest.parent, print))

        def log(line: str) -> None:
            said.append(line)
            if "waiting" in line:
                manifest.write_text(whole, encoding="utf-8")
                kept.append(manifest.stat().st_ino)
                first.close()

        found = prepare(log)
    assert kept == [manifest.stat().st_ino]
    return found, said[-1]
