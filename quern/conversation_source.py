"""A source of conversations, as a recipe names it: NAME, NAME,repeats=4 or NAME,limit=1000."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class ConversationSource:
    """A source of conversations, and how many of them an epoch has.

    Args:
        source: One of `BUILT_IN_CONVERSATIONS`, a public data set, or a file or a folder.
        repeats: How often an epoch has each conversation; of 2.5, a random half of them has a third turn.
        limit: Only the first so many conversations are read; None reads all.
        split: Of a data set of the Hugging Face Hub.
        column: What holds the list of messages; None for the known shapes.
    """

    source: str
    repeats: float = 1.0
    limit: int | None = None
    split: str = "train"
    column: str | None = None

    @staticmethod
    def parse(text: str) -> ConversationSource:
        """Raises ValueError for an unknown or repeated option, or a wrong value."""
        values: dict[str, Any] = {}
        rest = text
        while match := re.fullmatch(r"(.*),(\w+)=([^,=]*)", rest, re.DOTALL):
            rest, name, value = match.groups()
            if name not in SOURCE_OPTIONS or name in values:
                raise ValueError(f"{text!r} sets {name}: give {', '.join(SOURCE_OPTIONS)} as NAME=VALUE, each once")
            try:
                values[name] = SOURCE_OPTIONS[name](value)
            except ValueError as error:
                raise ValueError(
                    f"{text!r}: {name} must be {'a whole number' if name == 'limit' else 'a number'}, not {value!r}"
                ) from error
        return ConversationSource(rest, **values)

    def __str__(self) -> str:
        changed = ((f.name, getattr(self, f.name)) for f in fields(self)[1:] if getattr(self, f.name) != f.default)
        return self.source + "".join(f",{name}={f'{v:g}' if name == 'repeats' else v}" for name, v in changed)


SOURCE_OPTIONS: Mapping[str, Callable[[str], Any]] = {"repeats": float, "limit": int, "split": str, "column": str}
BUILT_IN_CONVERSATIONS = ("tinyworld", "spelling")
"""Sources that are made of the built-in world."""
