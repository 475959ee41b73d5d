"""The pages of the log: of comparisons, at one size or on the ladder, of sweeps and of scaling studies, each with its
section of the log; and the style of their figures."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import dropwhile
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from quern.flags.recipe_flags import Arguments, parse
from quern.lab.arms import Idea, read_idea
from quern.lab.ladder.report import Row, calibration, interval, rows, signed, study_tables, told
from quern.lab.ladder.study import Comparison, Rung, at_rung, numbers
from quern.lab.options import CompareOptions
from quern.lab.scaling.isoflop import CONVENTIONS
from quern.lab.scaling.study import CELLS, FITS, Grid
from quern.lab.search.results import FIGURE, RESULTS, TRIALS, best_line, importance_table, summary, trial_table
from quern.lab.verdict import Finding
from quern.recipe import Recipe
from quern.recipes import load_recipe
from quern.records import read_json, read_lines
from quern.report.plots import log_ticks, svg
from quern.resolve import resolve
from quern.terminal import counted

HEADER = "<!-- Generated from experiments/records by `quern lab log`. -->\n\n"
INK, GREY = "#444444", "#9a9a9a"
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
VERDICT_COLOURS = {"better": "#2a7f3f", "worse": "#b3402a", "undecided": "#b0892a"}
"""All other verdicts are grey."""
MOST_LABELS = 12
"""Ideas in the figure of multipliers; the table has all."""
LABEL_POINTS = 7.0
"""The least distance of two labels."""


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
    """Lines of a Markdown table, whose columns but the first are numbers."""
    rule = "|---" + "|--:" * (len(head) - 1) + "|"
    return [f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(row)} |" for row in rows)]


def repeat(facts: dict[str, Any]) -> list[str]:
    """The last section of every page."""
    return ["## Repeat it\n", f"```\n{facts.get('command', '')}\n```\n"]


# Comparisons ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ComparisonPage:
    """Renders the page of a comparison from its records."""

    study: Comparison

    @cached_property
    def rows(self) -> list[Row]:
        return rows(self.study)

    @cached_property
    def rungs(self) -> list[int]:
        return sorted({rung for row in self.rows for rung in row.findings})

    def _numbers(self, flagged: bool) -> dict[int, str]:
        """Fingerprints of the baseline's numbers today, by rung, with or without the flags of the study's command; {}
        if a flag or the recipe is no more."""
        plan = self.study.plan
        words = shlex.split(plan.facts["command"])[3:]
        flags = [*dropwhile(lambda word: not word.startswith("-"), words)]
        try:
            file = self.study.folder.parents[2] / words[0]  # of the project that has experiments/records/STUDY
            base = load_recipe(str(file) if file.is_file() else words[0])[0]
            recipe = parse(CompareOptions, base, Arguments(flags if flagged else ()), verb="lab compare").recipe
            return {rung: numbers(at_rung(recipe, plan.rungs[str(rung)])) for rung in self.rungs}
        except (ValueError, IndexError):
            return {}

    @cached_property
    def old(self) -> bool:
        """Whether the baseline's resolved numbers are others today."""
        return self._numbers(True) != {rung: self.study.plan.numbers[str(rung)] for rung in self.rungs}

    @cached_property
    def aside(self) -> bool:
        """Whether flags of the command give the ladder's baseline other numbers than its file."""
        flagged, plain = self._numbers(True), self._numbers(False)
        return self.study.plan.ladder and bool(flagged and plain) and flagged != plain

    @cached_property
    def answers(self) -> dict[str, list[str]]:
        """The known answers of the project, for a study that `quern lab calibrate` began; {} for others."""
        file = self.study.folder.parents[1] / "known_answers.json"  # experiments/, beside records/STUDY
        began = self.study.plan.facts["command"].startswith("quern lab calibrate ")
        return read_json(file, dict[str, list[str]]) if began and file.is_file() else {}

    def page(self) -> Page:
        name, plan = self.study.name, self.study.plan
        files: dict[str, str] = {}
        lines = [f"# {name}\n", self.setup() + "\n", self.counts() + "\n"]
        if any(row.flops for row in self.rows):
            files[f"{name}-multipliers.svg"] = multipliers(self.rows)
            lines += [f"![Compute multipliers over the baseline's FLOPs]({name}-multipliers.svg)\n"]
        for title, told_, head, body in study_tables(self.study):
            lines += [f"## {title}\n", *(f"{line}\n" for line in told_), *table(head, body), ""]
        known = [row.findings for row in self.rows if row.idea in self.answers]
        for rung in self.rungs:
            if all(rung not in found or found[rung].verdict == "undecided" for found in known):
                continue
            lines += [f"## Known answers on rung {rung}\n", "```"]
            lines += [*calibration(self.study, rung, self.answers), "```\n"]
        for rung in self.rungs:
            found = {row.idea: row.findings[rung] for row in self.rows if rung in row.findings}
            files[f"{name}-{rung}.svg"] = intervals(found, plan.delta)
            lines += [f"![Intervals of all ideas on rung {rung}]({name}-{rung}.svg)\n"]
        lines += ["## The ideas\n"]
        for row in (row for row in self.rows if row.findings):
            about = self.about(row.idea)
            parts = {"Hypothesis": about.hypothesis, "Source": about.source, "Expected": about.expected}
            parts |= {"Published": about.published, "As expected": agreement(about, row)}
            lines += [f"### {row.idea}\n", f"{about.title}\n"]
            lines += [*(f"- **{part}**: {text}" for part, text in parts.items() if text), ""]
        files[f"{name}.md"] = HEADER + "\n".join([*lines, *repeat(plan.facts)])
        return Page(name, plan.facts["registered"], self.section(), files, self.verdicts())

    def setup(self) -> str:
        """One paragraph: what was compared with what."""
        plan = self.study.plan
        machines = {one.machine for runs in self.study.trials.values() for one in runs.values() if one.machine}
        one = self.size(min(self.rungs, default=min(map(int, plan.rungs))))
        old = " **Its baseline is an old one: the defaults have changed since.**" if self.old else ""
        if self.aside:
            old += " **Flags of its command change the baseline, so no idea's file has these verdicts.**"
        size = f"{one.depth}x{one.width}, vocabulary {one.vocab_size:,}, context {one.context:,}, {one.steps:,} steps"
        return (
            f"Baseline `{plan.base}` on `{plan.data}` (text {plan.text}); {'the lowest rung' if plan.ladder else 'it'} "
            f"is {size} of {one.batch_tokens:,} tokens. Registered {plan.facts['registered']}: {plan.metric}; δ "
            f"{plan.delta:g}, α {plan.alpha:g} over {counted(len(self.study.ideas), 'idea')}, at most {plan.most_pairs}"
            f" pairs. Trained on: {'; '.join(sorted(machines))}.{old}"
        )

    def size(self, rung: int) -> Rung:
        """The size of the baseline on a rung, which of a comparison at one size is the recipe's own."""
        plan, found = self.study.plan, self.study.plan.rungs[str(rung)]
        if plan.ladder:
            return found
        own = resolve(at_rung(Recipe.from_json(self.study.arms[plan.base].recipe), found))
        width, context, vocabulary = own.model.width, own.model.context, own.text.vocab_size
        return replace(found, depth=own.depth, width=width, context=context, vocab_size=vocabulary)

    def counts(self) -> str:
        """How many ideas are decided on each rung, and how many of the decided ones are as their files expect."""
        said = {rung: [row.findings[rung].verdict for row in self.rows if rung in row.judged] for rung in self.rungs}
        decided = (f"{len(one) - one.count('undecided')} of {len(one)} ideas on rung {at}" for at, one in said.items())
        yes, no = map([agreement(self.about(row.idea), row) for row in self.rows].count, ("yes", "no"))
        told_ = f"Decided: {', '.join(decided)}. {yes} of {yes + no} decided ideas are as their files expect."
        lines = [one for rung in self.rungs if self.answers for one in calibration(self.study, rung, self.answers)]
        return " ".join([told_, *(f"R{one[1:]}." for one in lines if one.startswith("rung ") and ": 0 of" not in one)])

    def section(self) -> list[str]:
        """The study's section of experiments/LOG.md: a row for each idea, the largest multiplier first. A study with
        another baseline than today's has none: its own page has the verdicts."""
        if self.old or self.aside:
            return [f"{self.setup()} The study's page has the verdicts."]
        head = ["idea", *(f"rung {rung}" for rung in self.rungs), "multiplier", "trend", "expected", "as expected"]
        body: list[list[str]] = []
        for row in self.rows:
            about, findings = self.about(row.idea), (row.findings.get(rung) for rung in self.rungs)
            cells = (f"{one.verdict}, {signed(one.difference)} {interval(one)}" if one else "" for one in findings)
            trend = row.course.trend if row.course else ""
            body.append([row.idea, *cells, _multiplier(row), trend, about.direction or "", agreement(about, row)])
        return [self.setup() + "\n", self.counts() + "\n", *table(head, body)]

    def verdicts(self) -> dict[str, list[Verdict]]:
        """The verdict on each idea by rung, once it is judged there. That on the highest rung tells the multiplier and
        the trend. There is none against a baseline that flags have changed: an idea's file compares with today's."""
        name, plan, found = self.study.name, self.study.plan, dict[str, list[Verdict]]()
        for row in () if self.aside else self.rows:
            for rung in row.judged or row.findings:
                one, top, size = row.findings[rung], rung == max(row.judged, default=-1), self.size(rung)
                place = f"on rung {rung}" if plan.ladder else f"at {size.depth}x{size.width}, {size.steps:,} steps"
                short = f"{one.verdict} {place}"
                text = f"{short} ({signed(one.difference)} bits per byte, {counted(one.pairs, 'pair')})"
                if top and row.flops:
                    text, short = f"{text}; multiplier {_multiplier(row)}", f"{short}, {_multiplier(row)}"
                if top and row.course:
                    text += f", {row.course.trend}"
                baseline, runs = (plan.base, plan.text, plan.numbers[str(rung)]), one.pairs + one.failed
                rank, decided = rung if plan.ladder else -1, one.verdict != "undecided"
                verdict = Verdict(name, rank, baseline, self.old, runs, decided, text, short)
                found.setdefault(row.idea, []).append(verdict)
        return found

    def about(self, idea: str) -> Idea:
        source = self.study.arms[idea].source
        return read_idea(source) if source else Idea(f"The recipe `{idea}`.")


def _multiplier(row: Row) -> str:
    return f"× {told(row.flops[max(row.flops)])}" if row.flops else ""


def agreement(about: Idea, row: Row) -> str:
    """yes, no or open: whether the verdict on the highest rung is the expected one; "" without an expectation."""
    if about.direction is None or not row.findings:
        return ""
    verdict = row.findings[max(row.judged)].verdict.partition(",")[0] if row.judged else "undecided"
    return "open" if verdict in ("undecided", "fails") else "yes" if verdict == about.direction else "no"


def multipliers(rows: Sequence[Row]) -> str:
    """The compute multipliers of ideas over the baseline's FLOPs, with intervals of 95 %, as an SVG document: of those
    on most rungs, then of the best."""
    with matplotlib.rc_context(STYLE):
        shown = sorted((row for row in rows if row.flops), key=lambda row: -len(row.flops))[:MOST_LABELS]
        figure = Figure(figsize=(6.4, 4.2), layout="constrained")
        axes = figure.add_subplot(xscale="log", yscale="log")
        axes.axhline(1, color=GREY, linewidth=0.8)
        colours = matplotlib.colormaps["turbo"](np.linspace(0.05, 0.95, max(1, len(shown))))
        ends: list[tuple[float, float, Row, Any]] = []
        for row, colour in zip(shown, colours, strict=True):
            rungs = sorted(row.flops)
            x, found = [row.computes[rung] for rung in rungs], [told(row.flops[rung]) for rung in rungs]
            values, low, high = np.array(found).T
            errors = np.abs([low - values, high - values])
            axes.errorbar(x, values, errors, fmt="o-", color=colour, markersize=3, linewidth=1)
            ends.append((values[-1], x[-1], row, colour))
        log_ticks(axes.yaxis, 6, (1, 2, 5))
        axes.set_xlabel("training FLOPs of the baseline")
        axes.set_ylabel("compute multiplier")
        computes = [compute for row in shown for compute in row.computes.values()] or [1.0]
        axes.set_xlim(min(computes) / 1.5, max(computes) * 2)  # room for labels
        figure.draw_without_rendering()  # places are known from here on
        free = math.inf
        for value, x, row, colour in sorted(ends, key=lambda end: -end[0]):  # labels that would touch move down
            own = axes.transData.transform((x, value))[1] * 72 / figure.dpi
            free = min(own, free - LABEL_POINTS)
            line = {"arrowstyle": "-", "color": colour, "linewidth": 0.5, "shrinkB": 3, "relpos": (0, 0.5)}
            how: dict[str, Any] = {"textcoords": "offset points", "fontsize": 6, "va": "center", "arrowprops": line}
            axes.annotate(row.idea, (x, value), (30, free - own), **how)
        return svg(figure)


def intervals(findings: Mapping[str, Finding], delta: float) -> str:
    """The interval of each idea with a pair, sorted by the difference, as an SVG document."""
    shown = sorted((item for item in findings.items() if item[1].pairs), key=lambda item: -item[1].difference)
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
            outside = ">" if one.difference > spread else "<" if one.difference < -spread else "o"
            at = float(np.clip(one.difference, -spread, spread))
            axes.plot([at], [row], outside, color=colour, markersize=4, clip_on=False)
        axes.set_yticks(range(len(shown)), [idea for idea, _ in shown])
        axes.set_xlim(-spread, spread)
        axes.set_xlabel("difference in bits per byte at equal steps; left is better")
        return svg(figure)


# Scaling studies and sweeps ---------------------------------------------------------------------------------


SCALING_FILES = (Grid.PLAN, CELLS, FITS)


def read_scaling(folder: Path) -> Page:
    """The page of the scaling study in a folder of records."""
    plan, fits = (read_json(folder / file, dict[str, Any]) for file in (Grid.PLAN, FITS))
    cells = list(read_lines(folder / CELLS))
    name, facts, recipe = folder.name, plan["facts"], plan["recipe"]
    budgets = ", ".join(f"{budget:.3g}" for budget in plan["budgets"])
    summary = (
        f"An IsoFLOP study of `{recipe['name']}` on `{recipe['data']}`: budgets of {budgets} FLOPs, sizes "
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
            ends = [best[end] or best["value"] for end in ("low", "high")]
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
    lines = [
        f"# {name}\n",
        f"{told} {machine_line(facts['facts'])}\n",
        f"{best}\n",
        f"![Each of the most important fields against the bits per byte, and against each other]({figure})\n",
        "## The best trials\n",
        *table(*trial_table(facts, read_lines(folder / TRIALS))),
        "",
        "## Importances\n",
        "How much each field decides whether a trial is among the best tenth (PED-ANOVA, arXiv 2304.10255).\n",
        *table(*importance_table(facts)),
        "",
        *(f"- {line}" for line in facts["edges"]),
        "",
        *repeat(facts["facts"]),
    ]
    files = {f"{name}.md": HEADER + "\n".join(lines), figure: (folder / FIGURE).read_text(encoding="utf-8")}
    return Page(name, facts["facts"]["registered"], [f"{told} {best}"], files)
