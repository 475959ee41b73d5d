"""One long stream instead of packed rows: documents follow each other, and a row is the next `context` tokens of them.

Each epoch permutes the documents by (seed, epoch) and puts them end to end; the epochs put end to end are one endless
stream. Row i is the tokens i·context up to (i + 1)·context, with the token after each as its target, so nothing is
cropped, padded or added, and every token of an epoch is a target once. Rows begin and end in mid-document; attention
is to keep the documents of a row apart by their BOS. Step s takes rows s·batch_rows up to (s + 1)·batch_rows, and rank
r of N reads rows r, r + N, … of that one global batch, as with the packed loader.

Source: the data generator of modded-nanogpt, where a step is one such piece of the stream and a rank's share of it one
long row; it reads files in order, we permute documents.
"""

from __future__ import annotations

import threading

import numpy as np

from quern.data.batch import Batch, Batches, check_seed, numbers
from quern.data.shards import Corpus

EPOCHS_KEPT = 2  # a batch may straddle two


class StreamLoader(Batches):
    """Batches of `batch_rows` (all ranks together) rows of `context` targets, cut from the stream.

    seed: ≥ 0. bos: checked against the corpus when given. Raises ValueError for a corpus with masks.
    """

    def __init__(self, corpus: Corpus, context: int, batch_rows: int, seed: int = 0, *, bos: int | None = None) -> None:
        if context < 1 or batch_rows < 1:
            raise ValueError(f"context ({context}) and batch_rows ({batch_rows}) must be at least 1")
        check_seed(seed)
        if corpus.masks is not None:
            raise ValueError("a stream learns every token: pack a corpus with masks by first-fit-decreasing instead")
        if bos is not None and bos != corpus.bos:
            raise ValueError(f"the corpus starts documents with id {corpus.bos}, the tokenizer's BOS is {bos}")
        self.corpus, self.context, self.batch_rows, self.seed = corpus, context, batch_rows, seed
        self._epoch_tokens = corpus.num_tokens
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # most recently used last
        self._lock = threading.Lock()

    def batch(self, step: int, rank: int = 0, ranks: int = 1) -> Batch:
        """Rows rank, rank + ranks, … of the global batch of `step` (from 0); all targets count."""
        rows = self._rows_of(step, rank, ranks)
        tokens = np.empty((len(rows), self.context + 1), dtype=np.int32)
        for row, out in zip(rows.tolist(), tokens, strict=True):
            self._fill(row * self.context, out)
        inputs, targets = (np.ascontiguousarray(part) for part in (tokens[:, :-1], tokens[:, 1:]))
        return Batch(inputs, targets, np.ones(inputs.shape, dtype=bool))

    def position(self, step: int) -> tuple[int, int]:
        epoch, offset = divmod(self._first_row(step) * self.context, self._epoch_tokens)
        return epoch, offset // self.context

    @property
    def steps_per_epoch(self) -> int:
        return -(-self._epoch_tokens // (self.batch_rows * self.context))

    def report(self) -> dict[str, float]:
        """Of an epoch: documents, rows (the last of which the next epoch may complete), and the shares of packing."""
        return {
            "documents": self.corpus.num_documents,
            "rows": -(-self._epoch_tokens // self.context),
            "utilisation": 1.0,
            "padding_share": 0.0,
            "cropped_share": 0.0,
        }

    def _fill(self, start: int, out: np.ndarray) -> None:
        """Copies the stream's tokens from position `start` on."""
        done = 0
        while done < len(out):
            epoch, offset = divmod(start + done, self._epoch_tokens)
            order, ends = self._epoch(epoch)
            count = min(len(out) - done, self._epoch_tokens - offset)
            # The documents that these tokens lie in, and which tokens of the first and last of them.
            first = int(np.searchsorted(ends, offset, side="right"))
            last = int(np.searchsorted(ends, offset + count, side="left"))
            documents = order[first : last + 1]
            begins = ends[first : last + 1] - self.corpus.lengths[documents]
            skipped = np.maximum(offset - begins, 0)
            length = np.minimum(ends[first : last + 1], offset + count) - begins - skipped
            at = done + begins + skipped - offset
            self.corpus.copy(out, at, self.corpus.starts[documents] + skipped, length)
            done += count

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The epoch's order of documents, and where each ends in its stream."""
        with self._lock:
            found = self._epochs.pop(epoch, None)
            if found is None:
                order = numbers(self.seed, epoch, 0).permutation(self.corpus.num_documents)
                found = order, np.cumsum(self.corpus.lengths[order])
            self._epochs[epoch] = found
            while len(self._epochs) > EPOCHS_KEPT:
                del self._epochs[next(iter(self._epochs))]
            return found
