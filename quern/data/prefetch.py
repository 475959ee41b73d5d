"""Prefetching: a thread computes the next items of an iterable while the caller works on the current one."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import TypeVar

from quern.data.batch import Batch, BatchSource

T = TypeVar("T")
POLL_SECONDS = 0.5


@dataclass
class _End:
    """The end of the items, with the error that ended them."""

    error: BaseException | None


def prefetch(
    loader: BatchSource,
    start: int,
    stop: int | None,
    depth: int = 2,
    rank: int = 0,
    ranks: int = 1,
    give_up: Callable[[], bool] = lambda: False,
) -> Generator[Batch, None, None]:
    """Reads the batches of steps `start` to `stop` - 1, or without an end, ahead; see `prefetch_items`."""
    steps = itertools.count(start) if stop is None else range(start, stop)
    return prefetch_items((loader.batch(step, rank, ranks) for step in steps), depth, give_up)


def prefetch_items(
    items: Iterable[T], ahead: int = 2, give_up: Callable[[], bool] = lambda: False
) -> Generator[T, None, None]:
    """Computes items in a thread, which ends when the iterator is closed or dropped.

    Args:
        items: The items.
        ahead: How many are computed early.
        give_up: Asked while no item is ready; if it returns True, there are no more.

    Yields:
        The items in order. An error of the iterable is raised where its item would have come.
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
