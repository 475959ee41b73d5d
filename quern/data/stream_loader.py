"""Loader of a stream: documents end to end, cut into rows of `context` tokens.

Each epoch permutes the documents of one group after the other (batch.py) and puts them end to end; all epochs form one
endless stream. Row i is the tokens i·context to (i + 1)·context - 1, so every token of an epoch is a target once. Rows
begin and end in mid-document; attention must separate the documents of a row at their BOS.

Source: the data generator of modded-nanogpt, which reads files in order; this loader permutes documents.
"""

from __future__ import annotations

from functools import cached_property, lru_cache

import numpy as np

from quern.data.batch import GROUP_SIZE, Batch, Batches
from quern.data.shards import Corpus

GROUPS_KEPT = 2  # a batch may span two


class StreamLoader(Batches):
    """Batches of rows cut from the stream. Raises ValueError for a corpus with masks."""

    def __init__(
        self, corpus: Corpus, context: int, batch_rows: int, seed: int = 0, *, group_size: int | None = GROUP_SIZE
    ) -> None:
        super().__init__(corpus, context, batch_rows, seed, group_size)
        if corpus.masked:
            raise ValueError("a stream learns every token: pack a corpus with masks by first-fit-decreasing instead")
        self._tokens = corpus.num_tokens
        self._group = lru_cache(GROUPS_KEPT)(self._make_group)
        self._ends = lru_cache(GROUPS_KEPT)(self._make_ends)

    def batch(self, step: int, rank: int = 0, ranks: int = 1) -> Batch:
        rows = self._rows_of(step, rank, ranks)
        tokens = np.empty((len(rows), self.context + 1), dtype=np.int32)
        for row, out in zip(rows.tolist(), tokens, strict=True):
            self._fill(row * self.context, out)
        return Batch.of_rows(tokens, np.ones((len(rows), self.context), dtype=bool))

    @property
    def steps_per_epoch(self) -> int:
        return -(-self._tokens // (self.batch_rows * self.context))

    def report(self) -> dict[str, float]:
        """Documents and rows of an epoch (the next epoch may fill the last row), and the shares of `Packing.report`."""
        counts = {"documents": self.corpus.num_documents, "rows": -(-self._tokens // self.context)}
        return counts | {"utilisation": 1.0, "padding_share": 0.0, "cropped_share": 0.0}

    def _fill(self, start: int, out: np.ndarray) -> None:
        """Copies the tokens of the stream from position `start` on."""
        done = 0
        while done < len(out):
            epoch, offset = divmod(start + done, self._tokens)
            group_ends = self._ends(epoch)
            place = int(np.searchsorted(group_ends, offset, side="right"))
            offset -= int(group_ends[place - 1]) if place else 0
            starts, lengths, ends = self._group(epoch, int(self._group_order(epoch)[place]))
            count = min(len(out) - done, int(ends[-1]) - offset)
            # The documents of these tokens, then the part of each: the first and the last may be cut.
            first = int(np.searchsorted(ends, offset, side="right"))
            last = int(np.searchsorted(ends, offset + count, side="left"))
            some = slice(first, last + 1)
            begins = ends[some] - lengths[some]
            skipped = np.maximum(offset - begins, 0)
            length = np.minimum(ends[some], offset + count) - begins - skipped
            at = done + begins + skipped - offset
            self.corpus.copy(out, at, starts[some] + skipped, length)
            done += count

    @cached_property
    def _group_tokens(self) -> np.ndarray:
        ends = [self.corpus.tokens_before(self._documents(group)[1]) for group in range(self._groups)]
        return np.diff(ends, prepend=0)

    def _make_ends(self, epoch: int) -> np.ndarray:
        """The ends of the groups in the stream of an epoch, in its order."""
        return np.cumsum(self._group_tokens[self._group_order(epoch)])

    def _make_group(self, epoch: int, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The documents of a group in the order of an epoch: starts, lengths, and ends in the stream of the group."""
        first, last = self._documents(number)
        order = self._numbers(epoch, 0, number).permutation(last - first)
        starts, lengths = (values[order] for values in self.corpus.take(np.arange(first, last)))
        return starts, lengths, np.cumsum(lengths)
