"""Packing: which documents share a row, decided from document lengths alone.

A row holds `row_tokens` tokens (context + 1). Each document is placed as one segment, its head; when it is
cropped the tail is discarded. Only best-fit can keep the tails instead (`keep_tails`): a tail goes back to
the buffer as a document of its own, one token longer, as it too will start with BOS. Then nothing is lost.

    best-fit              keep a buffer of documents, place the longest one that fits the space left; when
                          none fits, cut the shortest to fill the row. Only the very last row is padded.
    greedy-crop           documents in order, each cropped at the end of its row. Padded as above.
    greedy-pad            documents in order, a new row when the next one does not fit, the rest padded.
    first-fit-decreasing  longest first, each into the first row with room, the rest padded. Rows come out in
                          order of falling length: shuffle them before training.

No method sees tokens, so packing is cheap enough to repeat on every resume. A document longer than a row
counts as one of exactly row length: it then fits an empty row at once and can never clog the buffer. What it
has beyond that is lost with every method, so cut long documents into pieces first, as the loader does.

Source: bin packing as in Ding et al. 2024, "Fewer Truncations Improve Language Modeling" (arXiv 2404.10830),
which too cuts long documents beforehand; its best-fit-decreasing pads where `best-fit` here cuts.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

METHODS = ("best-fit", "greedy-crop", "greedy-pad", "first-fit-decreasing")


@dataclass(frozen=True)
class Packing:
    """Segments in row order: row r holds segments row_offsets[r] up to row_offsets[r + 1].

    document, start, length: (segments,) int64; `document` indexes the lengths that were packed. A segment is
    BOS and the document's tokens start + 1 … start + length - 1. At the head (start 0) that BOS is the
    document's own; in a kept tail it stands in the place of the token before, the last of the part placed
    earlier. row_offsets: (rows + 1,) int64. offered_documents: how many were packed; offered_tokens: theirs
    before cropping, BOS apart.
    """

    row_tokens: int
    document: np.ndarray
    start: np.ndarray
    length: np.ndarray
    row_offsets: np.ndarray
    offered_documents: int
    offered_tokens: int

    @property
    def rows(self) -> int:
        return len(self.row_offsets) - 1

    def report(self) -> dict[str, float]:
        """Shares of what was packed.

        utilisation, padding_share: of all row slots, those that hold a segment and those that hold none.
        cropped_share: of all offered tokens but BOS, those in no segment. tails_kept: how often a document
        was cut and its tail kept, each time at the cost of one slot for another BOS (where a row has just one
        slot left that BOS stands alone in it, and the tail is all the rest).
        """
        slots = self.rows * self.row_tokens
        filled = int(self.length.sum())
        placed = filled - len(self.length)
        return {
            "rows": self.rows,
            "utilisation": filled / slots if slots else 0.0,
            "padding_share": 1 - filled / slots if slots else 0.0,
            "cropped_share": 1 - placed / self.offered_tokens if self.offered_tokens else 0.0,
            "tails_kept": len(self.length) - self.offered_documents,
        }


def pack(
    lengths: np.ndarray,
    row_tokens: int,
    method: str = "best-fit",
    buffer: int = 1000,
    *,
    keep_tails: bool = False,
) -> Packing:
    """Packs documents of these lengths (tokens with BOS, each ≥ 1), in this order, into rows of `row_tokens`.

    `buffer` is the number of documents best-fit chooses from. `keep_tails` lets best-fit keep what it cuts
    off; no other method heeds it. Raises ValueError on lengths below 1, an unknown method, or rows too short
    to hold BOS and a token of a tail. Deterministic: equal arguments give equal rows.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if row_tokens < 1 or buffer < 1:
        raise ValueError(f"row_tokens ({row_tokens}) and buffer ({buffer}) must be at least 1")
    if lengths.ndim != 1 or (lengths.size and lengths.min() < 1):
        raise ValueError("packing needs a flat list of document lengths, each at least 1 token")
    if keep_tails and row_tokens < 2:
        raise ValueError("keep_tails needs rows of at least 2 tokens: BOS and one token of a tail")
    capped = np.minimum(lengths, row_tokens)
    if method == "best-fit":
        document, length, row_offsets = _best_fit(capped, row_tokens, buffer, keep_tails)
    elif method == "greedy-crop":
        document, length, row_offsets = _greedy_crop(capped, row_tokens)
    elif method == "greedy-pad":
        document, length, row_offsets = _greedy_pad(capped, row_tokens)
    elif method == "first-fit-decreasing":
        document, length, row_offsets = _first_fit_decreasing(capped, row_tokens)
    else:
        raise ValueError(f"unknown packing {method!r}; use one of: {', '.join(METHODS)}")
    start = _starts(document, length) if keep_tails else np.zeros_like(document)
    offered = len(lengths), int(lengths.sum()) - len(lengths)
    return Packing(row_tokens, document, start, length, row_offsets, *offered)


_Rows = tuple[np.ndarray, np.ndarray, np.ndarray]  # document, length, row_offsets


def _starts(document: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Each segment's start: how many tokens, BOS apart, the same document's earlier segments hold."""
    by_document = np.argsort(document, kind="stable")
    held = length[by_document] - 1
    before = np.cumsum(held) - held
    first = np.diff(document[by_document], prepend=-1) != 0
    start = np.empty_like(document)
    start[by_document] = before - before[first][np.cumsum(first) - 1]
    return start


def _best_fit(capped: np.ndarray, row_tokens: int, buffer: int, keep_tails: bool) -> _Rows:
    count = len(capped)
    # One integer per document, length above, reversed order below: a sorted list of them answers "the longest
    # that fits" by bisection, and among equal lengths gives the earliest document.
    bits = max(1, count.bit_length())
    reverse = np.arange(count - 1, -1, -1, dtype=np.int64)
    keys: list[int] = ((capped << bits) | reverse).tolist()
    waiting = sorted(keys[:buffer])
    incoming = iter(keys[buffer:])
    order: list[int] = []
    length: list[int] = []
    row_offsets = [0]
    space = row_tokens
    while waiting:
        fits = bisect_left(waiting, (space + 1) << bits)
        key = waiting.pop(fits - 1 if fits else 0)
        order.append(key)
        taken = key >> bits
        # The tail of a cut document takes its place in the buffer: BOS and all that is not placed here.
        cut = keep_tails and taken > space
        following = key - ((space - 1) << bits) if cut else next(incoming, None)
        if taken < space:
            space -= taken
        else:  # exactly full, or cut
            taken = space
            space = row_tokens
            row_offsets.append(len(order))
        length.append(taken)
        if following is not None:
            insort(waiting, following)
    if row_offsets[-1] != len(order):
        row_offsets.append(len(order))
    document = count - 1 - (np.array(order, dtype=np.int64) & ((1 << bits) - 1))
    return document, np.array(length, dtype=np.int64), np.array(row_offsets, dtype=np.int64)


def _greedy_crop(capped: np.ndarray, row_tokens: int) -> _Rows:
    length: list[int] = []
    row_offsets = [0]
    space = row_tokens
    for wanted in capped.tolist():
        taken = wanted if wanted < space else space
        length.append(taken)
        space -= taken
        if space == 0:
            space = row_tokens
            row_offsets.append(len(length))
    if row_offsets[-1] != len(length):
        row_offsets.append(len(length))
    return np.arange(len(capped)), np.array(length, dtype=np.int64), np.array(row_offsets, dtype=np.int64)


def _greedy_pad(capped: np.ndarray, row_tokens: int) -> _Rows:
    row_offsets = [0]
    space = row_tokens
    for index, wanted in enumerate(capped.tolist()):
        if wanted > space:
            row_offsets.append(index)
            space = row_tokens
        space -= wanted
    if len(capped):
        row_offsets.append(len(capped))
    return np.arange(len(capped)), capped, np.array(row_offsets, dtype=np.int64)


def _first_fit_decreasing(capped: np.ndarray, row_tokens: int) -> _Rows:
    # Documents of equal length are placed together: the first rows with room take as many as fit each, which
    # is what placing them one by one would do. There are at most row_tokens distinct lengths.
    by_length = np.argsort(-capped, kind="stable")
    row_of = np.empty(len(capped), dtype=np.int64)  # aligned with by_length
    space = np.empty(len(capped), dtype=np.int64)
    rows = done = 0
    distinct, counts = np.unique(-capped, return_counts=True)
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
    return document, capped[document], row_offsets.astype(np.int64)
