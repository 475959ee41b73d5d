"""What a training step reads: a batch, and what every source of batches can do.

A batch is a pure function of (seed, step), whatever the number of ranks and micro-batches that share it.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Batch:
    """tokens, targets: (B, T) int32. mask: (B, T) bool, which targets count. weight: (B, T) float32 or None.

    targets[b, t] follows tokens[b, t]. Padding holds BOS and is never in the mask.
    """

    tokens: np.ndarray
    targets: np.ndarray
    mask: np.ndarray
    weight: np.ndarray | None = None

    @property
    def rows(self) -> int:
        return len(self.tokens)

    def split(self, rows: int) -> Iterator[Batch]:
        """Micro-batches of `rows` rows, in order; the last one may be smaller."""
        if rows < 1:
            raise ValueError(f"a micro-batch needs at least one row, not {rows}")
        for at in range(0, self.rows, rows):
            part = slice(at, at + rows)
            weight = None if self.weight is None else self.weight[part]
            yield Batch(self.tokens[part], self.targets[part], self.mask[part], weight)


class Batches(ABC):
    """Batches of `batch_rows` (all ranks together) rows of `context` targets, by step from 0."""

    context: int
    batch_rows: int

    @abstractmethod
    def batch(self, step: int, rank: int = 0, ranks: int = 1) -> Batch:
        """Rows rank, rank + ranks, … of the global batch of `step`."""

    @abstractmethod
    def position(self, step: int) -> tuple[int, int]:
        """(epoch, row within it) where the batch of `step` begins."""

    @property
    @abstractmethod
    def steps_per_epoch(self) -> int:
        """Steps that see every row of the first epoch."""

    @abstractmethod
    def report(self) -> dict[str, float]:
        """Counts and shares of what an epoch shows of the corpus."""

    def micro_batches(self, step: int, rows: int, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        """The batch of (step, rank) in pieces of `rows` rows."""
        return self.batch(step, rank, ranks).split(rows)

    def token_hash(self, step: int) -> str:
        """SHA-256 (hex) of the global batch."""
        batch = self.batch(step)
        digest = hashlib.sha256()
        for array in (batch.tokens, batch.targets, batch.mask):
            digest.update(array.tobytes())
        return digest.hexdigest()

    def _rows_of(self, step: int, rank: int, ranks: int) -> np.ndarray:
        """Which rows of the endless sequence of rows rank `rank` of `ranks` reads at `step`."""
        if not 0 <= rank < ranks <= self.batch_rows:
            raise ValueError(
                f"rank {rank} of {ranks} cannot read a batch of {self.batch_rows} rows: take fewer ranks, "
                "or more tokens in a batch, a row for each rank at least"
            )
        return self._first_row(step) + np.arange(rank, self.batch_rows, ranks)

    def _first_row(self, step: int) -> int:
        if step < 0:
            raise ValueError(f"step {step} is negative; steps count from 0")
        return step * self.batch_rows


def numbers(seed: int, epoch: int, use: int) -> np.random.Generator:
    """A generator for one use in one epoch."""
    # As spawn key and not as one list: SeedSequence([5]) equals SeedSequence([5, 0]), and [2**32, 0] equals
    # [0, 1].
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=(epoch, use))))


def check_seed(seed: int) -> None:
    if not 0 <= seed < 1 << 63:
        raise ValueError(f"seed {seed} is refused: use a whole number from 0 to 2**63 - 1")
