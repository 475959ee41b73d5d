"""Pieces: documents of a corpus cut to the length of a row, for training and for validation.

A document longer than a row (context + 1 tokens) is cut into pieces: each is BOS and up to `context` tokens. A
shorter document is one piece. A piece is a position in the corpus; no token is copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from quern.data.batch import Batch
from quern.data.shards import Corpus

MASK_TOKENS = 1 << 18  # of masks that are read at a time
TOO_LONG = ("split", "crop", "drop")


@dataclass(frozen=True)
class Pieces:
    """The pieces of consecutive documents of a corpus.

    Args:
        starts, lengths: (documents,) int64, as in the corpus.
        document: (pieces,) the document of each piece, counted from the first of these documents.
        offset: (pieces,) the index in the document of the token that BOS replaces (0: BOS itself).
        report: documents_without_target, documents_too_long, documents_split, pieces, left_out_share; see
            `Loader.report`.
    """

    starts: np.ndarray
    lengths: np.ndarray
    document: np.ndarray
    offset: np.ndarray
    report: dict[str, float]

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
    document, offset = narrow(document[kept]), narrow(offset[kept])
    rest = lengths[document] - offset
    in_pieces = int((np.minimum(rest, row_tokens) if too_long == "split" else rest).sum()) - len(rest)
    report = {
        "documents_without_target": int((~learning).sum()),
        "documents_too_long": int(long.sum()),
        "documents_split": int((long & learning).sum()) if too_long == "split" else 0,
        "pieces": len(document),
        "left_out_share": 1 - in_pieces / max(1, int(lengths.sum()) - len(lengths)),
    }
    return Pieces(starts, lengths, document, offset, report)


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
    if not corpus.masked:
        return learns
    longer = np.flatnonzero(learns)
    for some in np.split(longer, np.flatnonzero(np.diff(np.cumsum(targets[longer]) // MASK_TOKENS)) + 1):
        if not some.size:
            continue
        ends = np.cumsum(targets[some])
        mask = np.empty(int(ends[-1]), dtype=bool)
        corpus.copy(mask, ends - targets[some], source[some] + 1, targets[some], mask=True)
        learns[some] = np.logical_or.reduceat(mask, ends - targets[some])
    return learns


def narrow(indices: np.ndarray) -> np.ndarray:
    """Indices as int32 if they fit, to halve their memory."""
    return indices.astype(np.int32 if not indices.size or indices.max() < 1 << 31 else np.int64)


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
            corpus.copy(mask.reshape(-1), np.arange(len(chosen)) * width, source, length[chosen], mask=True)
        yield Batch.of_rows(tokens, mask)
