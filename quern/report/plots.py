"""Training curves as inline SVG, without files, scripts or fixed colours.

matplotlib draws with placeholder colours, which are then replaced by CSS variables of the page: one drawing fits the
light and the dark scheme. Text stays text, in the font of the page.
"""

import io
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from quern.report.records import StageRecords, human, number, percent
from quern.train.metrics import CURVES, RL_CURVES, Curve

# Placeholder colours, and the variables of report.css that replace them.
MUTED, GRID, ACCENT, FAINT, ALERT, OTHER = "#010204", "#010205", "#010206", "#010207", "#010208", "#010209"
VARIABLES = {MUTED: "muted", GRID: "line", ACCENT: "accent", FAINT: "accent-faint", ALERT: "alert", OTHER: "pretrain"}
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "quern",
    "font.size": 8.5,
    **{f"axes.spines.{side}": False for side in ("top", "right", "left")},
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
PLACES = re.compile(r' (?:d|x|y)="[^"]*"|(?:translate|rotate)\([^)]*\)')
FINER = re.compile(r"-?\d+\.\d{3,}")
"""A number with more decimals than an image shows; processors disagree about the last ones."""
PASS = "val_pass_"
"""Begins the keys of pass@k."""


@dataclass(frozen=True)
class Panel:
    """A drawn curve. reading: its typical or last value as text; ys: its values; svg: the drawing, an <svg> element."""

    curve: Curve
    reading: str
    ys: list[float]
    svg: str


def panels(stage: StageRecords) -> list[Panel]:
    """The curves for which a stage has at least two measurements. The first is wide, and has the validation losses."""
    found = []
    drawn = [*RL_CURVES, *_pass_curves(stage)] if stage.name == "rl" else CURVES
    for index, curve in enumerate(drawn):
        xs, ys = stage.column(curve.key, curve.against)
        if len(xs) < 2 or max(xs) <= 0:
            continue
        name, value = ("median", statistics.median(ys)) if curve.median else ("last", ys[-1])
        text = percent(value) if curve.share else human(value) if value >= 1000 else f"{value:.4g}"
        drawing = draw(curve, xs, ys, stage, f"{stage.name}-{index}", wide=not found)
        found.append(Panel(curve, f"{name} {text}", ys, drawing))
    return found


def _pass_curves(stage: StageRecords) -> list[Curve]:
    """The curves whose names depend on the run: pass@k for its k, and pass@1 of each of several environments."""
    keys = dict.fromkeys(key for line in stage.validations for key in line)
    found = [key.removeprefix(PASS) for key in keys if key.startswith(PASS) and key != f"{PASS}1"]
    return [
        Curve(f"{PASS}{name}", "Held-out questions", f"pass@{name.replace('/', ', ')}", points=True, share=True)
        for name in found
    ]


def draw(curve: Curve, xs: list[float], ys: list[float], stage: StageRecords, name: str, wide: bool = False) -> str:
    """An <svg> element whose ids start with `name`. Vertical lines mark resumed and skipped steps."""
    with matplotlib.rc_context(STYLE):
        width, height = (8.9, 2.9) if wide else (4.3, 2.25)  # inches
        figure = Figure(figsize=(width, height))
        figure.subplots_adjust(left=0.54 / width, right=1 - 0.07 / width, bottom=0.42 / height, top=1 - 0.07 / height)
        figure.patch.set_visible(False)
        axes = figure.add_subplot()
        axes.patch.set_visible(False)
        smooth = running_mean(ys) if curve.smooth else ys
        x_name = curve.against
        if curve.against == "seconds":
            size, unit = (1, "s") if max(xs) < 300 else (60, "min") if max(xs) < 18_000 else (3600, "h")
            xs, x_name = [x / size for x in xs], f"training time, {unit}"
        if curve.smooth and len(ys) > 12:
            axes.plot(*thin(xs, ys), color=FAINT, linewidth=1)
            axes.plot(*thin(xs, smooth), color=ACCENT, linewidth=1.6)
        else:
            axes.plot(*thin(xs, ys), color=ACCENT, linewidth=1.6, marker="o" if curve.points else None, ms=3)
        axes.plot(xs[-1], smooth[-1], "o", color=ACCENT, ms=4.5, label="training")
        held_out = stage.column("val_loss") if curve.key == "loss" and curve.against == "step" else ([], [])
        if held_out[0]:
            axes.plot(*held_out, color=OTHER, linewidth=1, marker="o", ms=3.5, label="validation")
            axes.legend(frameon=False, fontsize=8.5, labelcolor=MUTED)
        low, high = min(*ys, *held_out[1]), max(*ys, *held_out[1])
        if curve.log and low > 0:
            room = (high / low) ** 0.06 if high > low else 1.1
            axes.set_yscale("log")
            axes.set_ylim(low / room, high * room)
            log_ticks(axes.yaxis, 5, (1, 2, 5))
        else:
            axes.set_ylim(min(0, low * 1.08), max(0, high * 1.08) if low or high else None)
            axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: percent(y) if curve.share else human(y)))
        axes.set_xlim(0, max(xs) * 1.02)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=curve.against != "seconds"))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: human(x)))
        axes.set_xlabel(x_name, fontsize=8, color=MUTED)
        if curve.against == "step":
            for step in stage.resumed_at():
                axes.axvline(step, color=MUTED, linewidth=0.8, linestyle=(0, (2, 2)))
            for step in stage.steps_of("skip"):
                axes.axvline(step, color=ALERT, linewidth=0.9)
        return _element(figure, name, f"{curve.title}, {curve.unit}: from {number(ys[0])} to {number(ys[-1])}")


def log_ticks(axis: Axis, most: int, subs: Sequence[float] = (1,)) -> None:
    """Labels a logarithmic axis: `most` steps over a short range, else `subs` times powers of ten. matplotlib's own
    labels overlap, or leave a short range without any."""
    low, high = axis.get_view_interval()
    short = high < 12 * low
    axis.set_major_locator(MaxNLocator(most, steps=[1, 2, 5, 10]) if short else LogLocator(subs=subs, numticks=12))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")


def running_mean(ys: list[float]) -> list[float]:
    """A centred mean over about a thirtieth of the curve. The window narrows at the ends, which keep their values."""
    reach, sums = max(1, len(ys) // 60), np.cumsum([0.0, *ys])
    index = np.arange(len(ys))
    near = np.minimum(reach, np.minimum(index, len(ys) - 1 - index))
    return ((sums[index + near + 1] - sums[index - near]) / (2 * near + 1)).tolist()


def thin(xs: list[float], ys: list[float]) -> tuple[list[float], list[float]]:
    """Keeps at most about STEPS_OF_A_CURVE points, including the last: limits the size of the page for a long run."""
    stride = -(-len(xs) // STEPS_OF_A_CURVE)
    keep = sorted({*range(0, len(xs), stride), len(xs) - 1})
    return [xs[i] for i in keep], [ys[i] for i in keep]


def svg(figure: Figure, **how: Any) -> str:
    """The text of a figure as SVG, the same on every machine: coordinates to 0.01. how: as `Figure.savefig`."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None}, **how)
    return PLACES.sub(lambda found: FINER.sub(lambda number: f"{float(number[0]):.2f}", found[0]), text.getvalue())


def _element(figure: Figure, name: str, label: str) -> str:
    text = svg(figure, transparent=True)
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    head, body = text.split(">", 1)
    text = re.sub(r'\s(xmlns(:\w+)?|version|width|height)="[^"]*"', "", head) + ">" + body
    text = re.sub(r'\bid="([^"]*)"', rf'id="{name}-\1"', text)
    text = re.sub(r'(href="#|url\(#)', rf"\1{name}-", text)
    text = text.replace("xlink:href", "href")
    # The page sets the font, matplotlib only its size.
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", text)
    text = re.sub(r"font-family: [^;\"]*;?", "", text)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var(--{variable})")
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1).strip()
