"""Curves of a report as inline SVG: no file, no script, no colours of their own.

matplotlib draws with marker colours that are then replaced by CSS variables of the page, so that one
drawing fits a light and a dark scheme; text stays text, in the page's font. What it is not: a plotting
library; `Panel` knows the few kinds of curve a training run has.
"""

import io
import math
import re
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from quern.report.facts import typical
from quern.report.numbers import human, number, percent
from quern.report.run_records import StageRecords

# A colour that no drawing uses by chance → the variable of the page's style sheet.
INK, MUTED, GRID, ACCENT, FAINT, ALERT = "#010203", "#010204", "#010205", "#010206", "#010207", "#010208"
VARIABLES = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    GRID: "var(--line)",
    ACCENT: "var(--accent)",
    FAINT: "var(--accent-faint)",
    ALERT: "var(--alert)",
}
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "quern",
    "font.size": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "text.color": MUTED,
}
STEPS_OF_A_CURVE = 800


@dataclass(frozen=True)
class Panel:
    """A drawing and the words around it: `title`, its `unit`, and the `figure` worth saying."""

    title: str
    unit: str
    figure: str
    svg: str


@dataclass(frozen=True)
class Curve:
    """What to draw. `points` marks every measurement; `smooth` draws a running mean over a faint curve."""

    title: str
    unit: str
    key: str
    against: str
    points: bool = False
    smooth: bool = False
    log: bool = False
    share: bool = False
    reading: str = "last"


CURVES = (
    Curve("Training loss", "nats per token, by step", "loss", "step", smooth=True, log=True),
    Curve("Training loss", "nats per token, by time", "loss", "seconds", smooth=True, log=True),
    Curve("Validation", "bits per byte, by tokens", "val_bpb", "tokens", points=True, log=True),
    Curve("Validation", "bits per byte, by time", "val_bpb", "seconds", points=True, log=True),
    Curve("Throughput", "tokens a second, by time", "tokens_per_second", "seconds", reading="median"),
    Curve("Model FLOPs utilisation", "of the peak, by time", "mfu", "seconds", share=True, reading="median"),
    Curve("Learning rate", "share of the peak, by step", "lr", "step", reading="none"),
    Curve("Gradient norm", "global, by step", "grad_norm", "step", smooth=True, log=True),
)
X_NAMES = {"step": "step", "tokens": "tokens", "seconds": "training time"}


def panels(stage: StageRecords) -> list[Panel]:
    """The curves for which a stage has at least two measurements."""
    found = []
    for number_, curve in enumerate(CURVES):
        xs, ys = stage.column(curve.key, curve.against)
        if len(xs) < 2 or max(xs) <= 0 or (curve.log and min(ys) <= 0):
            continue
        svg = draw(curve, xs, ys, stage, f"{stage.name}-{number_}")
        found.append(Panel(curve.title, curve.unit, _reading(curve, stage, ys), svg))
    return found


def draw(curve: Curve, xs: list[float], ys: list[float], stage: StageRecords, name: str) -> str:
    """One curve as an <svg> element whose ids start with `name`; resumed and skipped steps are marked."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.3, 2.25), layout="constrained")
        figure.patch.set_visible(False)
        axes = figure.add_subplot()
        axes.patch.set_visible(False)
        xs_drawn, ys_drawn = thin(xs, ys)
        if curve.smooth and len(ys) > 12:
            axes.plot(xs_drawn, ys_drawn, color=FAINT, linewidth=1)
            axes.plot(*thin(xs, running_mean(ys)), color=ACCENT, linewidth=1.6)
        else:
            axes.plot(xs_drawn, ys_drawn, color=ACCENT, linewidth=1.6, marker="o" if curve.points else None, ms=3)
        axes.plot(xs[-1], running_mean(ys)[-1] if curve.smooth else ys[-1], "o", color=ACCENT, ms=4.5)
        if curve.log:
            _log_axis(axes, min(ys), max(ys))
        else:
            axes.set_ylim(0, max(ys) * 1.08 if max(ys) > 0 else None)
            axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: percent(y) if curve.share else human(y)))
        axes.set_xlim(0, max(xs) * 1.02)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=curve.against != "seconds"))
        if curve.against == "seconds":
            _time_axis(axes, max(xs))
        else:
            axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: human(x)))
        axes.set_xlabel(X_NAMES[curve.against], fontsize=8, color=MUTED)
        if curve.against == "step":
            for step in stage.resumed_at():
                axes.axvline(step, color=MUTED, linewidth=0.8, linestyle=(0, (2, 2)))
            for step in stage.steps_of("skip"):
                axes.axvline(step, color=ALERT, linewidth=0.9)
        return _svg(figure, name, f"{curve.title}, {curve.unit}: from {number(ys[0])} to {number(ys[-1])}")


def running_mean(ys: list[float]) -> list[float]:
    """A centred mean over about a thirtieth of the curve, narrower at the ends, so that no end is
    invented.
    """
    reach = max(1, len(ys) // 60)
    sums = [0.0]
    for y in ys:
        sums.append(sums[-1] + y)
    means = []
    for i in range(len(ys)):
        near = min(reach, i, len(ys) - 1 - i)
        means.append((sums[i + near + 1] - sums[i - near]) / (2 * near + 1))
    return means


def thin(xs: list[float], ys: list[float]) -> tuple[list[float], list[float]]:
    """At most about STEPS_OF_A_CURVE points, the last one always: a long run must not make a heavy page."""
    stride = -(-len(xs) // STEPS_OF_A_CURVE)
    keep = sorted({*range(0, len(xs), stride), len(xs) - 1})
    return [xs[i] for i in keep], [ys[i] for i in keep]


def _reading(curve: Curve, stage: StageRecords, ys: list[float]) -> str:
    if curve.reading == "none":
        return ""
    value = typical(stage, curve.key) if curve.reading == "median" else ys[-1]
    assert value is not None
    text = percent(value) if curve.share else human(value) if value >= 1000 else f"{value:.4g}"
    return f"{text} in the median" if curve.reading == "median" else f"{text} at the end"


def _log_axis(axes: Axes, low: float, high: float) -> None:
    axes.set_yscale("log")
    room = (high / low) ** 0.06 if high > low else 1.1
    axes.set_ylim(low / room, high * room)
    bottom, top = low / room, high * room
    if high / low < 4:
        ticks = MaxNLocator(5).tick_values(bottom, top)
    else:
        decades = range(math.floor(math.log10(bottom)), math.ceil(math.log10(top)) + 1)
        steps = (1, 1.5, 2, 3, 5, 7) if high / low < 12 else (1, 2, 5) if high / low < 120 else (1,)
        ticks = [step * 10.0**decade for decade in decades for step in steps]
    axes.yaxis.set_major_locator(FixedLocator([tick for tick in ticks if bottom <= tick <= top]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.3g}"))


def _time_axis(axes: Axes, seconds: float) -> None:
    size, unit = (1, "s") if seconds < 300 else (60, "min") if seconds < 18_000 else (3600, "h")
    nice = MaxNLocator(7, steps=[1, 2, 3, 6, 10] if unit == "s" else [1, 2, 5, 10])
    ticks = [tick * size for tick in nice.tick_values(0, seconds / size) if tick * size <= seconds * 1.02]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / size:g} {unit}" if x else "0"))


def _svg(figure: Figure, name: str, label: str) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = (
        re.sub(r'\s(xmlns(:\w+)?|version|width|height)="[^"]*"', "", text.split(">", 1)[0])
        + ">"
        + text.split(">", 1)[1]
    )
    text = re.sub(r'\bid="([^"]*)"', rf'id="{name}-\1"', text)
    text = re.sub(r'(href="#|url\(#)', rf"\1{name}-", text)
    text = text.replace("xlink:href", "href")
    # The page sets the font; only the size is matplotlib's.
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", text)
    text = re.sub(r"font-family: [^;\"]*;?", "", text)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, variable)
    return text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1).strip()
