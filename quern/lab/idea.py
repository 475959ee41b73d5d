"""The opening docstring of an idea's file: its title, hypothesis, source, expected effect, and the lab's verdict."""

from __future__ import annotations

import ast
import re
import textwrap
from dataclasses import dataclass

PARTS = ("Hypothesis", "Source", "Published", "Expected effect", "Changed", "Verdict")
_BEGINS = re.compile(rf"^({'|'.join(PARTS)}):\s*", re.MULTILINE)
_PREDICTS = re.compile(r"(?:slightly |clearly )?(no difference|better|worse)\b")
"""How an expected effect that predicts a verdict begins. Anything else is no prediction."""


@dataclass(frozen=True)
class Idea:
    """An idea's docstring. Parts that it lacks are empty."""

    title: str
    hypothesis: str = ""
    source: str = ""
    published: str = ""
    """The figure that the source measured, with its date."""
    expected: str = ""
    changed: str = ""
    """When the idea itself last changed, as ISO 8601 text, and how: studies registered before tried another idea."""
    verdict: str = ""

    @property
    def direction(self) -> str | None:
        """The verdict that the author expects, or None."""
        found = _PREDICTS.match(self.expected)
        return found[1] if found else None


def read_idea(source: str) -> Idea:
    """Reads the docstring of an idea's file. source: the text of the file."""
    words = _BEGINS.split(ast.get_docstring(ast.parse(source)) or "")
    parts = {name: " ".join(text.split()) for name, text in zip(words[1::2], words[2::2], strict=True)}
    return Idea(
        title=" ".join(words[0].split()),
        hypothesis=parts.get("Hypothesis", ""),
        source=parts.get("Source", ""),
        published=parts.get("Published", ""),
        expected=parts.get("Expected effect", ""),
        changed=parts.get("Changed", ""),
        verdict=parts.get("Verdict", ""),
    )


def with_verdict(source: str, verdict: str) -> str:
    """The text of an idea's file with another verdict; unchanged if its docstring has none."""
    body = ast.parse(source).body
    if not body or not isinstance(body[0], ast.Expr) or ast.get_docstring(ast.parse(source)) is None:
        return source
    lines, end = source.split("\n"), body[0].end_lineno or 0
    begin = next((at for at in range(body[0].lineno - 1, end) if lines[at].startswith("Verdict:")), None)
    if begin is None:
        return source
    after = next((at for at in range(begin + 1, end - 1) if not lines[at].strip() or _BEGINS.match(lines[at])), end - 1)
    quotes = [] if after < end - 1 else ['"""']  # the docstring's last line may hold the verdict's end
    rest = lines[after:] if after < end - 1 else lines[end:]
    return "\n".join([*lines[:begin], *textwrap.wrap(f"Verdict: {verdict}", 120), *quotes, *rest])
