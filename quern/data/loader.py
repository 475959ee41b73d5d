"""The loader: a batch is a pure function of (seed, step).

A document longer than a row of context + 1 tokens is cut into pieces, each BOS and up to `context` tokens; a
shorter one is one piece. Pieces are places in the corpus, nothing is copied. Each epoch permutes all pieces
by (seed, epoch), cuts the permutation into chunks, packs a chunk into rows and shuffles its rows. Rows of all
epochs form one endless sequence, and step s takes rows s·batch_rows up to (s + 1)·batch_rows, so a batch may
straddle epochs. Rank r of N reads rows r, r + N, … of that one global batch: neither the number of ranks nor
accumulation changes what is trained on, and resuming needs no state.

Packing runs lazily, a chunk at a time (about a million pieces a second), and only the rows per chunk are
remembered. Start-up and memory stay bounded; to resume deep in a run, the chunks before it are packed again.

Best-fit also keeps the tail of a piece it cuts to fill a row, so an epoch shows every token once. The BOS
that starts a piece or a tail in mid-document is no target where masks say what to learn, and a BOS that
follows a part of a document broken off before its end is never one: no document ended there.

Pieces without anything to learn are left out. A row's first segment is never cut shorter than the row, so
every row, hence every batch and micro-batch of any rank, has a target. With masks tails are not kept, as they
might have nothing to learn and begin a row.
"""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_right
from collections.abc import Generator, Iterator
from dataclasses import dataclass

import numpy as np

from quern.data.batch import Batch, Batches, check_seed, numbers
from quern.data.packing import METHODS, Packing, pack
from quern.data.prefetch import prefetch_items
from quern.data.shards import Corpus

CHUNKS_KEPT = 3  # a batch rarely touches more than two; the third lets a prefetch thread and a reader coexist
TOO_LONG = ("split", "crop", "drop")


@dataclass(frozen=True)
class _Chunk:
    """A packed chunk. Of each segment: source, the place in the corpus of the token whose slot it begins with
    (BOS takes it); resumed, it begins in mid-document; broken, it ends there. order: the rows, shuffled.
    heads: how many pieces are a document's first."""

    packing: Packing
    source: np.ndarray
    resumed: np.ndarray
    broken: np.ndarray
    order: np.ndarray
    heads: int


class Loader(Batches):
    """Batches of `batch_rows` (all ranks together) rows of `context` targets.

    seed: ≥ 0. packing: one of packing.METHODS. too_long: what becomes of a document longer than context + 1
    tokens. "split" cuts it into pieces that start with BOS, and best-fit keeps the tails it cuts off (unless
    there are masks); "crop" keeps its head and "drop" leaves it out, and cut tails are discarded. `report`
    counts all that. buffer: see packing. bos: checked against the corpus when given. chunk_documents: how
    many pieces are packed at a time.
    """

    def __init__(
        self,
        corpus: Corpus,
        context: int,
        batch_rows: int,
        seed: int = 0,
        packing: str = "best-fit",
        bos: int | None = None,
        *,
        too_long: str = "split",
        buffer: int = 1000,
        chunk_documents: int = 65536,
    ) -> None:
        if context < 1 or batch_rows < 1 or chunk_documents < 1:
            sizes = f"context ({context}), batch_rows ({batch_rows}), chunk_documents ({chunk_documents})"
            raise ValueError(f"{sizes}: each must be at least 1")
        check_seed(seed)
        if packing not in METHODS:
            raise ValueError(f"unknown packing {packing!r}; use one of: {', '.join(METHODS)}")
        if too_long not in TOO_LONG:
            raise ValueError(f"unknown too_long {too_long!r}; use one of: {', '.join(TOO_LONG)}")
        if bos is not None and bos != corpus.bos:
            raise ValueError(f"the corpus starts documents with id {corpus.bos}, the tokenizer's BOS is {bos}")
        self.corpus, self.context, self.batch_rows, self.seed = corpus, context, batch_rows, seed
        self.packing, self.too_long, self.buffer = packing, too_long, buffer
        self._row_tokens = context + 1
        self._keeps_tails = too_long == "split" and corpus.masks is None
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
        # Of each piece its document, and the index there of the token whose place BOS takes (0: BOS itself).
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
        self._chunks: dict[int, _Chunk] = {}  # most recently used last
        self._permutation: tuple[int, np.ndarray] | None = None
        self._lock = threading.Lock()

    def batch(self, step: int, rank: int = 0, ranks: int = 1) -> Batch:
        """Rows rank, rank + ranks, … of the global batch of `step` (from 0)."""
        wanted = self._rows_of(step, rank, ranks)
        shape = (len(wanted), self._row_tokens)
        tokens = np.full(shape, self.corpus.bos, dtype=np.int32)
        mask = np.zeros(shape, dtype=bool)
        done = 0
        while done < len(wanted):
            index, chunk, base, end = self._find(int(wanted[done]))
            here = int(np.searchsorted(wanted, end))
            self._fill(chunk, wanted[done:here] - base, tokens[done:here], mask[done:here])
            done = here
        return Batch(
            np.ascontiguousarray(tokens[:, :-1]),
            np.ascontiguousarray(tokens[:, 1:]),
            np.ascontiguousarray(mask[:, 1:]),
        )

    def position(self, step: int) -> tuple[int, int]:
        """(epoch, row within it) where the batch of `step` begins."""
        first = self._first_row(step)
        index, _, _, _ = self._find(first)
        epoch = index // self._chunks_per_epoch
        before = epoch * self._chunks_per_epoch
        return epoch, first - (self._row_ends[before - 1] if before else 0)

    @property
    def steps_per_epoch(self) -> int:
        """Steps that see every row of the first epoch (others differ by a few). Packs that whole epoch."""
        with self._lock:
            while len(self._row_ends) < self._chunks_per_epoch:
                self._append_chunk()
        return -(-self._row_ends[self._chunks_per_epoch - 1] // self.batch_rows)

    def report(self) -> dict[str, float]:
        """Counts over the corpus, and the packing's shares over the first chunk of the first epoch.

        documents_too_long: longer than a row; documents_split: those of them that were cut. pieces: all that
        an epoch packs, whole documents included. left_out_share: of the corpus's tokens but BOS, those in no
        piece (without a target, or dropped). added_bos_share: of all row slots, those with a BOS beyond each
        document's own, which cutting adds. The rest: Packing.report, whose cropped_share is of the tokens in
        pieces, or with "crop" of whole documents.
        """
        _, chunk, _, _ = self._find(0)
        packed = chunk.packing.report()
        added = len(chunk.source) - chunk.heads
        return self._counts | packed | {"added_bos_share": added / (chunk.packing.rows * self._row_tokens)}

    @property
    def _chunks_per_epoch(self) -> int:
        return len(self._bounds) - 1

    def _find(self, row: int) -> tuple[int, _Chunk, int, int]:
        """The chunk that holds a row (counted over all epochs): its index, itself, its first row, its end."""
        with self._lock:
            while not self._row_ends or self._row_ends[-1] <= row:
                self._append_chunk()
            index = bisect_right(self._row_ends, row)
            chunk = self._chunks.pop(index, None) or self._make_chunk(index)
            self._keep(index, chunk)
            return index, chunk, self._row_ends[index] - len(chunk.order), self._row_ends[index]

    def _append_chunk(self) -> None:
        index = len(self._row_ends)
        chunk = self._make_chunk(index)
        self._row_ends.append((self._row_ends[-1] if self._row_ends else 0) + len(chunk.order))
        self._keep(index, chunk)

    def _keep(self, index: int, chunk: _Chunk) -> None:
        self._chunks[index] = chunk
        while len(self._chunks) > CHUNKS_KEPT:
            del self._chunks[next(iter(self._chunks))]

    def _lengths(self, pieces: np.ndarray | slice) -> np.ndarray:
        """Tokens of pieces, BOS included; with "crop" of whole documents, so that what is lost counts."""
        rest = self.corpus.lengths[self._document[pieces]] - self._offset[pieces]
        return np.minimum(rest, self._row_tokens) if self.too_long == "split" else rest

    def _make_chunk(self, index: int) -> _Chunk:
        epoch, part = divmod(index, self._chunks_per_epoch)
        if self._permutation is None or self._permutation[0] != epoch:
            self._permutation = (
                epoch,
                numbers(self.seed, epoch, 0).permutation(_narrow(np.arange(len(self._document)))),
            )
        piece = self._permutation[1][self._bounds[part] : self._bounds[part + 1]]
        packing = pack(self._lengths(piece), self._row_tokens, self.packing, self.buffer, keep_tails=self._keeps_tails)
        heads = int(np.count_nonzero(self._offset[piece] == 0))
        piece = piece[packing.document]
        document, start = self._document[piece], self._offset[piece] + packing.start
        return _Chunk(
            packing,
            source=self.corpus.starts[document] + start,
            resumed=start > 0,
            broken=start + packing.length < self.corpus.lengths[document],
            order=numbers(self.seed, epoch, 1 + part).permutation(packing.rows),
            heads=heads,
        )

    def _fill(self, chunk: _Chunk, rows: np.ndarray, tokens: np.ndarray, mask: np.ndarray) -> None:
        """Copies rows (indices into chunk.order) to tokens and mask: (rows, row_tokens), contiguous."""
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
        if self.corpus.masks is None:
            mask[:] = np.arange(self._row_tokens) < np.add.reduceat(length, before)[:, None]
        else:
            for frm, to, count in zip(source.tolist(), at.tolist(), length.tolist(), strict=True):
                flat_mask[to : to + count] = self.corpus.masks[frm : frm + count]
            flat_mask[at[chunk.resumed[segment]]] = False  # here the mask is that of the token BOS replaced
        following = (at + length)[chunk.broken[segment]]
        flat_mask[following[following % self._row_tokens > 0]] = False


def _cut(corpus: Corpus, context: int, whole: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """(document, offset) of consecutive pieces of up to `context` tokens after their BOS, int64 each.

    A piece holds the document's tokens from offset + 1 on. A document of nothing but BOS has none. With
    `whole` each document is a single piece.
    """
    counts = np.ones_like(corpus.lengths) if whole else -(-(corpus.lengths - 1) // context)
    document = np.repeat(np.arange(corpus.num_documents), counts)
    return document, (np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)) * context


def _learns(corpus: Corpus, document: np.ndarray, offset: np.ndarray, row_tokens: int) -> np.ndarray:
    """(pieces,) bool: whether a piece's first row_tokens tokens hold a target; its BOS is none."""
    length = np.minimum(corpus.lengths[document] - offset, row_tokens)
    if corpus.masks is None:
        return length > 1
    source = corpus.starts[document] + offset
    targets = np.flatnonzero(corpus.masks)
    return np.searchsorted(targets, source + 1) < np.searchsorted(targets, source + length)


def _narrow(indices: np.ndarray) -> np.ndarray:
    """As int32 where that is wide enough: there is one for each piece of the corpus."""
    return indices.astype(np.int32 if not indices.size or indices.max() < 1 << 31 else np.int64)


def prefetch(
    loader: Batches, start: int, stop: int | None, depth: int = 2, rank: int = 0, ranks: int = 1
) -> Generator[Batch, None, None]:
    """Batches of steps start … stop - 1 (endless without stop), made `depth` ahead in a thread.

    An error of the reader is raised here, in its turn. The thread ends when the iterator is closed or
    dropped.
    """
    steps = itertools.count(start) if stop is None else range(start, stop)
    return prefetch_items((loader.batch(step, rank, ranks) for step in steps), depth)


def windows(corpus: Corpus, context: int, rows: int = 32, multiple: int = 64) -> Iterator[Batch]:
    """Every document in consecutive windows, each token but the leading BOS a target exactly once.

    A window is BOS and up to `context` tokens as targets: tokens [BOS, t1 … t(n-1)], targets [t1 … tn], n ≤
    context. Windows of like length share a batch, longest first; T is the longest one, rounded up to
    `multiple` (at most context), which bounds the number of shapes; set it to `context` for a single one.
    Each batch has `rows` rows, those that are left over are all masked. This is the measure behind bits per
    byte; it needs no seed.
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
        if corpus.masks is not None:
            for row, (frm, count) in enumerate(zip(source.tolist(), length[chosen].tolist(), strict=True)):
                mask[row, :count] = corpus.masks[frm : frm + count]
        yield Batch(np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:]), mask)
