"""Writes the report of a run: report.md and a self-contained report.html, from the run's records alone.

`records` reads, `document` models the report; Markdown is rendered here, the page by the template report.html.jinja. No
checkpoint is opened and no model runs, so a report can be built anywhere, at any time, and of a run that stopped half
way. In Markdown samples are fenced blocks, and every other value is escaped.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from quern.report.document import Block, Command, Continuation, Conversation, Curves, Document, Facts, document
from quern.report.records import Pairs, number, read_run
from quern.report.scores import Score, ScorePlot, ScoreTable
from quern.temporaries import write_whole
from quern.terminal import printable

FOLDER = Path(__file__).parent
SPARKS = "▁▂▃▄▅▆▇█"
SPARK_COLUMNS = 48
MARKS = {"tool": "[{} → ", "output": "{}] "}
"""How the parts of a tool call are marked in a conversation."""


def build(run_folder: Path) -> tuple[Path, Path]:
    """Writes report.md and report.html into the run's folder, and returns their paths. Raises FileNotFoundError if it
    holds no records, ValueError if one is damaged, OSError if a file cannot be written."""
    report = document(read_run(run_folder))
    return (_write(run_folder / "report.md", markdown(report)), _write(run_folder / "report.html", page(report)))


def page(report: Document) -> str:
    """The report as one HTML page. Every value is escaped, because a sample can hold any text."""
    environment = Environment(loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined)
    environment.trim_blocks = environment.lstrip_blocks = True
    environment.filters["position"] = "{:.2%}".format  # a length in CSS
    style = (FOLDER / "report.css").read_text(encoding="utf-8")
    return environment.get_template("report.html.jinja").render(report=report, style=style)


def _write(path: Path, text: str) -> Path:
    """Writes the file whole. Control characters and lone surrogates become a replacement sign."""
    try:
        write_whole(path, printable(text))
    except OSError as error:
        raise OSError(f"cannot write {path} ({error.strerror}): make room, or make its folder writable") from error
    return path


def markdown(report: Document) -> str:
    parts = [f"# {inline(report.name)}", inline(report.summary), _pairs(report.tiles)]
    for section in report.sections:
        parts.append(f"## {section.title}")
        for group in section.groups:
            parts += [f"### {inline(group.title)}" if group.title else "", *map(_block, group.blocks)]
    return "\n\n".join(filter(None, parts)) + "\n"


def inline(value: Any) -> str:
    """Text for one line or table cell: markup of Markdown and HTML is escaped, line breaks are removed."""
    text = " ".join(str(value).split())
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|#~!])", r"\\\1", text)


def fenced(text: str, language: str = "text") -> str:
    """A code block whose fence is longer than any run of backticks in the text."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"


def sparkline(values: Sequence[float]) -> str:
    """A curve as one line of text, at most SPARK_COLUMNS characters."""
    if not values:
        return ""
    columns = min(SPARK_COLUMNS, len(values))
    cuts = [len(values) * i // columns for i in range(columns + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in zip(cuts, cuts[1:], strict=False)]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(SPARKS[min(len(SPARKS) - 1, int((mean - low) / span * len(SPARKS)))] for mean in means)


def _block(block: Block) -> str:
    if isinstance(block, Facts):
        return _pairs(block.pairs)
    if isinstance(block, Command):
        return fenced(block.text, "sh")
    if isinstance(block, Continuation):
        return fenced(f"{block.prompt}▸{block.text}")
    if isinstance(block, Conversation):
        turns = (
            f"{role}: {''.join(MARKS.get(kind, '{}').format(text) for kind, text in parts)}"
            for role, parts in block.turns
        )
        return fenced("\n".join(turns))
    if isinstance(block, Curves):
        series = {f"{panel.curve.title}, {panel.curve.unit}": panel.ys for panel in block.panels}  # each metric once
        rows = ([name, number(ys[0]), sparkline(ys), number(ys[-1])] for name, ys in series.items())
        return _table(["curve", "first", "over the steps", "last"], rows)
    if isinstance(block, ScorePlot):
        return ""  # the table after it has the same scores
    if isinstance(block, ScoreTable):
        rows = ([row.task, row.detail, *map(_score, row.scores)] for row in block.rows)
        table = _table([block.title.lower(), "questions and guessing", *(title for _, title in block.stages)], rows)
        return f"{block.introduction}\n\n{table}" if block.introduction else table
    return _table(block.header, block.rows)


def _pairs(pairs: Pairs) -> str:
    return "\n".join(f"- {inline(label)}: **{inline(value)}**" for label, value in pairs)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(map(inline, header))} |", f"|{' --- |' * len(header)}"]
    return "\n".join([*lines, *(f"| {' | '.join(map(inline, row))} |" for row in rows)])


def _score(score: Score | None) -> str:
    return "–" if score is None else f"{score.text} ({score.detail})" if score.detail else score.text
