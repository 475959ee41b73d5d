"""Loader of packed rows, prefetch in a thread, and windows for validation.

Each epoch takes one group of documents after the other (batch.py). It permutes the pieces (pieces.py) of a group by
(seed, epoch, group), cuts the permutation into chunks, packs each chunk into rows, and shuffles the rows of the chunk.
The rows of all epochs form one endless sequence; step s reads rows s·batch_rows to (s + 1)·batch_rows - 1, so a batch
may span two epochs. Rank r of N reads rows r, r + N, … of the global batch. So neither the number of ranks nor
accumulation changes the training data, and resuming needs no state.

Chunks are packed when they are first read (about a million pieces a second). The number of rows of each chunk is kept,
in a file beside the shards too (row_counts.py): a run that is resumed finds its place in it, and packs one chunk.

Best-fit keeps the tail of a piece that it cuts, so an epoch shows every token once. With masks it does not,
because a tail may have no target. With masks, a BOS in mid-document is no target. A BOS that follows a part of
a document that continues elsewhere is never a target, because no document ended there.

Pieces without a target are left out. The first segment of a row is never cut shorter than the row, so every
row has a target, and so has every batch and micro-batch of every rank.
"""

from __future__ import annotations

import inspect
import itertools
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from quern.data import batch, index, packing, pieces
from quern.data.batch import GROUP_SIZE, Batch, Batches, BatchSource
from quern.data.packing import Packer, Packing, pack, packer
from quern.data.pieces import TOO_LONG, Pieces, cut, make_pieces, narrow
from quern.data.prefetch import prefetch_items
from quern.data.row_counts import RowCounts
from quern.data.shards import Corpus, fingerprint
from quern.terminal import Meter, counted

CHUNKS_KEPT = 3  # a batch rarely reads more than two; the third is for a second reader, such as prefetch
GROUPS_KEPT = 2  # a batch may span two


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
        group_size: See `Batches`.

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
        group_size: int | None = GROUP_SIZE,
    ) -> None:
        super().__init__(corpus, context, batch_rows, seed, bos, group_size)
        packer(packing)  # an unknown name is refused here, not at the first batch
        if chunk_documents < 1:
            raise ValueError(f"chunk_documents ({chunk_documents}) must be at least 1")
        if too_long not in TOO_LONG:
            raise ValueError(f"unknown too_long {too_long!r}; use one of: {', '.join(TOO_LONG)}")
        self.packing, self.too_long, self.buffer, self.chunk_documents = packing, too_long, buffer, chunk_documents
        self._row_tokens = context + 1
        self._keeps_tails = too_long == "split" and not corpus.masked
        self._pieces = lru_cache(GROUPS_KEPT)(self._make_pieces)
        self._permutation = lru_cache(1)(self._make_permutation)
        self._chunk = lru_cache(CHUNKS_KEPT)(self._make_chunk)
        self._lock = threading.Lock()
        groups = itertools.takewhile(lambda turn: self._group_of(turn)[0] == 0, itertools.count())
        first = next((group for group in groups if len(self._pieces(group))), None)
        if first is None:
            long = sum(int((self._pieces(group).lengths > self._row_tokens).sum()) for group in range(self._groups))
            raise ValueError(
                f"nothing to learn: none of {counted(corpus.num_documents, 'document')} has a target in a row of "
                f"{self._row_tokens:,} tokens ({long:,} are longer than that and too_long is "
                f"{too_long!r}); lengthen the context or check the masks"
            )
        self._first, self._counts = first, RowCounts(self._counts_path())

    def batch(self, step: int, rank: int = 0, ranks: int = 1) -> Batch:
        wanted = self._rows_of(step, rank, ranks)
        shape = (len(wanted), self._row_tokens)
        tokens = np.full(shape, self.corpus.bos, dtype=np.int32)
        mask = np.zeros(shape, dtype=bool)
        with self._lock:
            self._count_to(self._last_row(step), silent=rank != 0)
        done = 0
        while done < len(wanted):
            chunk, base, end = self._find(int(wanted[done]), silent=rank != 0)
            here = int(np.searchsorted(wanted, end))
            self._fill(chunk, wanted[done:here] - base, tokens[done:here], mask[done:here])
            done = here
        return Batch.of_rows(tokens, mask[:, 1:])

    def position(self, step: int) -> tuple[int, int]:
        first = self._first_row(step)
        with self._lock:
            self._count_to(first, silent=True)
            epoch, _ = self._group_of(self._counts.find(first)[0])
            return epoch, first - (self._counts.rows_before(epoch * self._groups) if epoch else 0)

    @property
    def steps_per_epoch(self) -> int:
        """Steps that read every row of the first epoch; other epochs differ by a few. Packs the whole epoch."""
        with self._lock:
            while self._next_chunk()[0] < self._groups:
                self._append_chunk()
            return -(-self._counts.rows_before(self._groups) // self.batch_rows)

    def report(self) -> dict[str, float]:
        """Measures the first group of the first epoch; a corpus of up to `group_size` is one group.

        Returns:
            documents: Number of documents of the corpus; documents_measured: of the group.
            documents_without_target: Number of documents of the group that are left out: no target, or dropped.
            documents_too_long: Documents longer than a row, left out or not; documents_split: those that were cut.
            pieces: Pieces of the group, whole documents included.
            left_out_share: Share of the group's tokens (without BOS) in no piece: no target, or dropped.
            added_bos_share: Share of all slots with a BOS that cutting added.
            The shares of `Packing.report` over the first chunk; cropped_share is of the tokens in pieces, or with
            "crop" of whole documents.
        """
        chunk, _, _ = self._find(0, silent=True)
        group, packed = self._pieces(self._first), chunk.packing.report()
        documents = {"documents": self.corpus.num_documents, "documents_measured": len(group.lengths)}
        added = (len(chunk.source) - chunk.heads) / (chunk.packing.rows * self._row_tokens)
        return documents | group.report | packed | {"added_bos_share": added}

    def _find(self, row: int, silent: bool) -> tuple[_Chunk, int, int]:
        """The chunk of a row (an index over all epochs), its first row, and its end. silent: as `Meter`."""
        with self._lock:
            self._count_to(row, silent)
            turn, part, first, end = self._counts.find(row)
            chunk = self._chunk(turn, part)
            if len(chunk.order) != end - first:
                raise ValueError(f"{self._counts.path} was made from other rows: remove it")
            return chunk, first, end

    def _count_to(self, row: int, silent: bool) -> None:
        """Packs chunks until the one of this row is known."""
        if self._counts.total > row:
            return
        with Meter("packing the text before this step", row, "rows", silent) as meter:
            while self._counts.total <= row:
                meter.at(self._counts.total)
                self._append_chunk()

    def _append_chunk(self) -> None:
        turn, part = self._next_chunk()
        self._counts.append(turn, len(self._chunk(turn, part).order))

    def _next_chunk(self) -> tuple[int, int]:
        """The first chunk that is not counted: the turn of its group (see `_group_of`), and its number in the group."""
        turn, part = self._counts.last
        part += 1
        while part >= len(self._bounds(turn)) - 1:
            turn, part = turn + 1, 0
        return turn, part

    def _make_pieces(self, group: int) -> Pieces:
        return make_pieces(self.corpus, *self._documents(group), self.context, self.too_long)

    def _bounds(self, turn: int) -> np.ndarray:
        """The first piece of each chunk of a group, and the end of the last."""
        count = len(self._pieces(self._group_of(turn)[1]))
        chunks = -(-count // self.chunk_documents)
        return np.arange(chunks + 1) * count // max(1, chunks)

    def _make_permutation(self, turn: int) -> np.ndarray:
        epoch, group = self._group_of(turn)
        return self._numbers(epoch, 0, group).permutation(narrow(np.arange(len(self._pieces(group)))))

    def _make_chunk(self, turn: int, part: int) -> _Chunk:
        epoch, group = self._group_of(turn)
        begin, end = self._bounds(turn)[part : part + 2]
        pieces, piece = self._pieces(group), self._permutation(turn)[begin:end]
        lengths = pieces.lengths[pieces.document[piece]] - pieces.offset[piece]
        if self.too_long == "split":  # with "crop" the whole document is offered, so that cropped tokens are counted
            lengths = np.minimum(lengths, self._row_tokens)
        packing = pack(lengths, self._row_tokens, self.packing, self.buffer, keep_tails=self._keeps_tails)
        heads = int(np.count_nonzero(pieces.offset[piece] == 0))
        piece = piece[packing.document]
        document, start = pieces.document[piece], pieces.offset[piece] + packing.start
        return _Chunk(
            packing,
            source=pieces.starts[document] + start,
            resumed=start > 0,
            broken=start + packing.length < pieces.lengths[document],
            order=self._numbers(epoch, 1 + part, group).permutation(packing.rows),
            heads=heads,
        )

    def _counts_path(self) -> Path | None:
        """Where row counts are kept: under a name that changes with all that they depend on, the code included."""
        if self.corpus.cache is None or self.corpus.fingerprint is None or not isinstance(self.packing, str):
            return None
        code = [inspect.getsource(module) for module in (sys.modules[__name__], batch, index, packing, pieces)]
        marks = [self.packing, self.too_long, self.seed, self.context, self.buffer, self.chunk_documents]
        marks += [self.group_size, self.corpus.fingerprint, np.__version__, *code]
        return self.corpus.cache / f"{fingerprint(*map(str, marks))[:32]}.rows"

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


def prefetch(
    loader: BatchSource,
    start: int,
    stop: int | None,
    depth: int = 2,
    rank: int = 0,
    ranks: int = 1,
    give_up: Callable[[], bool] = lambda: False,
) -> Generator[Batch, None, None]:
    """Reads batches ahead in a thread, which ends when the iterator is closed or dropped.

    Args:
        loader: The source.
        start, stop: First step, and the step after the last; endless if stop is None.
        depth: Batches that are read ahead.
        rank, ranks: See `Batches.batch`.
        give_up: Asked while no batch is ready; if it returns True, there are no more.

    Raises:
        Exception: An error of the reader, when its batch is asked for.
    """
    steps = itertools.count(start) if stop is None else range(start, stop)
    return prefetch_items((loader.batch(step, rank, ranks) for step in steps), depth, give_up)


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
    document, offset = cut(corpus.lengths, context)
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
