"""The page of a comparison, at one size or on the ladder, with its section of the log and its figures."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import dropwhile
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from quern.flags.recipe_flags import Arguments, parse
from quern.lab.arms import Idea, read_idea
from quern.lab.ladder.report import Row, calibration, interval, known_answers, rows, signed, study_tables, told, usable
from quern.lab.ladder.study import Comparison, at_rung, numbers
from quern.lab.ladder.work import judged
from quern.lab.log.pages import GREY, HEADER, STYLE, Page, Verdict, repeat, table
from quern.lab.options import OF_TEXT, CompareOptions
from quern.lab.study import data_names
from quern.lab.verdict import Finding
from quern.recipe import Resolved
from quern.recipes import load_recipe
from quern.records import read_json
from quern.report.plots import log_ticks, svg
from quern.resolve import resolve
from quern.terminal import counted

VERDICT_COLOURS = {"better": "#2a7f3f", "worse": "#b3402a", "undecided": "#b0892a"}
"""All other verdicts are grey."""
MOST_LABELS = 12  # ideas in the figure of multipliers; the table has all
LABEL_POINTS = 7.0  # the least distance of two labels


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

    def _numbers(self, flagged: bool) -> dict[int, tuple[str, Resolved]]:
        """The fingerprint of the baseline's numbers today, and these, by rung, with or without the flags of the study's
        command; {} if a flag or the recipe is no more."""
        plan = self.study.plan
        words = shlex.split(plan.facts["command"])[3:]
        flags = [*dropwhile(lambda word: not word.startswith("-"), words)]
        try:
            file = self.study.folder.parents[2] / words[0]  # of the project that has experiments/records/STUDY
            base = load_recipe(str(file) if file.is_file() else words[0])[0]
            recipe = parse(CompareOptions, base, Arguments(flags), verb="lab compare").recipe
            if not flagged:  # the fingerprint of the text tells the fields that decide it
                names = [name.removeprefix("text.") for name in OF_TEXT.split() if name.startswith("text.")]
                recipe = replace(base, text=replace(base.text, **{name: getattr(recipe.text, name) for name in names}))
            sized = {rung: at_rung(recipe, plan.rungs[str(rung)]) for rung in self.rungs}
            return {rung: (numbers(one), resolve(one)) for rung, one in sized.items()}
        except (ValueError, IndexError):
            return {}

    @cached_property
    def today(self) -> dict[int, tuple[str, Resolved]]:
        return self._numbers(True)

    @cached_property
    def old(self) -> bool:
        """Whether the baseline's resolved numbers are others today."""
        began = self.study.plan.numbers
        return any(rung not in self.today or self.today[rung][0] != began[str(rung)] for rung in self.rungs)

    @cached_property
    def aside(self) -> bool:
        """Whether flags of the command, beside those on the text, give the ladder's baseline other numbers."""
        flagged, plain = ([numbers for numbers, _ in one.values()] for one in (self.today, self._numbers(False)))
        return self.study.plan.ladder and bool(flagged and plain) and flagged != plain

    @cached_property
    def answers(self) -> dict[str, list[str]]:
        """The known answers that `quern lab calibrate` began with, if the project has the file; {} for others."""
        words = shlex.split(self.study.plan.facts["command"])
        named = next((word for word in words if word.endswith(".json")), "experiments/known_answers.json")
        file = self.study.folder.parents[2] / named  # of the project that has experiments/records/STUDY
        return read_json(file, dict[str, list[str]]) if words[2:3] == ["calibrate"] and file.is_file() else {}

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
        if self.rows:
            lines.append("## The ideas\n")
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
        lowest = min(self.rungs, default=min(map(int, plan.rungs)))
        one, data = plan.rungs[str(lowest)], data_names(self.study.arms[plan.base].recipe.get("data", plan.data))
        since = (
            "an old one: the defaults have changed since" if self.today else "in a file or with flags that are no more"
        )
        old = f" **Its baseline is {since}.**" if self.old else ""
        if self.aside:
            old += " **Flags of its command change the baseline, so no idea's file has these verdicts.**"
        return (
            f"Baseline `{plan.base}` on `{data}` (text {plan.text}); {'the lowest rung' if plan.ladder else 'it'} "
            f"is {self.size(lowest)}{one.steps:,} steps of {one.batch_tokens:,} tokens. Registered "
            f"{plan.facts['registered']}: {plan.metric}; δ {plan.delta:g}, α {plan.alpha:g} over "
            f"{counted(len(self.study.ideas), 'idea')}, at most {plan.most_pairs} pairs. Trained on: "
            f"{'; '.join(sorted(machines))}.{old}"
        )

    def size(self, rung: int) -> str:
        """The baseline's size on a rung, as text that goes on; "" for a comparison at a size that is another today."""
        one = self.study.plan.rungs[str(rung)]
        found = (one.depth, one.width, one.vocab_size, one.context)
        if not self.study.plan.ladder:
            if self.old:
                return ""
            own = self.today[rung][1]
            found = (own.depth, own.model.width, own.text.vocab_size, own.model.context)
        return "{}x{}, vocabulary {:,}, context {:,}, ".format(*found)

    def place(self, rung: int) -> str:
        """Where a verdict was found, as text."""
        size, steps = self.size(rung).partition(",")[0], self.study.plan.rungs[str(rung)].steps
        return f"on rung {rung}" if self.study.plan.ladder else f"at {size or 'one size'}, {steps:,} steps"

    def counts(self) -> str:
        """How many ideas are decided on each rung, and how many of the decided ones are as their files expect."""
        decided = list[str]()
        for rung in self.rungs:
            said = [row.findings[rung].verdict for row in self.rows if rung in row.judged]
            decided.append(f"{len(said) - said.count('undecided')} of {len(said)} ideas {self.place(rung)}")
        agree = [agreement(self.about(row.idea), row) for row in self.rows]
        yes, all_ = agree.count("yes"), agree.count("yes") + agree.count("no")
        parts = [f"Decided: {', '.join(decided)}."] if decided else []
        parts += [f"As their files expect: {yes} of {all_}."] if all_ else []
        for rung in self.rungs if self.answers else ():
            known = known_answers(judged(self.study, rung), self.answers)
            parts += [f"Rung {rung}: {usable(known)}."] if any(row[-1] in ("right", "wrong") for row in known) else []
        return " ".join(parts)

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
            _, trend = row.course or ("", "")
            body.append([row.idea, *cells, _multiplier(row), trend, about.direction or "", agreement(about, row)])
        return [self.setup() + "\n", self.counts() + "\n", *table(head, body)]

    def verdicts(self) -> dict[str, list[Verdict]]:
        """The verdict on each idea by rung, once it is judged there. That on the highest rung tells the multiplier and
        the trend. There is none against a baseline that flags have changed: an idea's file compares with today's."""
        name, plan, found = self.study.name, self.study.plan, dict[str, list[Verdict]]()
        for row in () if self.aside else self.rows:
            for rung in row.judged or row.findings:
                one, top = row.findings[rung], rung == max(row.judged, default=-1)
                short = f"{one.verdict} {self.place(rung)}"
                text = f"{short} ({signed(one.difference)} bits per byte, {counted(one.pairs, 'pair')})"
                if top and rung in row.flops:
                    text, short = f"{text}; multiplier {_multiplier(row)}", f"{short}, {_multiplier(row)}"
                if top and row.course:
                    _, trend = row.course
                    text += f", {trend}"
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
    """yes, no or open: whether the verdict on the highest judged rung is the expected one; "" if none is expected."""
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
