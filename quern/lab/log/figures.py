"""Figures of a study as SVG files: curves with bands over the seeds, and the intervals of all ideas."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from quern.lab.results import Result
from quern.lab.study import Study

INK, GREY = "#444444", "#9a9a9a"
COLOURS = ("#777777", "#0b6e99")
VERDICT_COLOURS = {"better": "#2a7f3f", "worse": "#b3402a", "undecided": "#b0892a"}
"""All other verdicts are grey."""
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


def curves(study: Study, idea: str) -> str:
    """The difference between an idea's validation curve and the baseline's at equal steps, by pair and in the mean.

    Returns:
        An SVG document.
    """
    registered = study.registration
    rows = []
    for pair in range(registered.most_pairs):
        base = study.find(registered.base, pair, registered.steps)
        ours = study.find(idea, pair, registered.steps)
        both = list(zip(base.curve, ours.curve, strict=False)) if base and ours else []
        values = [(b.bpb - a.bpb) for a, b in both if a.bpb is not None and b.bpb is not None]
        if base and ours and len(values) == len(base.curve) == len(ours.curve):
            rows.append(values)
            steps = [point.step for point in base.curve]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 2.8), layout="constrained")
        axes = figure.add_subplot()
        axes.axhline(0, color=GREY, linewidth=0.8)
        axes.axhspan(-registered.delta, registered.delta, color=GREY, alpha=0.15, linewidth=0)
        if rows:
            _band(axes, steps, np.array(rows))
        axes.set_xlabel("steps")
        axes.set_ylabel(f"{idea} − {registered.base}, bits per byte")
        return svg(figure)


def _band(axes: Axes, steps: Sequence[int], rows: np.ndarray) -> None:
    """Single pairs faint, their mean, and a band of one standard error."""
    for row in rows:
        axes.plot(steps, row, color=COLOURS[1], alpha=0.25, linewidth=0.8)
    mean = rows.mean(0)
    axes.plot(steps, mean, color=COLOURS[1], linewidth=1.8)
    if len(rows) > 1:
        error = rows.std(0, ddof=1) / np.sqrt(len(rows))
        axes.fill_between(steps, mean - error, mean + error, color=COLOURS[1], alpha=0.2, linewidth=0)


def intervals(results: Sequence[Result], delta: float, axis: str) -> str:
    """The anytime-valid interval of each idea on one axis, sorted by the mean difference, as an SVG document."""
    shown = sorted((one for one in results if one.axis == axis), key=lambda one: -one.paired.mean)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 0.8 + 0.2 * len(shown)), layout="constrained")
        axes = figure.add_subplot()
        axes.axvline(0, color=GREY, linewidth=0.8)
        axes.axvspan(-delta, delta, color=GREY, alpha=0.15, linewidth=0)
        # An idea whose runs diverged, far outside, does not hide the others.
        spread = 1.5 * float(np.quantile([abs(one.paired.mean) for one in shown] or [delta], 0.9)) + 3 * delta
        for row, one in enumerate(shown):
            low, high = (float(np.clip(end, -spread, spread)) for end in one.paired.interval)
            colour = VERDICT_COLOURS.get(one.verdict, "#777777")
            axes.plot([low, high], [row, row], color=colour, linewidth=2)
            axes.plot(
                [float(np.clip(one.paired.mean, -spread, spread))],
                [row],
                "o",
                color=colour,
                markersize=4,
            )
        axes.set_yticks(range(len(shown)), [one.idea for one in shown])
        axes.set_xlim(-spread, spread)
        axes.set_xlabel(f"difference in bits per byte at equal {axis}; left is better")
        return svg(figure)


def svg(figure: Figure) -> str:
    """The text of a figure as SVG."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()
