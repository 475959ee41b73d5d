"""The page of a comparison, its section of the log, and its verdicts for the ideas' files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from quern.lab.idea import Idea, read_idea
from quern.lab.log.figures import curves, intervals
from quern.lab.log.page import HEADER, Page, machine_line, repeat, table
from quern.lab.results import HEAD, UNCHANGED, UNDECIDED, Result, all_results
from quern.lab.study import TRIALS, Study, read_study
from quern.terminal import counted

FILES = ("study.json", TRIALS)
FIGURES_OF_A_STUDY = 12
"""A study with more ideas has no curves of single ones."""


def read(folder: Path) -> Page:
    """The page of the comparison in a folder of records."""
    return page(read_study(folder))


def page(study: Study) -> Page:
    """The page of a comparison, with its figures."""
    registered, results = study.registration, all_results(study)
    files = {}
    for axis in registered.axes:
        if len(registered.ideas) > 1:
            files[f"{study.name}-{axis}.svg"] = intervals(results, registered.delta, axis)
    if len(registered.ideas) <= FIGURES_OF_A_STUDY:
        for idea in registered.ideas:
            files[f"{study.name}-{idea}.svg"] = curves(study, idea)
    files[f"{study.name}.md"] = study_page(study, results)
    verdicts = {}
    for idea in registered.ideas:
        own = [one for one in results if one.idea == idea]
        if own:
            verdicts[idea] = _verdict_line(study, own), ", ".join(f"{one.axis}: {one.verdict}" for one in own)
    return Page(study.name, study.facts["registered"], log_section(study, results), files, verdicts)


def log_section(study: Study, results: Sequence[Result]) -> list[str]:
    """The study's section of experiments/LOG.md: a row for each idea."""
    registered = study.registration
    lines = [
        _setup(study) + "\n",
        "| idea | " + " | ".join(f"equal {axis}" for axis in registered.axes) + " | published | agrees |",
        "|---" * (len(registered.axes) + 3) + "|",
    ]
    for idea in registered.ideas:
        own = {one.axis: one for one in results if one.idea == idea}
        cells = [_cell(own.get(axis)) for axis in registered.axes]
        about = _about(study, idea)
        agrees = agreement(about, own.get("steps"))
        lines.append(f"| {idea} | {' | '.join(cells)} | {about.direction or ''} | {agrees} |")
    return lines


def study_page(study: Study, results: Sequence[Result]) -> str:
    """One page: hypothesis, setup, tables on the axes, figures, agreement, how to repeat."""
    registered = study.registration
    lines = [f"# {study.name}\n", _setup(study) + "\n"]
    for axis in registered.axes:
        lines += [f"## Equal {axis}\n"]
        if len(registered.ideas) > 1:
            lines += [f"![Intervals of all ideas at equal {axis}]({study.name}-{axis}.svg)\n"]
        lines += [
            *table(HEAD, [one.cells() for one in results if one.axis == axis]),
            "",
        ]
    lines += ["## The ideas\n"]
    for idea in registered.ideas:
        about, own = _about(study, idea), {one.axis: one for one in results if one.idea == idea}
        lines += [f"### {idea}\n", f"{about.title}\n"]
        parts = {"Hypothesis": about.hypothesis, "Source": about.source, "Expected effect": about.expected}
        lines += [*(f"- **{name}**: {text}" for name, text in parts.items() if text)]
        lines += [f"- **Agreement with the source**: {agreement(about, own.get('steps')) or 'no prediction'}"]
        lines += [f"- **Outliers**: {text}" for text in _outliers(own.values())]
        if len(registered.ideas) <= FIGURES_OF_A_STUDY:
            lines += ["", f"![{idea} minus {registered.base}]({study.name}-{idea}.svg)"]
        lines.append("")
    return HEADER + "\n".join([*lines, *repeat(study.facts)])


def agreement(about: Idea, result: Result | None) -> str:
    """yes, no or open: whether the verdict at equal steps is what the source predicts; "" without a prediction."""
    if about.direction is None or result is None:
        return ""
    return "open" if result.verdict in (UNDECIDED, UNCHANGED) else "yes" if result.verdict == about.direction else "no"


def _setup(study: Study) -> str:
    registered = study.registration
    recipe = registered.recipes[registered.base]
    tokens = recipe["train"]["batch_tokens"]
    return (
        f"Baseline `{registered.base}`: depth {recipe['depth']}, {registered.steps:,} steps of {tokens:,} tokens on "
        f"`{recipe['data']}` (text {registered.text}). Registered {study.facts['registered']}: {registered.metric}; "
        f"margin ±{registered.delta:g}, α {registered.alpha:g} over {len(registered.ideas)} ideas, "
        f"τ² {registered.tau2:g}, at most {registered.most_pairs} pairs, which find "
        f"{registered.detectable_sd:g} standard deviations of the pairs' differences with a probability of 80 %. "
        f"Times of a step that differ by at most {registered.same_time:.0%} count as equal. "
        f"Noise of the baseline over seeds: {_noise(study)}. "
        f"{machine_line(study.facts)}"
    )


def _noise(study: Study) -> str:
    registered = study.registration
    scores = [
        trial.bpb
        for pair in range(registered.most_pairs)
        if (trial := study.find(registered.base, pair, registered.steps)) and trial.bpb is not None
    ]
    if len(scores) < 2:
        return "not measured"
    mean = sum(scores) / len(scores)
    deviation = (sum((score - mean) ** 2 for score in scores) / (len(scores) - 1)) ** 0.5
    return f"{mean:.4f} ± {deviation:.4f} bits per byte (standard deviation of {len(scores)})"


def _about(study: Study, idea: str) -> Idea:
    source = study.registration.sources.get(idea)
    return read_idea(source) if source else Idea(f"The recipe `{idea}`.")


def _cell(result: Result | None) -> str:
    if result is None:
        return "not measured"
    return f"{result.verdict}, {result.paired.mean:+.4f}"


def _verdict_line(study: Study, results: Sequence[Result]) -> str:
    parts = [
        f"{one.verdict} at equal {one.axis} ({one.paired.mean:+.4f} bits per byte, {_pairs(one.paired.n)})"
        for one in results
    ]
    return f"{'; '.join(parts)}. Study {study.name}."


def _pairs(count: int) -> str:
    return counted(count, "pair")


def _outliers(results: Iterable[Result]) -> list[str]:
    return [
        f"equal {one.axis}: pairs {', '.join(str(one.pairs[at] + 1) for at in one.paired.outliers)}"
        for one in results
        if one.paired.outliers
    ]
