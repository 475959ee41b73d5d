"""The parts of the log's pages, the style of their figures, and the pages of sweeps and of scaling studies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from quern.lab.scaling.isoflop import CONVENTIONS
from quern.lab.scaling.study import CELLS, FITS, Grid
from quern.lab.search.results import FIGURE, RESULTS, TRIALS, best_line, importance_table, summary, trial_table
from quern.lab.study import data_names
from quern.records import read_json, read_lines
from quern.report.plots import svg

HEADER = "<!-- Generated from experiments/records by `quern lab log`. -->\n\n"
INK, GREY = "#444444", "#9a9a9a"
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "quern",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.edgecolor": GREY,
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}


@dataclass(frozen=True)
class Verdict:
    """A study's verdict on an idea on one rung, -1 for a comparison at one size, which the ladder outranks. baseline:
    what identifies the baseline on that rung; old: it is another one today; runs: runs of the idea that were judged;
    text: for the idea's docstring; short: for the index."""

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
    return "Machine: {processor}, {dtype}, torch {torch}.".format_map(facts["machine"])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table, whose columns but the first are numbers; none without rows."""
    rule = "|---" + "|--:" * (len(head) - 1) + "|"
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return [lines[0], rule, *lines[1:]] if rows else []


def repeat(facts: dict[str, Any]) -> list[str]:
    """The last section of every page."""
    return ["## Repeat it\n", f"```\n{facts.get('command', '')}\n```\n"]


SCALING_FILES = (Grid.PLAN, CELLS, FITS)


def read_scaling(folder: Path) -> Page:
    """The page of the scaling study in a folder of records."""
    plan, fits = (read_json(folder / file, dict[str, Any]) for file in (Grid.PLAN, FITS))
    cells = list(read_lines(folder / CELLS))
    name, facts, recipe = folder.name, plan["facts"], plan["recipe"]
    budgets = ", ".join(f"{budget:.3g}" for budget in plan["budgets"])
    summary = (
        f"An IsoFLOP study of `{recipe['name']}` on `{data_names(recipe['data'])}`: budgets of {budgets} FLOPs, sizes "
        f"{', '.join(plan['sizes'])}, {fits['runs']['used']} of {fits['runs']['planned']} runs used."
    )
    files = {f"{name}-{convention}.svg": _figure(convention, cells, fits) for convention in CONVENTIONS}
    lines = [f"# {name}\n", f"{summary} {machine_line(facts)}\n"]
    for convention, about in CONVENTIONS.items():
        lines += [f"## {convention.capitalize()}: {about.meaning}\n"]
        lines += [f"![Loss against parameters for each budget]({name}-{convention}.svg)\n"]
        lines += ["```", *fits["report"][convention], "```", ""]
    lines += ["## Which convention\n", *fits["report"]["stability"], "", *repeat(facts)]
    files[f"{name}.md"] = HEADER + "\n".join(lines)
    return Page(name, facts["registered"], [summary, *fits["report"]["stability"]], files)


def _figure(convention: str, cells: list[dict[str, Any]], fits: dict[str, Any]) -> str:
    """The loss of every run against its parameters, the parabola of each budget, and its minimum with its interval."""
    optima = fits["conventions"][convention]["envelope"]["optima"]
    colours = matplotlib.colormaps["viridis"](np.linspace(0.1, 0.85, max(1, len(optima))))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        axes = figure.add_subplot(xscale="log")
        for optimum, colour in zip(optima, colours, strict=True):
            runs = [cell for cell in cells if cell["budget"] == optimum["flops"] and cell["bpb"] is not None]
            sizes = np.array([cell["parameters"][CONVENTIONS[convention].field] for cell in runs], float)
            scores = np.array([cell["bpb"] for cell in runs], float)
            axes.plot(sizes, scores, "o", color=colour, markersize=4, label=f"{optimum['flops']:.3g} FLOPs")
            if optimum["refusal"]:
                continue
            x = np.geomspace(sizes.min(), sizes.max(), 100)
            centre = np.log(sizes).mean()
            axes.plot(x, np.polyval(np.polyfit(np.log(sizes) - centre, scores, 2), np.log(x) - centre), color=colour)
            best = optimum["parameters"]
            ends = [best["low"] or 0.0, best["high"] or np.inf]  # null is infinite
            axes.plot(np.clip(ends, x[0], x[-1]), [optimum["loss"]["value"]] * 2, color=colour, linewidth=3, alpha=0.4)
            axes.plot([best["value"]], [optimum["loss"]["value"]], "*", color="crimson", markersize=9)
        axes.set_xlabel(f"parameters ({convention})")
        axes.set_ylabel("bits per byte")
        axes.grid(color=GREY, alpha=0.2)
        axes.legend(frameon=False)
        return svg(figure)


SWEEP_FILES = RESULTS, TRIALS, FIGURE


def read_sweep(folder: Path) -> Page:
    """The page of the sweep in a folder of records."""
    facts: dict[str, Any] = read_json(folder / RESULTS, dict[str, Any])
    name, figure = folder.name, f"{folder.name}-pairs.svg"
    told, best = summary(facts), best_line(facts)
    how = "How much each field decides whether a trial is among the best tenth (PED-ANOVA, arXiv 2304.10255).\n"
    importances = ["## Importances\n", how, *table(*importance_table(facts)), ""]
    lines = [
        f"# {name}\n",
        f"{told} {machine_line(facts['facts'])}\n",
        f"{best}\n",
        f"![Each of the most important fields against the bits per byte, and against each other]({figure})\n",
        "## The best trials\n",
        *table(*trial_table(facts, read_lines(folder / TRIALS))),
        "",
        *(importances if facts["importances"] else ()),
        *(f"- {line}" for line in facts["edges"]),
        "",
        *repeat(facts["facts"]),
    ]
    files = {f"{name}.md": HEADER + "\n".join(lines), figure: (folder / FIGURE).read_text(encoding="utf-8")}
    return Page(name, facts["facts"]["registered"], [f"{told} {best}"], files)
