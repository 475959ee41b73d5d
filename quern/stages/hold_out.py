"""Which text validates: of a validation source its first documents; without one, a part of the training text.

A large corpus holds out every twentieth document until that is enough, so that validation does not depend on how much
text follows. Where this would give too little or too much, as in a few documents, the end of the text is held out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator

EVERY = 20
ENOUGH_BYTES = 1 << 16
LEAST_SHARE, MOST_SHARE = 1 / 40, 1 / 5
"""The largest share of the text that a held-out twentieth of the documents may take."""
TAIL_SHARE, MOST_TAIL_SHARE = 1 / 10, 1 / 3
"""The share of the text that its held-out end takes, and the largest share, to reach LEAST_BYTES."""
LEAST_BYTES = 512
SMALL_VALIDATION_BYTES = 4000
"""About a thousand tokens."""
SPACE = re.compile(r"\s")


def hold_out(texts: Callable[[], Iterator[str]], megabytes: float) -> Callable[[str], Iterator[str]]:
    """Decides how to hold out: it reads the documents until every twentieth is enough, or to their end.

    texts opens the documents, as often as it is called; megabytes: the most that is held out, by whole documents.
    Returns a function that opens a split, "train" or "val"; together they hold every document.
    """
    tail = _tail_of(texts(), megabytes)

    def read(split: str) -> Iterator[str]:
        pairs = _by_number(texts(), megabytes) if tail is None else _tail(texts(), *tail)
        chosen = (text for held_out, text in pairs if held_out == (split == "val"))
        return first(chosen, megabytes) if split == "val" and tail is None else chosen

    return read


def _tail_of(texts: Iterator[str], megabytes: float) -> tuple[int, int] | None:
    """The byte of the text where validation begins, and the bytes from there on; None for every twentieth document."""
    held = total = 0
    for held_out, text in _by_number(texts, megabytes):
        size = _size(text)
        total += size
        held += size if held_out else 0
        if held >= min(ENOUGH_BYTES, megabytes * 1e6) and 0 < held <= MOST_SHARE * total:
            return None
    if max(LEAST_SHARE * total, LEAST_BYTES) <= held <= MOST_SHARE * total:
        return None
    wanted = max(TAIL_SHARE * total, min(LEAST_BYTES, MOST_TAIL_SHARE * total))
    wanted = math.ceil(min(wanted, megabytes * 1e6))
    return total - wanted, wanted


def first(texts: Iterator[str], megabytes: float) -> Iterator[str]:
    """The first documents of a validation text, up to the one that makes it this large."""
    left = megabytes * 1e6
    for text in texts:
        yield text
        left -= _size(text)
        if left <= 0:
            return


def check_splits(name: str, documents: Callable[[str], Iterator[str]], log: Callable[[str], None]) -> None:
    """Refuses an empty split, and warns of a validation text that is too small to measure anything."""
    for split in ("train", "val"):
        if not any(documents(split)):
            raise ValueError(f"the {split} text of '{name}' is empty: give more text, or --val for validation")
    size = 0
    for text in documents("val"):
        size += len(text.encode("utf-8"))
        if size >= SMALL_VALIDATION_BYTES:
            return
    log(
        f"warning: the validation text has only {size:,} bytes, so its loss says little: give more text, or a "
        "validation text with --val"
    )


def _by_number(texts: Iterator[str], megabytes: float) -> Iterator[tuple[bool, str]]:
    left = megabytes * 1e6
    for index, text in enumerate(texts):
        held_out = index % EVERY == EVERY // 2 and left > 0
        left -= _size(text) if held_out else 0
        yield held_out, text


def _tail(texts: Iterator[str], at: int, wanted: int) -> Iterator[tuple[bool, str]]:
    """Validation from byte `at` on, or from the next space if that is near. A short document is not cut."""
    before = 0
    for text in texts:
        size = _size(text)
        if before + size <= at or before >= at or 2 * size <= wanted:
            yield before + size > at, text
        else:
            cut = _cut(text, at - before)
            yield False, text[:cut]
            yield True, text[cut:]
        before += size


def _cut(text: str, at_byte: int) -> int:
    at = len(text.encode("utf-8")[:at_byte].decode("utf-8", "ignore"))
    space = SPACE.search(text, at, at + (len(text) - at) // 2)
    return space.start() if space else at


def _size(text: str) -> int:
    return len(text.encode("utf-8"))
