"""Batch: the tokens of one training step; Batches: the interface of every loader; prefetch: a thread that reads ahead.

A batch is a pure function of (seed, step), for any number of ranks and micro-batches. Loaders shuffle within groups of
consecutive documents (docs/data.md, "The order of documents").
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from quern.data.shards import Corpus

GROUP_SIZE = 2_000_000_000
"""A million documents of 1,000 tokens. Larger groups shuffle better, and take more time and memory to begin."""
DOCUMENT_SIZE = 1000
"""A document adds so much to the size of its group beside its tokens, since it takes memory however short it is."""


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

    @property
    def ahead(self) -> bool:
        """Whether batches may be read before their step. False where a batch depends on the model."""
        ...

    def batch(self, step: int, rank: int = 0, ranks: int = 1) -> Batch:
        """This rank's rows of the global batch of `step`."""
        ...


class Batches(ABC):
    """Batches by step, from 0.

    Args:
        context: Targets of a row.
        batch_rows: Rows of a global batch, over all ranks.
        group_size: Size of the documents that are shuffled together, in tokens + `DOCUMENT_SIZE` for each document;
            None for all documents, which a corpus needs in which one source follows the other.
    """

    ahead = True

    def __init__(
        self, corpus: Corpus, context: int, batch_rows: int, seed: int = 0, group_size: int | None = GROUP_SIZE
    ) -> None:
        self.corpus, self.context, self.batch_rows, self.seed = corpus, context, batch_rows, seed
        self.group_size, self._groups = group_size, groups_of(corpus, group_size)
        self._group_order = lru_cache(2)(self._make_group_order)

    @abstractmethod
    def batch(self, step: int, rank: int = 0, ranks: int = 1) -> Batch:
        """Rows rank, rank + ranks, … of the global batch of `step`."""

    @property
    @abstractmethod
    def steps_per_epoch(self) -> int:
        """Steps that read every row of the first epoch."""

    @abstractmethod
    def report(self) -> dict[str, float]:
        """Counts and shares of an epoch, or of its first group."""

    def _rows_of(self, step: int, rank: int, ranks: int) -> np.ndarray:
        """Indices, over all epochs, of the rows that this rank reads at `step`."""
        if not 0 <= rank < ranks <= self.batch_rows:
            raise ValueError(
                f"rank {rank} of {ranks} cannot read a batch of {self.batch_rows} rows: use fewer ranks, "
                "or more tokens in a batch (at least one row for each rank)"
            )
        return step * self.batch_rows + np.arange(rank, self.batch_rows, ranks)

    def _documents(self, group: int) -> tuple[int, int]:
        """The first document of a group, and the one after its last."""
        if self.group_size is None:
            return 0, self.corpus.num_documents
        first, last = (self.corpus.at_size(g * self.group_size, DOCUMENT_SIZE) for g in (group, group + 1))
        return first, last

    def _group_of(self, turn: int) -> tuple[int, int]:
        """(epoch, group) of the group that is read at a turn; turns count over all epochs."""
        epoch, place = divmod(turn, self._groups)
        return epoch, int(self._group_order(epoch)[place])

    def _make_group_order(self, epoch: int) -> np.ndarray:
        order = np.arange(self._groups)
        return self._numbers(epoch, 0, self._groups).permutation(order) if epoch else order

    def _numbers(self, epoch: int, use: int, group: int = 0) -> np.random.Generator:
        """A generator for one use in one group of one epoch; the number after the last group's is for their order."""
        # A spawn key, not one list: SeedSequence([5]) equals SeedSequence([5, 0]), and [2**32, 0] equals [0, 1].
        key = (epoch, use, group) if group else (epoch, use)
        return np.random.Generator(np.random.Philox(np.random.SeedSequence(self.seed, spawn_key=key)))


def groups_of(corpus: Corpus, group_size: int | None = GROUP_SIZE) -> int:
    """The number of groups of a corpus; see `Batches`. A group may be empty, after a document that is larger."""
    size = corpus.num_tokens + DOCUMENT_SIZE * corpus.num_documents
    return 1 if group_size is None else -(-size // group_size)


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
