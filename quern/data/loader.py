"""Loader of packed rows, prefetch in a thread, and windows for validation.

A document longer than a row (context + 1 tokens) is cut into pieces: each is BOS and up to `context` tokens. A
shorter document is one piece. A piece is a position in the corpus; no token is copied. Each epoch permutes all
pieces by (seed, epoch), cuts the permutation into chunks, packs each chunk into rows, and shuffles the rows of
the chunk. The rows of all epochs form one endless sequence; step s reads rows s·batch_rows to
(s + 1)·batch_rows - 1, so a batch may span two epochs. Rank r of N reads rows r, r + N, … of the global batch.
So neither the number of ranks nor accumulation changes the training data, and resuming needs no state.

Chunks are packed when they are first read (about a million pieces a second), and only the number of rows of each
chunk is kept. To resume late in a run, the loader packs all earlier chunks again.

Best-fit keeps the tail of a piece that it cuts, so an epoch shows every token once. With masks it does not,
because a tail may have no target. With masks, a BOS in mid-document is no target. A BOS that follows a part of
a document that continues elsewhere is never a target, because no document ended there.

Pieces without a target are left out. The first segment of a row is never cut shorter than the row, so every
row has a target, and so has every batch and micro-batch of every rank.
"""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_right
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from quern.data.batch import Batch, Batches, BatchSource
from quern.data.packing import Packer, Packing, pack, packer
from quern.data.prefetch import prefetch_items
from quern.data.shards import Corpus

MASK_TOKENS = 1 << 18  # of masks that are read at a time
CHUNKS_KEPT = 3  # a batch rarely reads more than two; the third is for a second reader, such as prefetch
TOO_LONG = ("split", "crop", "drop")


@dataclass(frozen=True)
class _Chunk:
    """A packed chunk.

    Args:
        packing: Its rows.
        source: Position in the corpus of the token that the BOS of each segment replaces.
        resumed: Whether a segment begins in mid-document.
        broken: Whether a segment ends in mid-document.
        order: The rows, shuffled.
        heads: Number of pieces that begin a document.
    """

    packing: Packing
    source: np.ndarray
    resumed: np.ndarray
    broken: np.ndarray
    order: np.ndarray
    heads: int


class Loader(Batches):
    """Batches of packed rows.

    Args:
        corpus, context, batch_rows, seed, bos: See `Batches`.
        packing: A key of `packing.METHODS`, or a packer.
        too_long: What happens to a document longer than context + 1 tokens: "split" cuts it into pieces (best-fit
            then keeps tails, unless there are masks), "crop" keeps its head, "drop" leaves it out.
        buffer: See `pack`.
        chunk_documents: Pieces that are packed together.

    Raises:
        ValueError: A value is out of range or unknown, or no document has a target.
    """

    def __init__(
        self,
        corpus: Corpus,
        context: int,
        batch_rows: int,
        seed: int = 0,
        packing: str | Packer = "best-fit",
        bos: int | None = None,
        *,
        too_long: str = "split",
        buffer: int = 1000,
        chunk_documents: int = 65536,
    ) -> None:
        super().__init__(corpus, context, batch_rows, seed, bos)
        packer(packing)  # an unknown name is refused here, not at the first batch
        if chunk_documents < 1:
            raise ValueError(f"chunk_documents ({chunk_documents}) must be at least 1")
        if too_long not in TOO_LONG:
            raise ValueError(f"unknown too_long {too_long!r}; use one of: {', '.join(TOO_LONG)}")
        self.packing, self.too_long, self.buffer = packing, too_long, buffer
        self._row_tokens = context + 1
        self._keeps_tails = too_long == "split" and not corpus.masked
        long = corpus.lengths > self._row_tokens
        document, offset = _cut(corpus, context, whole=too_long != "split")
        learns = _learns(corpus, document, offset, self._row_tokens)
        kept = learns & ~long[document] if too_long == "drop" else learns
        if not kept.any():
            raise ValueError(
                f"nothing to learn: none of {corpus.num_documents:,} documents has a target in a row of "
                f"{self._row_tokens:,} tokens ({int(long.sum()):,} are longer than that and too_long is "
                f"{too_long!r}); lengthen the context or check the masks"
            )
        # The document of each piece, and the index in it of the token that BOS replaces (0: BOS itself).
        self._document, self._offset = _narrow(document[kept]), _narrow(offset[kept])
        learning = np.bincount(document[learns], minlength=corpus.num_documents) > 0
        too_long_count = int((long & learning).sum())
        in_pieces = int((self._lengths(slice(None)) - 1).sum())
        self._counts = {
            "documents": corpus.num_documents,
            "documents_without_target": int((~learning).sum()),
            "documents_too_long": too_long_count,
            "documents_split": too_long_count if too_long == "split" else 0,
            "pieces": len(self._document),
            "left_out_share": 1 - in_pieces / int((corpus.lengths - 1).sum()),
        }
        chunks = -(-len(self._document) // chunk_documents)
        self._bounds = np.arange(chunks + 1) * len(self._document) // chunks
        self._row_ends: list[int] = []  # rows up to the end of each chunk, over all epochs
        self._chunk = lru_cache(CHUNKS_KEPT)(self._make_chunk)
        self._permutation = lru_cache(1)(self._make_permutation)
        self._lock = threading.Lock()

    def batch(self, step: int, rank: int = 0, ranks: int = 1) -> Batch:
        wanted = self._rows_of(step, rank, ranks)
        shape = (len(wanted), self._row_tokens)
        tokens = np.full(shape, self.corpus.bos, dtype=np.int32)
        mask = np.zeros(shape, dtype=bool)
        done = 0
        while done < len(wanted):
            _, chunk, base, end = self._find(int(wanted[done]))
            here = int(np.searchsorted(wanted, end))
            self._fill(chunk, wanted[done:here] - base, tokens[done:here], mask[done:here])
            done = here
        return Batch.of_rows(tokens, mask[:, 1:])

    def position(self, step: int) -> tuple[int, int]:
        first = self._first_row(step)
        index, _, _, _ = self._find(first)
        epoch = index // self._chunks_per_epoch
        before = epoch * self._chunks_per_epoch
        return epoch, first - (self._row_ends[before - 1] if before else 0)

    @property
    def steps_per_epoch(self) -> int:
        """Steps that read every row of the first epoch; other epochs differ by a few. Packs the whole epoch."""
        with self._lock:
            while len(self._row_ends) < self._chunks_per_epoch:
                self._append_chunk()
        return -(-self._row_ends[self._chunks_per_epoch - 1] // self.batch_rows)

    def report(self) -> dict[str, float]:
        """Measures the first epoch.

        Returns:
            documents, documents_without_target: Counts over the corpus.
            documents_too_long: Documents longer than a row; documents_split: those of them that were cut.
            pieces: Pieces of an epoch, whole documents included.
            left_out_share: Share of the corpus's tokens (without BOS) in no piece: no target, or dropped.
            added_bos_share: Share of all slots with a BOS that cutting added.
            The shares of `Packing.report` over the first chunk; cropped_share is of the tokens in pieces, or with
            "crop" of whole documents.
        """
        _, chunk, _, _ = self._find(0)
        packed = chunk.packing.report()
        added = len(chunk.source) - chunk.heads
        return self._counts | packed | {"added_bos_share": added / (chunk.packing.rows * self._row_tokens)}

    @property
    def _chunks_per_epoch(self) -> int:
        return len(self._bounds) - 1

    def _find(self, row: int) -> tuple[int, _Chunk, int, int]:
        """The chunk of a row (an index over all epochs): its index, the chunk, its first row, its end."""
        with self._lock:
            while not self._row_ends or self._row_ends[-1] <= row:
                self._append_chunk()
            index = bisect_right(self._row_ends, row)
            chunk = self._chunk(index)
            return index, chunk, self._row_ends[index] - len(chunk.order), self._row_ends[index]

    def _append_chunk(self) -> None:
        chunk = self._chunk(len(self._row_ends))
        self._row_ends.append((self._row_ends[-1] if self._row_ends else 0) + len(chunk.order))

    def _lengths(self, pieces: np.ndarray | slice) -> np.ndarray:
        """Tokens of pieces with BOS; with "crop", of whole documents, so that cropped tokens are counted."""
        rest = self.corpus.lengths[self._document[pieces]] - self._offset[pieces]
        return np.minimum(rest, self._row_tokens) if self.too_long == "split" else rest

    def _make_permutation(self, epoch: int) -> np.ndarray:
        return self._numbers(epoch, 0).permutation(_narrow(np.arange(len(self._document))))

    def _make_chunk(self, index: int) -> _Chunk:
        epoch, part = divmod(index, self._chunks_per_epoch)
        piece = self._permutation(epoch)[self._bounds[part] : self._bounds[part + 1]]
        packing = pack(self._lengths(piece), self._row_tokens, self.packing, self.buffer, keep_tails=self._keeps_tails)
        heads = int(np.count_nonzero(self._offset[piece] == 0))
        piece = piece[packing.document]
        document, start = self._document[piece], self._offset[piece] + packing.start
        return _Chunk(
            packing,
            source=self.corpus.starts[document] + start,
            resumed=start > 0,
            broken=start + packing.length < self.corpus.lengths[document],
            order=self._numbers(epoch, 1 + part).permutation(packing.rows),
            heads=heads,
        )

    def _fill(self, chunk: _Chunk, rows: np.ndarray, tokens: np.ndarray, mask: np.ndarray) -> None:
        """Copies rows (indices into chunk.order) to `tokens` and `mask`, (rows, row_tokens), contiguous."""
        packed = chunk.order[rows]
        first = chunk.packing.row_offsets[packed]
        counts = chunk.packing.row_offsets[packed + 1] - first
        before = np.cumsum(counts) - counts
        segment = np.arange(counts.sum()) + np.repeat(first - before, counts)
        length = chunk.packing.length[segment]
        ends = np.cumsum(length)
        row_starts = (ends - length)[before]  # in the sequence of all copied tokens
        at = ends - length + np.repeat(np.arange(len(rows)) * self._row_tokens - row_starts, counts)
        source = chunk.source[segment]
        flat_tokens, flat_mask = tokens.reshape(-1), mask.reshape(-1)
        self.corpus.copy(flat_tokens, at, source, length)
        flat_tokens[at] = self.corpus.bos
        if not self.corpus.masked:
            mask[:] = np.arange(self._row_tokens) < np.add.reduceat(length, before)[:, None]
        else:
            self.corpus.copy_mask(flat_mask, at, source, length)
            flat_mask[at[chunk.resumed[segment]]] = False  # it has the mask of the token that BOS replaced
        following = (at + length)[chunk.broken[segment]]
        flat_mask[following[following % self._row_tokens > 0]] = False


def _cut(corpus: Corpus, context: int, whole: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """(document, offset) of consecutive pieces, int64: piece = BOS and up to `context` tokens from offset + 1 on.

    A document of BOS alone has no piece. With `whole`, each document is one piece.
    """
    counts = np.ones_like(corpus.lengths) if whole else -(-(corpus.lengths - 1) // context)
    document = np.repeat(np.arange(corpus.num_documents), counts)
    return document, (np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)) * context


def _learns(corpus: Corpus, document: np.ndarray, offset: np.ndarray, row_tokens: int) -> np.ndarray:
    """(pieces,) bool: whether the first row_tokens tokens of a piece have a target. BOS is no target."""
    targets = np.minimum(corpus.lengths[document] - offset, row_tokens) - 1
    learns = targets > 0
    if not corpus.masked:
        return learns
    first = corpus.starts[document] + offset + 1
    longer = np.flatnonzero(learns)
    for some in np.split(longer, np.flatnonzero(np.diff(np.cumsum(targets[longer]) // MASK_TOKENS)) + 1):
        if not some.size:
            continue
        ends = np.cumsum(targets[some])
        mask = np.empty(int(ends[-1]), dtype=bool)
        corpus.copy_mask(mask, ends - targets[some], first[some], targets[some])
        learns[some] = np.logical_or.reduceat(mask, ends - targets[some])
    return learns


def _narrow(indices: np.ndarray) -> np.ndarray:
    """The indices as int32 if they fit, to halve their memory: there is one for each piece of the corpus."""
    return indices.astype(np.int32 if not indices.size or indices.max() < 1 << 31 else np.int64)


def prefetch(
    loader: BatchSource, start: int, stop: int | None, depth: int = 2, rank: int = 0, ranks: int = 1
) -> Generator[Batch, None, None]:
    """Reads batches ahead in a thread, which ends when the iterator is closed or dropped.

    Args:
        loader: The source.
        start, stop: First step, and the step after the last; endless if stop is None.
        depth: Batches that are read ahead.
        rank, ranks: See `Batches.batch`.

    Raises:
        Exception: An error of the reader, when its batch is asked for.
    """
    steps = itertools.count(start) if stop is None else range(start, stop)
    return prefetch_items((loader.batch(step, rank, ranks) for step in steps), depth)


def windows(corpus: Corpus, context: int, rows: int = 32, multiple: int = 64) -> Iterator[Batch]:
    """Cuts every document into consecutive windows; each token except the leading BOS is a target once.

    A window has tokens [BOS, t1 … t(n-1)] and targets [t1 … tn], n ≤ context. Windows of similar length share a
    batch, longest first. Bits per byte is measured on these windows; they need no seed.

    Args:
        corpus: The documents.
        context: Most targets of a window.
        rows: Rows of every batch; unused rows of the last batch are fully masked.
        multiple: T is the longest window of the batch rounded up to this, at most `context`. It bounds the number
            of shapes; `context` gives one shape.

    Raises:
        ValueError: A number is below 1, or no document has a token after BOS.
    """
    if context < 1 or rows < 1 or multiple < 1:
        raise ValueError(f"context ({context}), rows ({rows}) and multiple ({multiple}) must be at least 1")
    document, offset = _cut(corpus, context)
    if not document.size:
        raise ValueError("nothing to evaluate: no document has a token after its BOS")
    length = np.minimum(context, corpus.lengths[document] - 1 - offset)
    by_length = np.argsort(-length, kind="stable")
    for at in range(0, len(by_length), rows):
        chosen = by_length[at : at + rows]
        width = min(context, -(-int(length[chosen[0]]) // multiple) * multiple)
        tokens = np.full((rows, width + 1), corpus.bos, dtype=np.int32)
        mask = np.zeros((rows, width), dtype=bool)
        mask[: len(chosen)] = np.arange(width) < length[chosen][:, None]
        source = corpus.starts[document[chosen]] + 1 + offset[chosen]
        corpus.copy(tokens.reshape(-1), np.arange(len(chosen)) * (width + 1) + 1, source, length[chosen])
        if corpus.masked:
            corpus.copy_mask(mask.reshape(-1), np.arange(len(chosen)) * width, source, length[chosen])
        yield Batch.of_rows(tokens, mask)
