"""The sample of a text that a tokenizer is trained on: pieces from all of it, chosen by a seed, none of them kept."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from quern.text.tokenizer import training_pieces

MOST_BYTES = 2_000_000_000
"""A longer text is sampled up to here: it is read twice."""


def sampled(
    texts: Callable[[], Iterator[str]], megabytes: float, seed: str, progress: Callable[[int], None]
) -> Iterator[str]:
    """Samples a text by reading it twice: to find its size, then to choose pieces of it. It holds one piece in memory.

    Args:
        texts: Opens the documents.
        megabytes: The size of the sample, to within a piece and a percent or so. A text that is not larger is
            returned whole.
        seed: Equal seeds choose equal pieces.
        progress: Called with the bytes that the first reading has seen.

    Returns:
        Documents, or pieces of at most 65,536 characters of long ones, in the order of the text.
    """
    total = 0
    for piece in training_pieces(texts(), MOST_BYTES):
        total += len(piece.encode("utf-8"))
        progress(total)
    if total <= megabytes * 1e6:
        return texts()
    return _chosen(training_pieces(texts(), MOST_BYTES), megabytes * 1e6 / total, random.Random(seed))


def _chosen(pieces: Iterator[str], share: float, chance: random.Random) -> Iterator[str]:
    """Chooses a share of the bytes. Each piece adds about its share to what is owed, and a chosen one pays for itself.
    So even a small sample has its size and comes from all of the text, which independent draws would not ensure."""
    owed = 0.0
    for piece in pieces:
        size = len(piece.encode("utf-8"))
        if owed >= 0:
            yield piece
            owed -= size
        owed += 2 * chance.random() * share * size
