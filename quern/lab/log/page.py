"""The parts of the log that every kind of study gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

HEADER = "<!-- Generated from experiments/records by `quern lab log`. -->\n\n"


@dataclass(frozen=True)
class Page:
    """A study as the log shows it.

    Args:
        name: Name of the study.
        registered: When it began, as ISO 8601 text.
        section: Lines of its section in experiments/LOG.md, without the title.
        files: The text of each file under docs/experiments/, by name.
        verdicts: By idea, the text for its docstring and the cell of the index.
    """

    name: str
    registered: str
    section: list[str]
    files: dict[str, str]
    verdicts: dict[str, tuple[str, str]] = field(default_factory=dict)


def machine_line(facts: dict[str, Any]) -> str:
    """A sentence on the machine of a study's first start."""
    machine = facts["machine"]
    return f"Machine: {machine['processor']}, {machine['dtype']}, torch {machine['torch']}."


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table, whose columns but the first are numbers."""
    rule = "|---" + "|--:" * (len(head) - 1) + "|"
    return [f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(row)} |" for row in rows)]


def repeat(facts: dict[str, Any]) -> list[str]:
    """The last section of every page."""
    return ["## Repeat it\n", f"```\n{facts.get('command', '')}\n```\n"]
