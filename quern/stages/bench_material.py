"""The text that benchmarks read: the built-in world, or documents of one's own. It measures nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from quern.text import tinyworld
from quern.text.documents import read
from quern.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Material:
    """The text that is measured on: the built-in world, or the documents of `data`; made when first asked
    for."""

    seed: int
    megabytes: float
    vocab_size: int
    data: Path | None = None

    @cached_property
    def texts(self) -> list[str]:
        """Documents of at least `megabytes` in all, or everything there is."""
        if self.data is None:
            return list(tinyworld.documents(self.seed, self.megabytes))
        return list(_up_to((text for text, _ in read(self.data)), self.megabytes * 1e6))

    @cached_property
    def bytes(self) -> int:
        return sum(len(text.encode("utf-8", "replace")) for text in self.texts)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.train(self.texts, self.vocab_size)

    @property
    def name(self) -> str:
        return "tinyworld" if self.data is None else self.data.name


def _up_to(texts: Iterator[str], size: float) -> Iterator[str]:
    for text in texts:
        yield text
        size -= len(text)
        if size <= 0:
            return
