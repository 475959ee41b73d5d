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
        self._epoch_tokens = corpus.num_tokens
        ends = [corpus.index.size_before(self._documents(group)[1]) for group in range(self._groups)]
        self._group_tokens = np.diff(ends, prepend=0)
        self._group = lru_cache(GROUPS_KEPT)(self._make_group)
        self._epoch = lru_cache(GROUPS_KEPT)(self._make_epoch)

    def batch(self, step: int, rank: int = 0, ranks: int = 1) -> Batch:
        rows = self._rows_of(step, rank, ranks)
        tokens = np.empty((len(rows), self.context + 1), dtype=np.int32)
        for row, out in zip(rows.tolist(), tokens, strict=True):
            self._fill(row * self.context, out)
        return Batch.of_rows(tokens, np.ones((len(rows), self.context), dtype=bool))

    def position(self, step: int) -> tuple[int, int]:
        epoch, offset = divmod(self._first_row(step) * self.context, self._epoch_tokens)
        return epoch, offset // self.context

    @property
    def steps_per_epoch(self) -> int:
        return -(-self._epoch_tokens // (self.batch_rows * self.context))

    def report(self) -> dict[str, float]:
        """Documents and rows of an epoch (the next epoch may fill the last row), and the shares of `Packing.report`."""
        return {
            "documents": self.corpus.num_documents,
            "rows": -(-self._epoch_tokens // self.context),
            "utilisation": 1.0,
            "padding_share": 0.0,
            "cropped_share": 0.0,
        }

    def _fill(self, start: int, out: np.ndarray) -> None:
        """Copies the tokens of the stream from position `start` on."""
        done = 0
        while done < len(out):
            epoch, offset = divmod(start + done, self._epoch_tokens)
            order, group_ends = self._epoch(epoch)
            place = int(np.searchsorted(group_ends, offset, side="right"))
            number = int(order[place])
            offset -= int(group_ends[place] - self._group_tokens[number])
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

    def _make_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The groups of an epoch in order, and the end of each in the stream of the epoch."""
        order = self._group_order(epoch)
        return order, np.cumsum(self._group_tokens[order])

    def _make_group(self, epoch: int, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The documents of a group in the order of an epoch: starts, lengths, and ends in the stream of the group."""
        first, last = self._documents(number)
        order = self._numbers(epoch, 0, number).permutation(last - first)
        starts, lengths = (values[order] for values in self.corpus.index.span(first, last))
        return starts, lengths, np.cumsum(lengths)
