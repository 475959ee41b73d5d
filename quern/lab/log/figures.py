"""Figures of a study as SVG files: multipliers over compute, and the intervals of all ideas."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from quern.lab.ladder.multiplier import told
from quern.lab.ladder.report import Row
from quern.lab.verdict import Finding

INK, GREY = "#444444", "#9a9a9a"
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


def multipliers(rows: Sequence[Row]) -> str:
    """The compute multiplier of each idea over the baseline's FLOPs, with bands of 95 %, as an SVG document."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 4.2), layout="constrained")
        axes = figure.add_subplot(xscale="log", yscale="log")
        axes.axhline(1, color=GREY, linewidth=0.8)
        shown = [row for row in rows if row.flops]
        colours = matplotlib.colormaps["turbo"](np.linspace(0.05, 0.95, max(1, len(shown))))
        for row, colour in zip(shown, colours, strict=True):
            rungs = sorted(row.flops)
            x, found = [row.computes[rung] for rung in rungs], [told(row.flops[rung]) for rung in rungs]
            axes.plot(x, [one.value for one in found], "o-", color=colour, markersize=3, linewidth=1)
            axes.fill_between(
                x, [one.low for one in found], [one.high for one in found], color=colour, alpha=0.12, linewidth=0
            )
            axes.annotate(row.idea, (x[-1], found[-1].value), (4, 0), textcoords="offset points", fontsize=6)
        axes.set_xlabel("training FLOPs of the baseline")
        axes.set_ylabel("compute multiplier")
        return svg(figure)


def intervals(findings: Mapping[str, Finding], delta: float) -> str:
    """The interval of each idea, sorted by the difference, as an SVG document."""
    shown = sorted(findings.items(), key=lambda item: -item[1].difference)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 0.8 + 0.2 * len(shown)), layout="constrained")
        axes = figure.add_subplot()
        axes.axvline(0, color=GREY, linewidth=0.8)
        axes.axvspan(-delta, delta, color=GREY, alpha=0.15, linewidth=0)
        # An idea far outside does not hide the others.
        spread = 1.5 * float(np.quantile([abs(one.difference) for _, one in shown] or [delta], 0.9)) + 3 * delta
        for row, (_, one) in enumerate(shown):
            low, high = (float(np.clip(end, -spread, spread)) for end in one.interval)
            colour = VERDICT_COLOURS.get(one.verdict.partition(",")[0], "#777777")
            axes.plot([low, high], [row, row], color=colour, linewidth=2)
            axes.plot([float(np.clip(one.difference, -spread, spread))], [row], "o", color=colour, markersize=4)
        axes.set_yticks(range(len(shown)), [idea for idea, _ in shown])
        axes.set_xlim(-spread, spread)
        axes.set_xlabel("difference in bits per byte at equal steps; left is better")
        return svg(figure)


def svg(figure: Figure) -> str:
    """The text of a figure as SVG."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()
