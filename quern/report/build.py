"""The report of a run: report.md and a self-contained report.html, written from the run's records alone.

What it is: a reader of run.json, recipe.json, metrics.jsonl, events.jsonl, evaluate.jsonl and
samples.jsonl. It opens no checkpoint and computes no model, so it can be run anywhere, again, and on a run
that stopped half way: what has no record is left out. `report_records` reads, `report_facts` names and
formats, `report_page` lays out the HTML; this file lays out the Markdown and writes both.
"""

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from quern.report import facts as facts
from quern.report.numbers import number, percent
from quern.report.page import page
from quern.report.run_records import STAGE_TITLES, RunRecords, StageRecords, read_run
from quern.report.summary import summary
from quern.text.printable import printable

SPARKS = "▁▂▃▄▅▆▇█"
SPARK_COLUMNS = 48


def build(run_folder: Path) -> tuple[Path, Path]:
    """Write report.md and report.html into the run's folder and return their paths.

    Raises FileNotFoundError when the folder holds no records.
    """
    run = read_run(run_folder)
    return (
        _write(run_folder / "report.md", markdown(run)),
        _write(run_folder / "report.html", page(run)),
    )


def markdown(run: RunRecords) -> str:
    """The report as Markdown; whatever a model wrote stands in fenced blocks, everything else is escaped."""
    parts = [f"# {inline(run.name)}", inline(summary(run))]
    parts += [f"> {inline(note)}" for note in run.notes]
    parts.append(_rows(facts.tiles(run)))
    trained = [_rows(facts.model_rows(run))]
    trained += [f"### {inline(s.title)}\n\n{_rows(facts.training_rows(run, s))}" for s in run.stages]
    parts.append(_section("What was trained", trained))
    data = [_rows(facts.data_rows(run))]
    for table in facts.data_tables(run):
        data.append(f"### {inline(table.title.capitalize())}\n\n{_table(table.header, table.rows)}")
    parts.append(_section("On what", data))
    parts.append(_section("How it learned", [_curves(stage) for stage in run.stages]))
    parts.append(_section("What it can do", _evaluation(run)))
    parts.append(_section("What it says", [_sample(sample) for sample in reversed(run.samples)]))
    header = ["time (UTC)", "event", "step", "details"]
    events = [
        f"### {inline(stage.title)}\n\n{_table(header, rows)}"
        for stage in run.stages
        if (rows := facts.event_rows(stage))
    ]
    parts.append(_section("What happened", events))
    line = facts.command(run)
    parts.append(_section("How to repeat it", [fenced(line, "sh") if line else "", _rows(facts.repeat_rows(run))]))
    return printable("\n\n".join(part for part in parts if part) + "\n")


def inline(value: Any) -> str:
    """Text inside a line or a table cell: no markup of Markdown or HTML survives, and no line break."""
    text = " ".join(str(value).split())
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|#~!])", r"\\\1", text)


def fenced(text: Any, language: str = "text") -> str:
    """A code block whose fence is longer than any run of backticks in the text."""
    text = str(text)
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def sparkline(values: Sequence[float]) -> str:
    """A curve in one line of text, low to high, at most SPARK_COLUMNS wide."""
    if not values:
        return ""
    columns = min(SPARK_COLUMNS, len(values))
    cuts = [len(values) * i // columns for i in range(columns + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in zip(cuts, cuts[1:], strict=False)]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(SPARKS[min(len(SPARKS) - 1, int((mean - low) / span * len(SPARKS)))] for mean in means)


def _section(title: str, parts: Iterable[str]) -> str:
    body = "\n\n".join(part for part in parts if part)
    return f"## {title}\n\n{body}" if body else ""


def _rows(rows: facts.Rows) -> str:
    return "\n".join(f"- {inline(label)}: **{inline(value)}**" for label, value in rows)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(map(inline, header))} |", f"|{' --- |' * len(header)}"]
    return "\n".join([*lines, *(f"| {' | '.join(map(inline, row))} |" for row in rows)])


def _curves(stage: StageRecords) -> str:
    rows = []
    for key, name in (
        ("loss", "training loss, nats per token"),
        ("val_bpb", "validation, bits per byte"),
        ("tokens_per_second", "tokens a second"),
        ("mfu", "model FLOPs utilisation"),
        ("lr", "learning rate, share of the peak"),
    ):
        values = stage.column(key)[1]
        if len(values) > 1:
            rows.append([name, number(values[0]), sparkline(values), number(values[-1])])
    return f"### {inline(stage.title)}\n\n{_table(['curve', 'first', 'over the steps', 'last'], rows)}" if rows else ""


def _evaluation(run: RunRecords) -> list[str]:
    stages, rows = facts.score_stages(run), facts.score_rows(run)
    if not rows:
        return []
    header = ["task", "count", "chance", *(STAGE_TITLES.get(name, name) for name in stages)]
    body = [
        [
            f"{row.task}, {row.metric}",
            "" if row.count is None else f"{row.count:,}",
            "" if row.chance is None else _score(row, row.chance),
            *(_cell(row, cell) for cell in row.cells),
        ]
        for row in rows
    ]
    setting = facts.score_setting(run)
    asked = any(row.is_share for row in rows)
    return [
        "Accuracies are on held-out questions, with 95% intervals (Wilson)." if asked else "",
        _table(header, body),
        f"### {setting.title}",
        _table(setting.header, setting.rows),
    ]


def _cell(row: facts.ScoreRow, cell: facts.Cell) -> str:
    if cell.value is None:
        return "–"
    if cell.low is None or cell.high is None:
        return _score(row, cell.value)
    return f"{_score(row, cell.value)} ({_score(row, cell.low)}–{_score(row, cell.high)})"


def _score(row: facts.ScoreRow, value: float) -> str:
    return percent(value) if row.is_share else number(value)


def _sample(sample: dict[str, Any]) -> str:
    name = str(sample.get("stage", ""))
    title = inline(STAGE_TITLES.get(name, name))
    if sample.get("kind") != "chat":
        whole = f"{sample.get('prompt', '')}▸{sample.get('text', '')}"
        return f"{title}, a continuation (from ▸ on):\n\n{fenced(whole)}"
    messages = sample.get("messages")
    turns = [m for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []
    if sample.get("parts") or sample.get("text"):
        turns.append({"role": "assistant", "content": sample.get("parts") or sample.get("text")})
    lines = [f"{turn.get('role')}: {_spoken(turn.get('content'))}" for turn in turns if turn.get("content")]
    return f"{title}, a conversation:\n\n{fenced(chr(10).join(lines))}"


def _spoken(content: Any) -> str:
    if not isinstance(content, list):
        return str(content)
    marks = {"tool": "[{} → ", "output": "{}] "}
    parts = [part for part in content if isinstance(part, dict)]
    return "".join(marks.get(str(part.get("type")), "{}").format(part.get("text", "")) for part in parts)


def _write(path: Path, text: str) -> Path:
    """Whole or not at all; a lone surrogate becomes a question mark."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        temporary.write_bytes(text.encode("utf-8", "replace"))
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(f"cannot write {path} ({error.strerror}): make room, or make its folder writable") from error
    return path
