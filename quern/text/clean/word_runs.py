"""Runs of words, by which a passage is found again in another text.

A text contains a passage if any run of 13 words of the passage is in it: the rule of GPT-3 (Brown et al., 2020,
https://arxiv.org/abs/2005.14165, appendix C). Words are compared in lower case without punctuation. Of a passage with
fewer words, all of them, in order, must be there.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence

WORDS = 13
SHORTEST = 5
"""Passages of fewer words are in every large text by chance, and are never looked for."""

_WORD = re.compile(r"\w+")


def split_words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def runs(words: Sequence[str], size: int) -> Iterator[str]:
    """All runs of `size` words."""
    return (" ".join(words[first : first + size]) for first in range(len(words) - size + 1))


def _digest(run: str) -> bytes:
    return hashlib.blake2b(run.encode("utf-8"), digest_size=8).digest()


class Passages:
    """Passages to find in texts. Each has a number, its place in the order in which they were given."""

    def __init__(self, passages: Iterable[str]) -> None:
        self._runs: dict[int, dict[bytes, list[int]]] = {}  # words of a run → its digest → the passages
        for number, passage in enumerate(passages):
            split = split_words(passage)
            size = min(WORDS, len(split))
            for run in runs(split, size) if size >= SHORTEST else ():
                self._runs.setdefault(size, {}).setdefault(_digest(run), []).append(number)

    def found_in(self, text: str) -> Iterator[int]:
        """The passages that share a run of words with a text; some of them several times."""
        split = split_words(text)
        for size, known in self._runs.items():
            for run in runs(split, size):
                yield from known.get(_digest(run), ())
