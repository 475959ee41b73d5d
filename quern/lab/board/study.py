"""A study as the board shows it: its trials as curves, its verdicts and its arms as tables."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, stdev
from typing import Any

from quern.lab.board.curve import Curve
from quern.lab.board.entry import Entry, TrialCurve
from quern.lab.board.kept_file import KeptFile, flatten, is_number, modified


class Study:
    """A study: its trials, read as the file grows, and its verdicts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._study, self._verdicts = KeptFile(folder / "study.json"), KeptFile(folder / "verdicts.json")
        self._trials = Curve(folder / "trials.jsonl", whole=True)
        self._identity = 0
        self.entries: dict[str, Entry] = {}
        self.registered: dict[str, Any] = {}

    def refresh(self, now: float) -> None:
        if self._study.changed():
            self.registered = self._study.json()
        self._trials.refresh()
        if self._trials.identity != self._identity:
            self.entries, self._identity = {}, self._trials.identity
        age = max(0.0, now - modified(self._trials.path))
        recipes = self.registered.get("recipes")
        for number, (_, trial) in enumerate(self._trials.rows):
            if str(number) not in self.entries:
                self.entries[str(number)] = _trial(trial, recipes if isinstance(recipes, dict) else {})
            self.entries[str(number)].age = age

    def tables(self) -> dict[str, Any]:
        """What was registered, the verdicts, and the mean final score of each arm."""
        arms: dict[str, list[Any]] = {}
        for entry in self.entries.values():
            arms.setdefault(f"{entry.name}\n{entry.steps}", []).append(entry)
        shown = {k: v for k, v in self.registered.items() if k not in ("recipes", "sources")}
        return {
            "registered": flatten(shown),
            "verdicts": [_verdict(row) for row in self._verdicts.rows()],
            "arms": [_arm(entries) for entries in arms.values()],
        }


def _trial(trial: dict[str, Any], recipes: dict[str, Any]) -> Entry:
    arm = str(trial.get("recipe", ""))
    entry = Entry(arm, f"seed {trial.get('seed')}", TrialCurve(trial))
    entry.steps = trial.get("steps")
    entry.status = "diverged" if trial.get("bpb") is None else "finished"
    recipe = recipes.get(arm)
    entry.recipe = flatten(recipe) if isinstance(recipe, dict) else {}
    entry.recipe |= {k: trial[k] for k in ("seed", "data_seed", "pair") if k in trial}
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
    return {name: row.get(name) for name in ("idea", "axis", "n", "mean", "low", "high", "e_value", "verdict")}
