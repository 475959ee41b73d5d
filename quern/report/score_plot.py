"""The scores of a run as a plot: one row per task, a mark with its interval per evaluated stage. The page draws it."""

import math
from dataclasses import dataclass

from quern.report.numbers import percent
from quern.report.run_records import STAGE_TITLES, RunRecords
from quern.report.scores import question_rows, without_empty_stages


@dataclass(frozen=True)
class Mark:
    """One stage's score in a plot; at, low and high are shares of the plot's width."""

    stage: str
    at: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class PlotRow:
    """A task in a plot. label: its scores as text, for those who do not see it; chance: a share of the width."""

    task: str
    label: str
    chance: float | None
    marks: list[Mark | None]


@dataclass(frozen=True)
class ScorePlot:
    """Scores with intervals, a mark per stage.

    Args:
        stages: (name, title) of each.
        ticks: (share of the width, text) on the axis.
        rows: The tasks.
    """

    stages: list[tuple[str, str]]
    ticks: list[tuple[float, str]]
    rows: list[PlotRow]


def score_plot(run: RunRecords) -> ScorePlot | None:
    """The accuracies and their means; None without any."""
    stages, rows = without_empty_stages(run, question_rows(run))
    known = [score for row in rows for score in row.scores if score is not None]
    if not known:
        return None
    lowest = min(end for score in known for end in (score.value, *(score.interval or ())))
    left = min(0.0, math.floor(4 * max(-1.0, lowest)) / 4)  # a centred accuracy below guessing is negative

    def at(value: float | None) -> float | None:
        return None if value is None else min(1.0, max(0.0, (value - left) / (1 - left)))

    titles = [STAGE_TITLES.get(stage, stage) for stage in stages]
    found = []
    for row in rows:
        marks: list[Mark | None] = []
        for stage, score in zip(stages, row.scores, strict=True):
            ends = score.interval if score and score.interval else (None, None)
            marks.append(Mark(stage, at(score.value) or 0.0, at(ends[0]), at(ends[1])) if score else None)
        said = [
            f"{title} {score.text} {score.detail}".strip()
            for title, score in zip(titles, row.scores, strict=True)
            if score
        ]
        chance = next((score.chance for score in reversed(row.scores) if score and score.chance is not None), None)
        said += [f"guessing {percent(chance)}"] if chance is not None else []
        found.append(PlotRow(row.task, f"{row.task}: {', '.join(said)}", at(chance), marks))
    steps = [left + 0.25 * step for step in range(round(4 * (1 - left)) + 1)]
    return ScorePlot(
        list(zip(stages, titles, strict=True)), [(at(step) or 0.0, percent(step)) for step in steps], found
    )
