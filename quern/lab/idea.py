"""The opening docstring of an idea's file: its title, hypothesis, source, expected effect, and the lab's verdict."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

PARTS = ("Hypothesis", "Source", "Expected effect", "Verdict")
_BEGINS = re.compile(rf"^({'|'.join(PARTS)}):\s*", re.MULTILINE)
DIRECTIONS = ("no difference", "better", "worse")
"""What an expected effect may begin with. Anything else is no prediction."""


@dataclass(frozen=True)
class Idea:
    """An idea's docstring. Parts that it lacks are empty."""

    title: str
    hypothesis: str = ""
    source: str = ""
    expected: str = ""
    verdict: str = ""

    @property
    def direction(self) -> str | None:
        """The verdict that the source predicts, or None."""
        return next((one for one in DIRECTIONS if self.expected.lower().startswith(one)), None)


def read_idea(source: str) -> Idea:
    """Reads the docstring of an idea's file. source: the text of the file."""
    words = _BEGINS.split(ast.get_docstring(ast.parse(source)) or "")
    parts = {name: " ".join(text.split()) for name, text in zip(words[1::2], words[2::2], strict=True)}
    return Idea(
        title=" ".join(words[0].split()),
        hypothesis=parts.get("Hypothesis", ""),
        source=parts.get("Source", ""),
        expected=parts.get("Expected effect", ""),
        verdict=parts.get("Verdict", ""),
    )


def with_verdict(source: str, verdict: str) -> str:
    """The text of an idea's file with another verdict; unchanged if its docstring has none.

    Args:
        source: The text of the file.
        verdict: One line, which is wrapped at 120 columns.
    """
    found = re.search(r"^Verdict:.*?(?=^\"\"\"|^\n|^[A-Z][a-z ]+:)", source, re.MULTILINE | re.DOTALL)
    if found is None:
        return source
    lines, line = [], "Verdict:"
    for word in verdict.split():
        if len(line) + 1 + len(word) > 120:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}"
    return source[: found.start()] + "\n".join([*lines, line]) + "\n" + source[found.end() :]
