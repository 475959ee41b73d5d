"""The page of a comparison, at one size or on the ladder, its section of the log, and its verdicts for the files."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from quern.flags.recipe_flags import parse
from quern.lab.idea import Idea, read_idea
from quern.lab.ladder.multiplier import told
from quern.lab.ladder.report import Row, interval, judgements_of, rows, study_tables
from quern.lab.ladder.rungs import at_rung, numbers
from quern.lab.ladder.study import FILES, Comparison
from quern.lab.log.figures import intervals, multipliers
from quern.lab.log.page import HEADER, Page, repeat, table
from quern.lab.options import CompareOptions
from quern.recipes import load_recipe
from quern.terminal import counted

__all__ = ["FILES", "read"]
OLD = "old baseline: "


def read(folder: Path) -> Page:
    """The page of the comparison in a folder of records."""
    return _Told(Comparison(folder)).page()


@dataclass(frozen=True)
class _Told:
    """Renders the page of a study from its records."""

    study: Comparison

    @cached_property
    def rows(self) -> list[Row]:
        return rows(self.study)

    @cached_property
    def rungs(self) -> list[int]:
        return list(judgements_of(self.study))

    @cached_property
    def old(self) -> bool:
        """Whether the baseline's resolved numbers are others today."""
        plan = self.study.plan
        words = shlex.split(plan.facts["command"])[3:]
        flags = words[next((at for at, word in enumerate(words) if word.startswith("-")), len(words)) :]
        file = self.study.folder.parents[2] / words[0]  # of the project that has experiments/records/STUDY
        try:
            base = load_recipe(str(file) if file.is_file() else words[0])[0]
            recipe = parse(CompareOptions, base, flags, verb="lab compare").recipe
            return any(numbers(at_rung(recipe, plan.rungs[str(r)])) != plan.numbers[str(r)] for r in self.rungs)
        except (ValueError, IndexError):  # a flag or a recipe that is no more
            return True

    def page(self) -> Page:
        name, plan = self.study.name, self.study.plan
        files: dict[str, str] = {}
        lines = [f"# {name}\n", self.setup() + "\n"]
        if any(row.flops for row in self.rows):
            files[f"{name}-multipliers.svg"] = multipliers(self.rows)
            lines += [f"![Compute multipliers over the baseline's FLOPs]({name}-multipliers.svg)\n"]
        for title, told_, head, body in study_tables(self.study):
            lines += [f"## {title}\n", *(f"{line}\n" for line in told_), *table(head, body), ""]
        for rung in self.rungs:
            files[f"{name}-{rung}.svg"] = intervals({row.idea: row.findings[rung] for row in self.on(rung)}, plan.delta)
            lines += [f"![Intervals of all ideas on rung {rung}]({name}-{rung}.svg)\n"]
        lines += ["## The ideas\n"]
        for row in self.rows:
            about = self.about(row.idea)
            parts = {"Hypothesis": about.hypothesis, "Source": about.source, "Expected": about.expected}
            parts |= {"Published": about.published, "As expected": agreement(about, row)}
            lines += [f"### {row.idea}\n", f"{about.title}\n"]
            lines += [*(f"- **{part}**: {text}" for part, text in parts.items() if text), ""]
        files[f"{name}.md"] = HEADER + "\n".join([*lines, *repeat(plan.facts)])
        return Page(name, plan.facts["registered"], self.section(), files, self.verdicts())

    def on(self, rung: int) -> list[Row]:
        return [row for row in self.rows if rung in row.findings]

    def setup(self) -> str:
        """One paragraph: what was compared with what."""
        plan = self.study.plan
        first = plan.rungs[str(min(self.rungs, default=min(map(int, plan.rungs))))]
        size = "" if first.width is None else f"{first.depth}x{first.width}, vocabulary {first.vocab_size:,}, context "
        size += "" if first.width is None else f"{first.context:,}, "
        old = " **Its baseline is an old one: the defaults have changed since.**" if self.old else ""
        return (
            f"Baseline `{plan.base}` on `{plan.data}` (text {plan.text}); the lowest rung is {size}{first.steps:,} "
            f"steps of {first.batch_tokens:,} tokens. Registered {plan.facts['registered']}: {plan.metric}; "
            f"δ {plan.delta:g}, α {plan.alpha:g} over {counted(len(self.study.ideas), 'idea')}, at most "
            f"{plan.most_pairs} pairs. "
            f"Trained on: {'; '.join(sorted(self.machines()))}.{old}"
        )

    def machines(self) -> set[str]:
        return {one.machine for runs in self.study.trials.values() for one in runs.values() if one.machine}

    def section(self) -> list[str]:
        """The study's section of experiments/LOG.md: a row for each idea, the largest multiplier first."""
        head = ["idea", *(f"rung {rung}" for rung in self.rungs), "multiplier", "trend", "expected", "as expected"]
        body = [
            [
                row.idea,
                *(_finding(row, rung) for rung in self.rungs),
                _multiplier(row),
                "" if row.course is None else row.course.trend,
                self.about(row.idea).direction or "",
                agreement(self.about(row.idea), row),
            ]
            for row in self.rows
        ]
        return [self.setup() + "\n", *table(head, body)]

    def verdicts(self) -> dict[str, tuple[str, str]]:
        """By idea, the text for its docstring and the cell of the index."""
        mark = OLD if self.old else ""
        found: dict[str, tuple[str, str]] = {}
        for row in self.rows:
            parts = [
                f"{one.verdict} on rung {rung} ({one.difference:+.4f} bits per byte, {counted(one.pairs, 'pair')})"
                for rung, one in row.findings.items()
            ]
            if not parts:
                continue
            more = f"; multiplier {_multiplier(row)}" if row.flops else ""
            more += f", {row.course.trend}" if row.course else ""
            top = max(row.findings)
            short = f"{mark}{row.findings[top].verdict} on rung {top}{', ' + _multiplier(row) if row.flops else ''}"
            found[row.idea] = f"{mark}{'; '.join(parts)}{more}. Study {self.study.name}.", short
        return found

    def about(self, idea: str) -> Idea:
        source = self.study.arms[idea].source
        return read_idea(source) if source else Idea(f"The recipe `{idea}`.")


def _finding(row: Row, rung: int) -> str:
    one = row.findings.get(rung)
    return "" if one is None else f"{one.verdict}, {one.difference:+.4f} {interval(one)}"


def _multiplier(row: Row) -> str:
    return f"× {told(row.flops[max(row.flops)])}" if row.flops else ""


def agreement(about: Idea, row: Row) -> str:
    """yes, no or open: whether the verdict on the highest rung is the expected one; "" without an expectation."""
    if about.direction is None or not row.findings:
        return ""
    verdict = row.findings[max(row.findings)].verdict.partition(",")[0]
    return "open" if verdict in ("undecided", "fails") else "yes" if verdict == about.direction else "no"
