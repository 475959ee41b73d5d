"""The page of a sweep: the best trials, importances, edges and the figure of pairs, from its records."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from quern.lab.log.page import HEADER, Page, machine_line, repeat, table
from quern.lab.verdict import score
from quern.records import read_json, read_lines

RESULTS, TRIALS, FIGURE = "results.json", "sweep.jsonl", "pairs.svg"
FILES = (RESULTS, TRIALS, FIGURE)
SHOWN_TRIALS, SHOWN_FIELDS = 10, 6


def read(folder: Path) -> Page:
    """The page of the sweep in a folder of records."""
    facts: dict[str, Any] = read_json(folder / RESULTS, dict[str, Any])
    name, figure = folder.name, f"{folder.name}-pairs.svg"
    summary, best = _summary(facts), _best(facts)
    lines = [
        f"# {name}\n",
        f"{summary} {machine_line(facts['facts'])}\n",
        f"{best}\n",
        f"![Each of the most important fields against the bits per byte, and against each other]({figure})\n",
        "## The best trials\n",
        *_trials(facts, list(read_lines(folder / TRIALS))),
        "",
        "## Importances\n",
        "How much each field decides whether a trial is among the best tenth (PED-ANOVA, arXiv 2304.10255).\n",
        *table(("field", "importance"), [(_flag(field), f"{share:.1%}") for field, share in _important(facts)]),
        "",
        *(f"- {line}" for line in facts["edges"]),
        "",
        *repeat(facts["facts"]),
    ]
    files = {f"{name}.md": HEADER + "\n".join(lines), figure: (folder / FIGURE).read_text(encoding="utf-8")}
    return Page(name, facts["facts"]["registered"], [f"{summary} {best}"], files)


def _summary(facts: dict[str, Any]) -> str:
    plan, recipe = facts["plan"], facts["plan"]["recipe"]
    outcomes = ", ".join(f"{count:,} {outcome}" for outcome, count in facts["outcomes"].items())
    return (
        f"A sweep of {len(plan['space'])} fields of `{recipe['name']}`, depth {recipe['depth']}, on `{recipe['data']}`"
        f": {facts['trials']:,} trials ({outcomes}) of {len(plan['seeds'])} seeds each."
    )


def _best(facts: dict[str, Any]) -> str:
    change = facts["against_baseline"]
    best = f"The best trial has {facts['best']['bpb']:.4f} bits per byte"
    if change is None:
        return f"{best}."
    error = f" ± {change['standard_error']:.4f}" if "standard_error" in change else ""
    return f"{best}, {change['bpb']:+.4f}{error} against the recipe's own values; it is selected, so this is too good."


def _important(facts: dict[str, Any]) -> list[tuple[str, float]]:
    return sorted(facts["importances"].items(), key=lambda entry: -entry[1])


def _trials(facts: dict[str, Any], trials: list[dict[str, Any]]) -> list[str]:
    names = [name for name, _ in _important(facts)][:SHOWN_FIELDS] or list(facts["plan"]["space"])[:SHOWN_FIELDS]
    whole = [trial for trial in trials if trial["bpb"] is not None and trial["outcome"] in ("finished", "diverged")]
    rows = []
    for trial in sorted(whole, key=lambda one: one["bpb"])[:SHOWN_TRIALS]:
        scores = [score(run["bpb"]) for run in trial["runs"]]
        spread = f"{statistics.stdev(scores):.4f}" if len(scores) > 1 else ""
        label = f"{trial['trial']}{' (baseline)' if trial['baseline'] else ''}"
        rows.append((label, f"{trial['bpb']:.4f}", spread, *(_value(trial["values"][name]) for name in names)))
    return table(("trial", "bits per byte", "SD", *map(_flag, names)), rows)


def _flag(field: str) -> str:
    return field.replace("_", "-")


def _value(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
