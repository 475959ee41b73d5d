"""Loader of a stream: documents end to end, cut into rows of `context` tokens.

Each epoch takes one group of documents after the other (batch.py), permutes the documents of a group by (seed, epoch,
group) and puts them end to end; all epochs form one endless stream. Row i is the tokens i·context to
(i + 1)·context - 1, and the target of each is the token after it. So nothing is cropped, padded or added, and every
token of an epoch is a target once. Rows begin and end in mid-document; attention must separate the documents of a row
at their BOS. Steps and ranks take rows as in the packed loader.

Source: the data generator of modded-nanogpt, where each rank reads one long row per step. It reads files in order;
this loader permutes documents.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from functools import lru_cache

import numpy as np

from quern.data.batch import GROUP_SIZE, Batch, Batches
from quern.data.shards import Corpus

GROUPS_KEPT = 2  # a batch may span two


class StreamLoader(Batches):
    """Batches of rows cut from the stream.

    Args:
        corpus, context, batch_rows, seed, bos, group_size: See `Batches`.

    Raises:
        ValueError: As `Batches`, or the corpus has masks.
    """

    def __init__(
        self,
        corpus: Corpus,
        context: int,
        batch_rows: int,
        seed: int = 0,
        *,
        bos: int | None = None,
        group_size: int | None = GROUP_SIZE,
    ) -> None:
        super().__init__(corpus, context, batch_rows, seed, bos, group_size)
        if corpus.masked:
            raise ValueError("a stream learns every token: pack a corpus with masks by first-fit-decreasing instead")
        self._ends: list[int] = []  # of the groups in the stream of the first epoch, as far as it was read
        self._group = lru_cache(GROUPS_KEPT)(self._make_group)
        self._ordered = lru_cache(GROUPS_KEPT)(self._order_groups)
        self._lock = threading.Lock()

    def batch(self, step: int, rank: int = 0, ranks: int = 1) -> Batch:
        rows = self._rows_of(step, rank, ranks)
        tokens = np.empty((len(rows), self.context + 1), dtype=np.int32)
        self._epoch_of((self._last_row(step) + 1) * self.context)  # the last row's last target
        for row, out in zip(rows.tolist(), tokens, strict=True):
            self._fill(row * self.context, out)
        return Batch.of_rows(tokens, np.ones((len(rows), self.context), dtype=bool))

    def position(self, step: int) -> tuple[int, int]:
        epoch, offset = self._epoch_of(self._first_row(step) * self.context)
        return epoch, offset // self.context

    @property
    def steps_per_epoch(self) -> int:
        self.corpus.wait()
        return -(-self.corpus.num_tokens // (self.batch_rows * self.context))

    def report(self) -> dict[str, float]:
        """Documents and rows of an epoch (the next epoch may fill the last row), and the shares of `Packing.report`."""
        return {
            "documents": self.corpus.num_documents,
            "rows": -(-self.corpus.num_tokens // self.context),
            "utilisation": 1.0,
            "padding_share": 0.0,
            "cropped_share": 0.0,
        }

    def _fill(self, start: int, out: np.ndarray) -> None:
        """Copies the tokens of the stream from position `start` on."""
        done = 0
        while done < len(out):
            epoch, offset = self._epoch_of(start + done)
            number, offset = self._find(epoch, offset)
            starts, lengths, ends = self._group(epoch, number)
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

    def _epoch_of(self, position: int) -> tuple[int, int]:
        """The epoch of a position in the stream, and the position in the stream of the epoch."""
        with self._lock:
            while (not self._ends or self._ends[-1] <= position) and self._group_of(len(self._ends))[0] == 0:
                _, last = self._documents(len(self._ends))
                self._ends.append(self.corpus.index.size_before(last))
        return (0, position) if position < self._ends[-1] else divmod(position, self._ends[-1])

    def _find(self, epoch: int, offset: int) -> tuple[int, int]:
        """The group of a position in the stream of an epoch, and the position in the stream of the group."""
        order, ends = self._ordered(epoch) if epoch else (range(len(self._ends)), self._ends)
        place = bisect_right(ends, offset)
        return order[place], offset - (ends[place - 1] if place else 0)

    def _order_groups(self, epoch: int) -> tuple[list[int], list[int]]:
        """The groups of an epoch after the first, in order, and their ends in its stream."""
        order = self._group_order(epoch)
        return order.tolist(), np.cumsum(np.diff(self._ends, prepend=0)[order]).tolist()

    def _make_group(self, epoch: int, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The documents of a group in the order of an epoch: starts, lengths, and ends in the stream of the group."""
        first, last = self._documents(number)
        order = self._numbers(epoch, 0, number).permutation(last - first)
        starts, lengths = (values[order] for values in self.corpus.index.span(first, last))
        return starts, lengths, np.cumsum(lengths)
