"""Runs of words, by which a passage is found again in another text.

A text contains a passage if any run of 13 words of the passage is in it: the rule of GPT-3 (Brown et al., 2020,
https://arxiv.org/abs/2005.14165, appendix C). Words are compared in lower case without punctuation. Of a passage with
fewer words, all of them, in order, must be there.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence

WORDS = 13
SHORTEST = 5
"""Passages of fewer words are in every large text by chance, and are never looked for."""

_WORD = re.compile(r"\w+")


def split_words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def runs(words: Sequence[str], size: int) -> Iterator[str]:
    """All runs of `size` words."""
    return (" ".join(words[first : first + size]) for first in range(len(words) - size + 1))


def digest(run: str) -> bytes:
    """8 bytes of hash of a run."""
    return hashlib.blake2b(run.encode("utf-8"), digest_size=8).digest()


def passage_runs(passage: str, words: int = WORDS) -> Iterator[tuple[int, bytes]]:
    """The number of words and the digest of each run to look for; none for a passage of fewer than `SHORTEST` words."""
    split = split_words(passage)
    size = min(words, len(split))
    return ((size, digest(run)) for run in (runs(split, size) if size >= SHORTEST else ()))
