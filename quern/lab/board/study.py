"""A study as the board shows it: its trials as curves, its verdicts and its arms as tables."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, stdev
from typing import Any

from quern.lab.board.curve import Curve
from quern.lab.board.entry import Entry, TrialCurve
from quern.lab.board.kept_file import KeptFile, flatten, is_number, modified

KINDS = {"trials.jsonl": "study.json", "cells.jsonl": "plan.json", "sweep.jsonl": "results.json"}
"""The trials of a comparison, an IsoFLOP study and a sweep, and the file that says what each of them is."""


def find_studies(out: Path) -> dict[str, Path]:
    """The folders of studies by name."""
    return {path.parent.name: path.parent for trials in KINDS for path in out.glob(f"lab/*/{trials}")}


class Study:
    """A study: its trials, read as the file grows, and its verdicts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        trials = next((name for name in KINDS if (folder / name).exists()), "trials.jsonl")
        self._study, self._verdicts = KeptFile(folder / KINDS[trials]), KeptFile(folder / "verdicts.json")
        self._trials, self._arms = Curve(folder / trials, whole=True), KeptFile(folder / "arms.jsonl")
        self._identity = 0
        self._recipes: dict[str, Any] = {}
        self.entries: dict[str, Entry] = {}
        self.registered: dict[str, Any] = {}

    def refresh(self, now: float) -> None:
        if self._study.changed():
            self.registered = self._study.json()
        self._trials.refresh()
        if self._trials.identity != self._identity:
            self.entries, self._identity = {}, self._trials.identity
        age = max(0.0, now - modified(self._trials.path))
        if self._arms.changed():
            self._recipes = {str(arm.get("arm")): arm.get("recipe") for arm in self._arms.lines()}
        for number, trial in enumerate(run for _, line in self._trials.rows for run in _runs(line)):
            if str(number) not in self.entries:
                self.entries[str(number)] = _trial(trial, self._recipes)
            self.entries[str(number)].age = age

    def tables(self) -> dict[str, Any]:
        """The registered rules, the verdicts, and the mean final score of each arm."""
        arms: dict[str, list[Any]] = {}
        for entry in self.entries.values():
            arms.setdefault(f"{entry.name}\n{entry.steps}", []).append(entry)
        shown = {k: v for k, v in self.registered.items() if k not in ("recipe", "rungs", "plan")}
        return {
            "registered": flatten(shown),
            "verdicts": [_verdict(row) for row in self._verdicts.rows()],
            "arms": [_arm(entries) for entries in arms.values()],
        }


def _runs(line: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs of a line: one, or those of a sweep's trial. Each is named by its arm, its size or its trial."""
    runs = line.get("runs")
    if isinstance(runs, list):
        return [{**run, "recipe": f"trial {line.get('trial')}"} for run in runs if isinstance(run, dict)]
    if "budget" in line:
        return [{**line, "recipe": f"{line.get('size')} at {line.get('budget'):.3g} FLOPs"}]
    return [line]


def _trial(trial: dict[str, Any], recipes: dict[str, Any]) -> Entry:
    arm = str(trial.get("recipe", ""))
    entry = Entry(arm, f"seed {trial.get('seed')}", TrialCurve(trial))
    entry.steps = trial.get("steps")
    entry.status = "diverged" if trial.get("bpb") is None else "finished"
    recipe = recipes.get(arm)
    entry.recipe = flatten(recipe) if isinstance(recipe, dict) else {}
    entry.recipe |= {k: trial[k] for k in ("seed", "data_seed", "pair", "rung", "value") if k in trial}
    entry.recipe |= {"arm": arm, "train.steps": trial.get("steps")}
    return entry


def _arm(entries: list[Entry]) -> dict[str, Any]:
    lasts = [entry.curve.last for entry in entries]
    scores = [float(last["val_bpb"]) for last in lasts if is_number(last.get("val_bpb"))]
    rates = [float(last["tokens_per_second"]) for last in lasts if is_number(last.get("tokens_per_second"))]
    return {
        "arm": entries[0].name,
        "steps": entries[0].steps,
        "n": len(lasts),
        "diverged": len(lasts) - len(scores),
        "mean": mean(scores) if scores else None,
        "sd": stdev(scores) if len(scores) > 1 else None,
        "tokens_per_second": mean(rates) if rates else None,
    }


def _verdict(row: dict[str, Any]) -> dict[str, Any]:
    """A row of verdicts.json; the evidence may be in the row or in its `paired`. Every field may be missing."""
    paired = row.get("paired")
    row = {**(paired if isinstance(paired, dict) else {}), **row}
    if isinstance(row.get("interval"), list) and len(row["interval"]) == 2:
        row["low"], row["high"] = row["interval"]
    return {name: row.get(name) for name in ("idea", "axis", "n", "mean", "low", "high", "verdict")}
