"""The parts of the log that every kind of study gives, and the style of its figures."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.figure import Figure

HEADER = "<!-- Generated from experiments/records by `quern lab log`. -->\n\n"
INK, GREY = "#444444", "#9a9a9a"
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "quern",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


@dataclass(frozen=True)
class Verdict:
    """A study's verdict on an idea on one rung. baseline: what identifies the baseline on that rung; old: it is another
    one today; runs: runs of the idea that were judged; text: for the idea's docstring; short: for the index."""

    study: str
    rung: int
    baseline: tuple[str, ...]
    old: bool
    runs: int
    decided: bool
    text: str
    short: str


@dataclass(frozen=True)
class Page:
    """A study as the log shows it. section: its lines in experiments/LOG.md; files: texts by their names in
    docs/experiments; verdicts: by idea, on each rung."""

    name: str
    registered: str
    section: list[str]
    files: dict[str, str]
    verdicts: dict[str, list[Verdict]] = field(default_factory=dict)


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


def svg(figure: Figure) -> str:
    """The text of a figure as SVG."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()
