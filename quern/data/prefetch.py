"""Prefetching: a thread computes the next items of an iterable while the caller works on the current one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

T = TypeVar("T")
POLL_SECONDS = 0.5


def prefetch_items(
    items: Iterable[T], ahead: int = 2, give_up: Callable[[], bool] = lambda: False
) -> Generator[T, None, None]:
    """Yields the items in order, until the caller gives up while there is none. A thread computes up to `ahead` early.

    An error of the iterable is raised where its item would have come. The thread ends when this generator is closed
    or dropped.
    """
    ready: queue.Queue[T | _End] = queue.Queue(maxsize=max(1, ahead))
    closed = threading.Event()

    def put(item: T | _End) -> None:
        while not closed.is_set():
            try:
                return ready.put(item, timeout=0.1)
            except queue.Full:
                continue

    def take() -> T | _End:
        while True:
            try:
                return ready.get(timeout=POLL_SECONDS)
            except queue.Empty:
                if give_up():
                    return _End(None)

    def read() -> None:
        error = None
        try:
            for item in items:
                put(item)
                if closed.is_set():
                    return
        except BaseException as raised:  # the caller gets it; without it the caller would wait forever
            error = raised
        put(_End(error))

    thread = threading.Thread(target=read, name="prefetch", daemon=True)
    thread.start()
    try:
        while not isinstance(item := take(), _End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        closed.set()
        thread.join(timeout=5)


class _End:
    """The end of the items, with the error that ended them."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error
