"""Batch: the tokens of one training step; the interfaces of what makes batches; prefetch: a thread that reads ahead.

A batch is a pure function of (seed, step), for any number of ranks and micro-batches.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class Batch:
    """Rows of tokens with their targets."""

    tokens: np.ndarray  # (B, T) int32. Padding is BOS.
    targets: np.ndarray  # (B, T) int32; targets[b, t] is the token after tokens[b, t]
    mask: np.ndarray  # (B, T) bool, True where the target counts. False at padding.
    weight: np.ndarray | None = None  # (B, T) float32, or None for equal weights

    @classmethod
    def of_rows(cls, rows: np.ndarray, mask: np.ndarray) -> Batch:
        """A batch from rows of T + 1 tokens, (B, T + 1) int32, and the mask of the targets, (B, T) bool."""
        return cls(*map(np.ascontiguousarray, (rows[:, :-1], rows[:, 1:], mask)))

    def split(self, rows: int) -> Iterator[Batch]:
        """Micro-batches of `rows` rows, in order; the last one may be smaller."""
        for at in range(0, len(self.tokens), rows):
            part = slice(at, at + rows)
            weight = None if self.weight is None else self.weight[part]
            yield Batch(self.tokens[part], self.targets[part], self.mask[part], weight)


class BatchSource(Protocol):
    """A source of batches for the training loop."""

    ahead: bool
    """Whether batches may be read before their step. False where a batch depends on the model."""

    @abstractmethod
    def batch(self, step: int, rank: int = 0, ranks: int = 1) -> Batch:
        """This rank's rows of the global batch of `step`."""
        ...


class Batches(BatchSource, Protocol):
    """The batches of pretraining (`make_batches` of a recipe)."""

    ahead: bool = True
    context: int  # targets of a row
    batch_rows: int  # rows of a global batch, over all ranks

    @abstractmethod
    def report(self) -> dict[str, float]:
        """Counts and shares for the report, such as those of `data.loader.Loader`."""
        ...


def prefetch(
    loader: BatchSource, start: int, stop: int | None, rank: int = 0, ranks: int = 1
) -> Generator[Batch, None, None]:
    """Reads three batches ahead in a thread, which ends when the iterator is closed or dropped.

    stop: the step after the last; None reads without an end. An error of the loader is raised where its batch would
    have come.
    """
    pool = ThreadPoolExecutor(1, "prefetch")
    steps = itertools.count(start) if stop is None else iter(range(start, stop))
    ready = deque[Future[Batch]]()

    def submit(count: int) -> None:
        ready.extend(pool.submit(loader.batch, step, rank, ranks) for step in itertools.islice(steps, count))

    submit(3)
    try:
        while ready:
            batch = ready.popleft().result()
            submit(1)
            yield batch
    finally:
        pool.shutdown(cancel_futures=True)
