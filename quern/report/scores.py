"""The scores of a run as tables, one row per task and metric, one column per evaluated stage, and as a plot."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from quern.report.records import STAGE_TITLES, Record, RunRecords, Table, finite, number, percent, plain, stage_order

INTRODUCTION = (
    "Share of held-out questions answered correctly, with 95% confidence intervals (Wilson). In the chart, the line "
    "through a mark is the interval, and the vertical tick is the share that guessing reaches. A kind of question is "
    "at chance if its interval reaches down to guessing: the model may have learned nothing of it."
)
CENTRED = " CORE and ChatCORE are means of centred accuracies: 0 is guessing, 1 is all right."
TEXTS = (
    "Bits per byte of held-out text, of its kinds, and of a sample of the training text: lower is better. A model that "
    "has learned its text by heart scores much lower on training text than on held-out text."
)
MEAN = "centred accuracy"
CHANCE, WORSE = "at chance", "worse than guessing"


@dataclass(frozen=True)
class Score:
    """One score as a number and as text. interval (low, high) and chance are None where they are not recorded."""

    value: float
    text: str
    detail: str
    interval: tuple[float, float] | None
    chance: float | None

    @property
    def standing(self) -> str | None:
        """CHANCE or WORSE, by the interval; "" above guessing; None if the interval or guessing is not recorded."""
        if self.interval is None or self.chance is None:
            return None
        low, high = self.interval
        return "" if low > self.chance else WORSE if high < self.chance else CHANCE


@dataclass(frozen=True)
class ScoreRow:
    """A task and its score for each stage of the table; None where a stage was not evaluated."""

    task: str
    metric: str
    detail: str
    scores: list[Score | None]

    @property
    def standing(self) -> str | None:
        """Compares the last stage that was asked with guessing."""
        return next((score.standing for score in reversed(self.scores) if score), None)

    @property
    def chance(self) -> float | None:
        """The share that guessing reaches, of the last stage that has it."""
        return next((score.chance for score in reversed(self.scores) if score and score.chance is not None), None)


@dataclass(frozen=True)
class ScoreTable:
    """Scores of the stages (name, title). chart: whether the page draws them in a plot, too."""

    title: str
    introduction: str
    stages: list[tuple[str, str]]
    rows: list[ScoreRow]
    chart: bool


@dataclass(frozen=True)
class ScorePlot:
    """The scores of a table on an axis from `left` to 1: one row per task, a mark with its interval per stage."""

    table: ScoreTable
    left: float

    def at(self, value: float) -> float:
        """The place of a value, as a share of the width."""
        return min(1.0, max(0.0, (value - self.left) / (1 - self.left)))

    def ticks(self) -> list[tuple[float, str]]:
        """(share of the width, text) on the axis."""
        steps = [self.left + 0.25 * step for step in range(round(4 * (1 - self.left)) + 1)]
        return [(self.at(step), percent(step)) for step in steps]

    def label(self, row: ScoreRow) -> str:
        """The scores of a row as text, for those who do not see it."""
        titles = [title for _, title in self.table.stages]
        pairs = zip(titles, row.scores, strict=True)
        said = [f"{title} {score.text} {score.detail}".strip() for title, score in pairs if score]
        said += [f"guessing {percent(row.chance)}"] if row.chance is not None else []
        said += [row.standing] if row.standing else []
        return f"{row.task}: {', '.join(said)}"


def score_stages(run: RunRecords) -> list[str]:
    """The evaluated stages, in the order of training."""
    return sorted({str(line.get("stage", "")) for line in run.scores}, key=stage_order)


def _evaluated(run: RunRecords) -> dict[tuple[str, str], dict[str, Record]]:
    """(task, metric) → stage → its latest record."""
    groups: dict[tuple[str, str], dict[str, Record]] = {}
    for line in run.scores:
        key = (str(line.get("task", "")), str(line.get("metric", "")))
        groups.setdefault(key, {})[str(line.get("stage", ""))] = line
    return groups


def score_rows(run: RunRecords) -> list[ScoreRow]:
    """One row per task and metric, in the order of the records; each has a score for every `score_stages`."""
    stages, rows = score_stages(run), []
    for (task, metric), lines in _evaluated(run).items():
        last = next(lines[name] for name in reversed(stages) if name in lines)
        count, chance = finite(last.get("count")), finite(last.get("chance"))
        unit = " bytes" if metric == "bpb" else " questions" if _of_questions(metric) else ""
        details = [f"{count:,.0f}{unit}" if count is not None else ""]
        if chance is not None and metric != MEAN:
            details.append(f"guessing {percent(chance) if _share(metric) else number(chance)}")
        scores = [_score(lines.get(name, {}), metric, count, chance) for name in stages]
        name = task if metric in ("accuracy", "bpb") else f"{task}, {metric}"
        row = ScoreRow(name, metric, "", scores)
        rows.append(replace(row, detail=" · ".join(filter(None, [*details, row.standing]))))
    return rows


def score_tables(run: RunRecords) -> tuple[list[ScoreTable | ScorePlot], list[ScoreTable]]:
    """A plot of the accuracies with their means, bits per byte and other measures; then the tables that the page folds.
    Stages without a score in a table get no column."""
    stages, rows = score_stages(run), score_rows(run)

    def table(
        title: str, introduction: str, wanted: Callable[[ScoreRow], bool], chart: bool = False
    ) -> list[ScoreTable]:
        own = sorted((row for row in rows if wanted(row)), key=lambda row: row.metric == MEAN)
        shown = [at for at in range(len(stages)) if any(row.scores[at] for row in own)]
        own = [ScoreRow(row.task, row.metric, row.detail, [row.scores[at] for at in shown]) for row in own]
        titles = [(stages[at], STAGE_TITLES.get(stages[at], stages[at])) for at in shown]
        return [ScoreTable(title, introduction, titles, own, chart)] if own else []

    centred = CENTRED if any(row.metric == MEAN for row in rows) else ""
    tasks = table("Task", INTRODUCTION + centred, lambda row: _of_questions(row.metric), chart=True)
    texts = table("Text", TEXTS, lambda row: row.metric == "bpb" and "/" not in row.task)
    kinds = table("Kind of text", "", lambda row: row.metric == "bpb" and "/" in row.task)
    others = table("Measure", "", lambda row: row.metric != "bpb" and not _of_questions(row.metric))
    return [*(plot for one in tasks for plot in _plot(one)), *texts, *others], [*tasks, *kinds]


def _plot(table: ScoreTable) -> list[ScorePlot]:
    known = [score for row in table.rows for score in row.scores if score is not None]
    ends = [end for score in known for end in (score.value, *(score.interval or ()))]
    # A centred accuracy below guessing is negative.
    return [ScorePlot(table, min(0.0, math.floor(4 * max(-1.0, min(ends))) / 4))] if ends else []


def _share(metric: str) -> bool:
    """Whether a metric is a share of questions."""
    return metric == "accuracy" or metric.startswith("pass@")


def _of_questions(metric: str) -> bool:
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


def _score(line: Record, metric: str, usual_count: float | None, chance: float | None) -> Score | None:
    value, low, high, count = (finite(line.get(key)) for key in ("value", "low", "high", "count"))
    if value is None:
        return None
    interval = (low, high) if low is not None and high is not None else None
    ends = [f"{100 * end:.0f}" if _share(metric) else f"{end:.3g}" for end in interval or ()]
    details = [f"{ends[0]} to {ends[1]}" if not _share(metric) else "–".join(ends)] if ends else []
    details += [f"of {count:,.0f}"] if count not in (None, usual_count) else []
    text = percent(value) if _share(metric) else f"{value:.4g}"
    return Score(value, text, " ".join(details), interval, chance)
