"""The loader of packed rows.

A group is consecutive documents (docs/data.md, "The order of documents"). An epoch permutes the pieces (packing.py) of
each group by (seed, epoch, group), cuts the permutation into chunks, packs each chunk into rows, and shuffles its rows.
The rows of all epochs form one endless sequence; step s reads rows s·batch_rows to (s + 1)·batch_rows - 1, and rank r
of N every N-th of them. Resuming needs no state: the number of rows of each chunk before is found again by packing.

Best-fit keeps the tail of a piece that it cuts, so an epoch shows every token once; with masks it does not, because a
tail may have no target. Then a BOS in mid-document is no target, nor is a BOS after a part of a document that continues
elsewhere. Pieces without a target are left out. The first segment of a row is never cut shorter than the row, so every
row has a target, and so has every batch and micro-batch of every rank.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from quern.data.batch import Batch
from quern.data.packing import Packer, Packing, make_pieces, pack, stream
from quern.data.shards import Corpus
from quern.terminal import Meter, counted

GROUP_SIZE = 2_000_000_000
"""A million documents of 1,000 tokens. Larger groups shuffle better, and take more time and memory to begin."""
DOCUMENT_SIZE = 1000
"""A document adds so much to the size of its group beside its tokens, since it takes memory however short it is."""
CHUNKS_KEPT = 3  # a batch rarely reads more than two; the third is for a second reader, such as prefetch
GROUPS_KEPT = 2  # a batch may span two


@dataclass(frozen=True)
class _Chunk:
    """A packed chunk."""

    packing: Packing
    source: np.ndarray  # by segment: the position in the corpus of the token that its BOS replaces
    resumed: np.ndarray  # whether it begins in mid-document
    broken: np.ndarray  # whether it ends in mid-document
    order: np.ndarray  # the rows, shuffled
    heads: int  # pieces that begin a document


class Loader:
    """Batches of packed rows, by step, from 0.

    Args:
        context: Targets of a row.
        batch_rows: Rows of a global batch, over all ranks.
        packing: A key of `packing.METHODS`, or a packer.
        too_long: The treatment of a document longer than context + 1 tokens: "split" cuts it into pieces (best-fit
            then keeps tails, unless there are masks), "crop" keeps its head, "drop" leaves it out. A stream keeps all.
        group_size: Size of the documents that are shuffled together, in tokens + `DOCUMENT_SIZE` for each document;
            None for all documents, which a corpus needs in which one source follows the other.

    Raises:
        ValueError: No document has a target, or a stream would have masks.
    """

    ahead = True
    chunk_documents = 65536
    """Pieces that are packed together."""
    buffer = 1000
    """Pieces that best-fit chooses from."""

    def __init__(
        self,
        corpus: Corpus,
        context: int,
        batch_rows: int,
        seed: int = 0,
        packing: str | Packer = "best-fit",
        *,
        too_long: str = "split",
        group_size: int | None = GROUP_SIZE,
    ) -> None:
        self.corpus, self.context, self.batch_rows, self.seed = corpus, context, batch_rows, seed
        self.group_size, self._groups = group_size, groups_of(corpus, group_size)
        self._streams = packing in ("stream", stream)
        if self._streams and corpus.masked:
            raise ValueError("a stream learns every token: pack a corpus with masks by first-fit-decreasing instead")
        # A stream cuts whole documents by itself.
        self.packing, self.too_long = packing, "crop" if self._streams else too_long
        self._row_tokens = context + 1
        self._keeps_tails = self.too_long == "split" and not corpus.masked
        self._pieces = lru_cache(GROUPS_KEPT)(
            lambda group: make_pieces(corpus, *self._documents(group), context, self.too_long)
        )
        self._permutation = lru_cache(1)(self._make_permutation)
        self._chunk = lru_cache(CHUNKS_KEPT)(self._make_chunk)
        first = next((group for group in range(self._groups) if len(self._pieces(group))), None)
        if first is None:
            long = sum(self._pieces(group).report["documents_too_long"] for group in range(self._groups))
            raise ValueError(
                f"nothing to learn: none of {counted(corpus.num_documents, 'document')} has a target in a row of "
                f"{self._row_tokens:,} tokens ({long:,} are longer than that and too_long is "
                f"{too_long!r}); lengthen the context or check the masks"
            )
        self._first = first
        self._chunks: list[tuple[int, int, int]] = []
        """The chunks that were packed, in reading order: the turn of the group, the number in it, and the rows of all
        chunks to the end of this one."""

    def batch(self, step: int, rank: int = 0, ranks: int = 1) -> Batch:
        """Rows rank, rank + ranks, … of the global batch of `step`."""
        wanted = self._rows_of(step, rank, ranks)
        shape = (len(wanted), self._row_tokens)
        tokens = np.full(shape, self.corpus.bos, dtype=np.int32)
        mask = np.zeros(shape, dtype=bool)
        done = 0
        while done < len(wanted):
            chunk, base, end = self._find(int(wanted[done]), silent=rank != 0)
            here = int(np.searchsorted(wanted, end))
            self._fill(chunk, wanted[done:here] - base, tokens[done:here], mask[done:here])
            done = here
        return Batch.of_rows(tokens, mask[:, 1:])

    @property
    def steps_per_epoch(self) -> int:
        """Steps that read every row of the first epoch; other epochs differ by a few. Packs the whole epoch."""
        return -(-self.rows_per_epoch // self.batch_rows)

    @property
    def rows_per_epoch(self) -> int:
        """Rows of the first epoch. Packs it."""
        while self._next_chunk()[0] < self._groups:
            self._append_chunk()
        return self._chunks[bisect_left(self._chunks, (self._groups,)) - 1][2]

    def report(self) -> dict[str, float]:
        """Measures the first group of the first epoch; a corpus of up to `group_size` is one group.

        Returns:
            documents: Number of documents of the corpus; documents_measured: number of them in the group.
            documents_without_target: Number of documents of the group that are left out: no target, or dropped.
            documents_too_long: Documents longer than a row, left out or not.
            pieces: Documents that begin in the first chunk.
            added_bos_share: Share of all slots with a BOS that cutting added.
            And `Packing.report` of the first chunk; cropped_share is of the tokens in pieces, or with "crop" of whole
            documents.
        """
        chunk, group = self._find(0, silent=True)[0], self._pieces(self._first)
        documents = {"documents": self.corpus.num_documents, "documents_measured": len(group.lengths)}
        tails = 0 if self._streams else len(chunk.source) - chunk.heads
        added = tails / (chunk.packing.rows * self._row_tokens)
        packed = {"pieces": chunk.heads, **chunk.packing.report(), "added_bos_share": added}
        return {**documents, **group.report, **packed}

    def _rows_of(self, step: int, rank: int, ranks: int) -> np.ndarray:
        """Indices, over all epochs, of the rows that this rank reads at `step`."""
        if not 0 <= rank < ranks <= self.batch_rows:
            raise ValueError(
                f"rank {rank} of {ranks} cannot read a batch of {self.batch_rows} rows: use fewer ranks, "
                "or more tokens in a batch (at least one row for each rank)"
            )
        return step * self.batch_rows + np.arange(rank, self.batch_rows, ranks)

    def _find(self, row: int, silent: bool) -> tuple[_Chunk, int, int]:
        """The chunk of a row (an index over all epochs), its first row, and its end. silent: as `Meter`."""
        if self._packed_rows <= row:
            with Meter("packing the text before this step", row, "rows", silent) as meter:
                while self._packed_rows <= row:
                    meter.at(self._packed_rows)
                    self._append_chunk()
        at = bisect_right(self._chunks, row, key=lambda chunk: chunk[2])
        turn, part, end = self._chunks[at]
        return self._chunk(turn, part), self._chunks[at - 1][2] if at else 0, end

    @property
    def _packed_rows(self) -> int:
        return self._chunks[-1][2] if self._chunks else 0

    def _append_chunk(self) -> None:
        turn, part = self._next_chunk()
        self._chunks.append((turn, part, self._packed_rows + len(self._chunk(turn, part).order)))

    def _next_chunk(self) -> tuple[int, int]:
        """The first chunk that is not packed: the turn of its group (see `_group_of`), and its number in the group."""
        turn, part = self._chunks[-1][:2] if self._chunks else (0, -1)
        part += 1
        while part >= len(self._bounds(turn)) - 1:
            turn, part = turn + 1, 0
        return turn, part

    def _bounds(self, turn: int) -> np.ndarray:
        """The first piece of each chunk of a group, and the end of the last."""
        count = len(self._pieces(self._group_of(turn)[1]))
        chunks = -(-count // self.chunk_documents)
        return np.arange(chunks + 1) * count // max(1, chunks)

    def _documents(self, group: int) -> tuple[int, int]:
        """The first document of a group, and the one after its last."""
        if self.group_size is None:
            return 0, self.corpus.num_documents
        first, last = (self.corpus.at_size(g * self.group_size, DOCUMENT_SIZE) for g in (group, group + 1))
        return first, last

    def _group_of(self, turn: int) -> tuple[int, int]:
        """(epoch, group) of the group that is read at a turn; turns count over all epochs."""
        epoch, place = divmod(turn, self._groups)
        return epoch, int(self._numbers(epoch, 0, self._groups).permutation(self._groups)[place]) if epoch else place

    def _numbers(self, epoch: int, use: int, group: int = 0) -> np.random.Generator:
        """A generator for one use in one group of one epoch; the number after the last group's is for their order."""
        # A spawn key, not one list: SeedSequence([5]) equals SeedSequence([5, 0]), and [2**32, 0] equals [0, 1].
        key = (epoch, use, group) if group else (epoch, use)
        return np.random.Generator(np.random.Philox(np.random.SeedSequence(self.seed, spawn_key=key)))

    def _make_permutation(self, turn: int) -> np.ndarray:
        epoch, group = self._group_of(turn)
        return self._numbers(epoch, 0, group).permutation(len(self._pieces(group)))

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
        if not self._streams:
            flat_tokens[at] = self.corpus.bos
        if not self.corpus.masked:
            mask[:] = np.arange(self._row_tokens) < np.add.reduceat(length, before)[:, None]
        else:
            self.corpus.copy(flat_mask, at, source, length, mask=True)
            flat_mask[at[chunk.resumed[segment]]] = False  # it has the mask of the token that BOS replaced
        following = (at + length)[chunk.broken[segment]]
        flat_mask[following[following % self._row_tokens > 0]] = False


def groups_of(corpus: Corpus, group_size: int | None = GROUP_SIZE) -> int:
    """The number of groups of a corpus; see `Loader`. A group may be empty, after a document that is larger."""
    size = corpus.num_tokens + DOCUMENT_SIZE * corpus.num_documents
    return 1 if group_size is None else -(-size // group_size)
