"""The scores of a run as tables: one row per task and metric, one column per evaluated stage."""

from dataclasses import dataclass, replace
from typing import Any

from quern.report.numbers import number, percent
from quern.report.run_records import STAGE_TITLES, RunRecords, finite, stage_order
from quern.report.values import Table, plain

INTRODUCTION = (
    "Share of held-out questions answered correctly, with 95% confidence intervals (Wilson). In a chart, the line on a "
    "bar is the interval and the vertical tick is the share that guessing reaches. CORE and ChatCORE are means of "
    "centred accuracies: 0 is guessing, 1 is all right."
)
TEXTS = (
    "Bits per byte of held-out text, of its kinds, and of a sample of the training text: lower is better. A model that "
    "has learned its text by heart scores much lower on training text than on held-out text."
)
MEAN = "centred accuracy"


@dataclass(frozen=True)
class Score:
    """One score as a number and as text. interval (low, high) and chance are None where they are not recorded."""

    value: float
    text: str
    detail: str
    interval: tuple[float, float] | None
    chance: float | None


@dataclass(frozen=True)
class ScoreRow:
    """A task and its score for each stage of the table; None where a stage was not evaluated."""

    task: str
    metric: str
    detail: str
    scores: list[Score | None]


@dataclass(frozen=True)
class ScoreTable:
    """chart: whether the scores are shares between 0 and 1, which the page draws as bars."""

    title: str
    introduction: str
    stages: list[str]
    rows: list[ScoreRow]
    chart: bool


def score_stages(run: RunRecords) -> list[str]:
    """The evaluated stages, in the order of training."""
    return sorted({str(line.get("stage", "")) for line in run.scores}, key=stage_order)


def _evaluated(run: RunRecords) -> dict[tuple[str, str], dict[str, dict[str, Any]]]:
    """(task, metric) → stage → record, without tasks that no trained stage was asked."""
    groups: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for line in run.scores:
        key = (str(line.get("task", "")), str(line.get("metric", "")))
        groups.setdefault(key, {})[str(line.get("stage", ""))] = line
    alone = len(score_stages(run)) == 1
    return {key: lines for key, lines in groups.items() if alone or lines.keys() != {"untrained"}}


def score_rows(run: RunRecords) -> list[ScoreRow]:
    """One row per task and metric, in the order of the records; each has a score for every `score_stages`."""
    stages, rows = score_stages(run), []
    for (task, metric), lines in _evaluated(run).items():
        last = next(lines[name] for name in reversed(stages) if name in lines)
        count, chance = finite(last.get("count")), finite(last.get("chance"))
        unit = " bytes" if metric == "bpb" else " questions" if of_questions(metric) else ""
        details = [f"{count:,.0f}{unit}" if count is not None else ""]
        if chance is not None and metric != MEAN:
            details.append(f"guessing {percent(chance) if _share(metric) else number(chance)}")
        scores = [_score(lines.get(name, {}), metric, count, chance) for name in stages]
        name = task if metric in ("accuracy", "bpb") else f"{task}, {metric}"
        rows.append(ScoreRow(name, metric, " · ".join(filter(None, details)), scores))
    return rows


def score_tables(run: RunRecords) -> list[ScoreTable]:
    """The accuracies with their means, bits per byte, then other measures. Stages without a score in a table get no
    column."""
    rows = score_rows(run)
    texts = [row for row in rows if row.metric == "bpb"]
    others = [row for row in rows if row.metric != "bpb" and not of_questions(row.metric)]
    tasks = ("Task", INTRODUCTION, question_rows(run), True)
    parts = (tasks, ("Text", TEXTS, texts, False), ("Measure", "", others, False))
    found = []
    for title, introduction, rows, chart in parts:
        stages, rows = without_empty_stages(run, rows)
        if rows:
            titles = [STAGE_TITLES.get(stage, stage) for stage in stages]
            found.append(ScoreTable(title, introduction, titles, rows, chart))
    return found


def question_rows(run: RunRecords) -> list[ScoreRow]:
    """The rows of questions, then those of their means."""
    return sorted((row for row in score_rows(run) if of_questions(row.metric)), key=lambda row: row.metric == MEAN)


def without_empty_stages(run: RunRecords, rows: list[ScoreRow]) -> tuple[list[str], list[ScoreRow]]:
    """The stages that have a score in these rows, and the rows with the scores of these stages."""
    stages = score_stages(run)
    shown = [i for i in range(len(stages)) if any(row.scores[i] for row in rows)]
    return [stages[i] for i in shown], [replace(row, scores=[row.scores[i] for i in shown]) for row in rows]


def _share(metric: str) -> bool:
    """Whether a metric is a share of questions."""
    return metric == "accuracy" or metric.startswith("pass@")


def of_questions(metric: str) -> bool:
    """Whether a metric is of questions: such a share, or a mean of them."""
    return _share(metric) or metric == MEAN


def score_settings(run: RunRecords) -> Table:
    """The settings of each evaluation. skipped: questions longer than the context."""
    rows = [
        [
            str(line.get("stage", "")),
            str(line.get("task", "")),
            plain(line.get("count")),
            str(line.get("prompt_hash") or "–"),
            {"True": "yes", "False": "no"}.get(str(line.get("bos")), "–"),
            plain(line.get("shots")) or "0",
            plain(line.get("skipped")) or "0",
        ]
        for lines in _evaluated(run).values()
        for line in lines.values()
    ]
    return Table(["stage", "task", "count", "prompts", "BOS", "shots", "skipped"], rows)


def _score(line: dict[str, Any], metric: str, usual_count: float | None, chance: float | None) -> Score | None:
    value, low, high, count = (finite(line.get(key)) for key in ("value", "low", "high", "count"))
    if value is None:
        return None
    interval = (low, high) if low is not None and high is not None else None
    ends = [f"{100 * end:.0f}" if _share(metric) else f"{end:.3g}" for end in interval or ()]
    details = [f"{ends[0]} to {ends[1]}" if not _share(metric) else "–".join(ends)] if ends else []
    details += [f"of {count:,.0f}"] if count not in (None, usual_count) else []
    text = percent(value) if _share(metric) else f"{value:.4g}"
    return Score(value, text, " ".join(details), interval, chance)
