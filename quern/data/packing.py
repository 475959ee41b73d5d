"""Rows from documents: pieces no longer than a row, packing, which chooses the pieces that share one, and windows.

A document longer than a row (context + 1 tokens) is cut into pieces: each is BOS and up to `context` tokens. A
shorter document is one piece. A piece is a position in the corpus; no token is copied.

Packing looks at lengths alone. A row has `row_tokens` slots (context + 1). Each packer in `METHODS` is a plain function
from lengths to rows:

    best-fit              Keep a buffer of documents; place the longest one that fits the remaining space. If
                          none fits, cut the shortest to fill the row. Only the last row is padded.
    greedy-crop           Documents in order, each cropped at the end of its row. Only the last row is padded.
    greedy-pad            Documents in order; start a new row when the next document does not fit.
    first-fit-decreasing  Longest first, each into the first row with room. Rows come out by falling length,
                          so shuffle them before training.
    stream                Documents end to end, cut at the ends of rows. A row begins with the last token of the
                          row before, so attention must separate the documents of a row at their BOS.

The tail of a cropped document is discarded. A stream keeps it, and best-fit can (`keep_tails`): there the tail returns
to the buffer as a document with its own BOS.

Source: Ding et al. 2024, "Fewer Truncations Improve Language Modeling" (arXiv 2404.10830). Their
best-fit-decreasing pads a row where best-fit here cuts a document.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from quern.data.batch import Batch
from quern.data.shards import Corpus

MASK_TOKENS = 1 << 18  # tokens whose masks are read at a time


@dataclass(frozen=True)
class Pieces:
    """The pieces of consecutive documents of a corpus."""

    starts: np.ndarray  # (documents,) int64, as in the corpus
    lengths: np.ndarray
    document: np.ndarray  # (pieces,) counted from the first of these
    offset: np.ndarray  # (pieces,) the index in the document of the token that BOS replaces, 0 for BOS itself
    report: dict[str, int]  # see `Loader.report`

    def __len__(self) -> int:
        return len(self.document)


def make_pieces(corpus: Corpus, first: int, last: int, context: int, too_long: str) -> Pieces:
    """The pieces of the documents `first` to `last` - 1 that have a target in a row. too_long: see `Loader`."""
    starts, lengths = corpus.take(np.arange(first, last))
    row_tokens = context + 1
    long = lengths > row_tokens
    document, offset = cut(lengths, context, whole=too_long != "split")
    learns = _learns(corpus, starts[document] + offset, np.minimum(lengths[document] - offset, row_tokens) - 1)
    kept = learns & ~long[document] if too_long == "drop" else learns
    learning = np.bincount(document[kept], minlength=len(lengths)) > 0
    report = {"documents_without_target": int((~learning).sum()), "documents_too_long": int(long.sum())}
    return Pieces(starts, lengths, document[kept], offset[kept], report)


def cut(lengths: np.ndarray, context: int, whole: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """(document, offset) of consecutive pieces, int64: piece = BOS and up to `context` tokens from offset + 1 on.

    A document of BOS alone has no piece. With `whole`, each document is one piece.
    """
    counts = np.ones_like(lengths) if whole else -(-(lengths - 1) // context)
    document = np.repeat(np.arange(len(lengths)), counts)
    return document, (np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)) * context


def _learns(corpus: Corpus, source: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """(pieces,) bool: whether any of the `targets` tokens after the one at `source` is a target. BOS is none."""
    learns = targets > 0
    if not corpus.masked or not learns.any():
        return learns
    longer = np.flatnonzero(learns)
    for some in np.split(longer, np.flatnonzero(np.diff(np.cumsum(targets[longer]) // MASK_TOKENS)) + 1):
        mask = corpus.slices(source[some] + 1, targets[some], mask=True)
        learns[some] = np.logical_or.reduceat(mask, np.cumsum(targets[some]) - targets[some])
    return learns


def windows(corpus: Corpus, context: int, rows: int = 32, multiple: int = 64) -> Iterator[Batch]:
    """Cuts every document into consecutive windows, on which bits per byte are measured.

    A window has tokens [BOS, t1 … t(n-1)] and targets [t1 … tn], n ≤ context, so each token except the leading BOS is a
    target once. Windows of similar length share a batch, longest first.

    Args:
        rows: Rows of every batch; unused rows of the last batch are fully masked.
        multiple: T is the longest window of the batch rounded up to this, at most `context`. It bounds the number
            of shapes; `context` gives one shape.

    Raises:
        ValueError: No document has a token after BOS.
    """
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
            corpus.copy(mask.reshape(-1), np.arange(len(chosen)) * width, source, length[chosen], mask=True)
        yield Batch.of_rows(tokens, mask)


Rows = tuple[np.ndarray, np.ndarray, np.ndarray]
"""(document, length, row_offsets): the fields of `Packing` with these names, int64."""
Packer = Callable[[np.ndarray, int, int, bool], Rows]
"""(lengths, row_tokens, buffer, keep_tails) → rows. Each length is at most row_tokens, except in a stream."""


@dataclass(frozen=True)
class Packing:
    """Segments in row order: row r holds segments row_offsets[r] to row_offsets[r + 1] - 1.

    A segment is BOS and the document's tokens start + 1 to start + length - 1. In a kept tail (start > 0), BOS
    replaces the last token of the previous segment of that document; in a stream, that token stays.
    """

    row_tokens: int  # slots of a row
    document: np.ndarray  # (segments,) int64, indices into the lengths that were packed
    start: np.ndarray  # (segments,) int64, 0 at the head of a document
    length: np.ndarray  # (segments,) int64, tokens with BOS
    row_offsets: np.ndarray  # (rows + 1,) int64
    offered_tokens: int  # tokens of all documents before cropping, without BOS

    @property
    def rows(self) -> int:
        return len(self.row_offsets) - 1

    def report(self) -> dict[str, float]:
        """The rows, the shares of slots that hold a segment (`utilisation`) and that hold none (`padding_share`), and
        the share of the offered tokens (without BOS) that are in no segment (`cropped_share`)."""
        filled, slots = int(self.length.sum()), self.rows * self.row_tokens
        used = filled / slots if slots else 0.0
        cropped = 1 - (filled - len(self.length)) / self.offered_tokens if self.offered_tokens else 0.0
        empty = 1 - used if slots else 0.0
        return {"rows": self.rows, "utilisation": used, "padding_share": empty, "cropped_share": cropped}


def best_fit(lengths: np.ndarray, row_tokens: int, buffer: int, keep_tails: bool) -> Rows:
    count = len(lengths)
    # One integer per document: the length in the high bits, the reversed index in the low bits. Bisection in a
    # sorted list of them finds the longest document that fits, and the earliest among equal lengths.
    bits = max(1, count.bit_length())
    reverse = np.arange(count - 1, -1, -1, dtype=np.int64)
    keys: list[int] = ((lengths << bits) | reverse).tolist()
    waiting = sorted(keys[:buffer])
    incoming = iter(keys[buffer:])
    order: list[int] = []
    taken: list[int] = []
    row_offsets = [0]
    space = row_tokens
    while waiting:
        if space == 0:
            row_offsets.append(len(order))
            space = row_tokens
        fits = bisect_left(waiting, (space + 1) << bits)
        key = waiting.pop(fits - 1 if fits else 0)
        order.append(key)
        wanted = key >> bits
        placed = wanted if wanted < space else space
        # The tail of a cut document returns to the buffer, with a BOS of its own.
        cut = keep_tails and wanted > space
        following = key - ((space - 1) << bits) if cut else next(incoming, None)
        if following is not None:
            insort(waiting, following)
        taken.append(placed)
        space -= placed
    if order:
        row_offsets.append(len(order))
    document = count - 1 - (np.array(order, dtype=np.int64) & ((1 << bits) - 1))
    return document, np.array(taken, dtype=np.int64), np.array(row_offsets, dtype=np.int64)


def _greedy(lengths: np.ndarray, row_tokens: int, *_: object, crop: bool) -> Rows:
    taken: list[int] = []
    row_offsets = [0]
    space = row_tokens
    for wanted in lengths.tolist():
        if space == 0 or (wanted > space and not crop):
            row_offsets.append(len(taken))
            space = row_tokens
        placed = wanted if wanted < space else space
        taken.append(placed)
        space -= placed
    if taken:
        row_offsets.append(len(taken))
    return np.arange(len(lengths)), np.array(taken, dtype=np.int64), np.array(row_offsets, dtype=np.int64)


def first_fit_decreasing(lengths: np.ndarray, row_tokens: int, *_: object) -> Rows:
    # Place all documents of one length together: the first rows with room take as many as fit, as if they were
    # placed one by one. There are at most row_tokens distinct lengths.
    by_length = np.argsort(-lengths, kind="stable")
    row_of = np.empty(len(lengths), dtype=np.int64)  # aligned with by_length
    space = np.empty(len(lengths), dtype=np.int64)
    rows = done = 0
    distinct, counts = np.unique(-lengths, return_counts=True)
    for wanted, count in zip((-distinct).tolist(), counts.tolist(), strict=True):
        roomy = np.flatnonzero(space[:rows] >= wanted)
        new_rows = max(0, -(-(count - int((space[roomy] // wanted).sum())) // (row_tokens // wanted)))
        space[rows : rows + new_rows] = row_tokens
        roomy = np.concatenate([roomy, np.arange(rows, rows + new_rows)])
        rows += new_rows
        chosen = np.repeat(roomy, space[roomy] // wanted)[:count]
        row_of[done : done + count] = chosen
        space[:rows] -= np.bincount(chosen, minlength=rows) * wanted
        done += count
    by_row = np.argsort(row_of, kind="stable")
    document = by_length[by_row]
    row_offsets = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=rows))])
    return document, lengths[document], row_offsets.astype(np.int64)


def stream(lengths: np.ndarray, row_tokens: int, *_: object) -> Rows:
    """The rows of modded-nanogpt's data generator, which reads files in order; the loader permutes documents before."""
    total, context = int(lengths.sum()), row_tokens - 1
    rows = max(0, -(-(total - 1) // context))
    documents = np.cumsum(lengths[:-1])  # where they begin, the first one apart
    start = np.concatenate([np.arange(rows) * context, documents])
    row = np.concatenate([np.arange(rows), (documents - 1) // context])
    in_order = np.lexsort((start, row))
    start, row = start[in_order], row[in_order]
    ends_row = np.diff(row, append=-1) != 0  # with the token that begins the next row
    length = np.diff(start, append=total - 1) + ends_row
    document = np.searchsorted(np.cumsum(lengths), start, side="right")
    return document, length, np.searchsorted(row, np.arange(rows + 1))


METHODS: dict[str, Packer] = {
    "best-fit": best_fit,
    "greedy-crop": partial(_greedy, crop=True),
    "greedy-pad": partial(_greedy, crop=False),
    "first-fit-decreasing": first_fit_decreasing,
    "stream": stream,
}
"""The packers by the name that a recipe gives."""


def pack(
    lengths: np.ndarray,
    row_tokens: int,
    method: str | Packer = "best-fit",
    buffer: int = 1000,
    *,
    keep_tails: bool = False,
) -> Packing:
    """Packs documents into rows. Deterministic.

    Args:
        lengths: (documents,) tokens of each document with BOS, at least 1, in order.
        method: A key of `METHODS`, or a packer.
        buffer, keep_tails: For best-fit: how many documents it chooses from, and whether it keeps the tails.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    packer = METHODS[method] if isinstance(method, str) else method
    streams = packer is stream
    cropped = lengths if streams else np.minimum(lengths, row_tokens)
    document, length, row_offsets = packer(cropped, row_tokens, buffer, keep_tails)
    start = _starts(document, length) if keep_tails or streams else np.zeros_like(document)
    return Packing(row_tokens, document, start, length, row_offsets, int(lengths.sum()) - len(lengths))


def _starts(document: np.ndarray, length: np.ndarray) -> np.ndarray:
    """The start of each segment: the tokens, without BOS, that earlier segments of its document hold."""
    by_document = np.argsort(document, kind="stable")
    held = length[by_document] - 1
    before = np.cumsum(held) - held
    first = np.diff(document[by_document], prepend=-1) != 0
    start = np.empty_like(document)
    start[by_document] = before - before[first][np.cumsum(first) - 1]
    return start
