"""The curves of the board: a stage of a run, with its recipe and status, or a trial of a study; a study's tables."""

from __future__ import annotations

from bisect import bisect_left
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

from quern.lab.board.curve import Curve, KeptFile, is_number
from quern.records import EVENTS, METRICS, objects
from quern.runs.origin import flat

STUCK_SECONDS, STUCK_GAPS = 120, 10
"""A run is stuck after this long without a line, and this many times the usual time between two lines."""
FIRST_LINE_SECONDS = 900
"""Allowed before the first line: data is prepared and the model is compiled."""
ENDS = {"finish": "finished", "stop": "stopped", "start": "running", "resume": "running"}


class Entry:
    """One curve of the board: a stage of a run, or a trial of a study."""

    def __init__(self, name: str, stage: str, curve: Curve) -> None:
        self.name, self.stage, self.curve = name, stage, curve
        self.recipe: dict[str, Any] = {}
        self.status, self.reason, self.age = "running", "", 0.0
        self.steps: int | None = None

    def points(self, x: str, y: str, after: int) -> tuple[list[float], list[float]]:
        """The values of y over x in the lines after an offset."""
        rows = self.curve.rows
        first = bisect_left(rows, after + 1, key=lambda row: row[0])
        found = [fields for _, fields in rows[first:] if is_number(fields.get(y))]
        xs = [fields.get("step") for fields in found] if x == "steps" else self._along(x, found)
        pairs: list[Any] = [(at, fields[y]) for at, fields in zip(xs, found, strict=True) if is_number(at)]
        return [at for at, _ in pairs], [value for _, value in pairs]

    def _along(self, x: str, rows: list[dict[str, Any]]) -> list[Any]:
        """The x of each row. A line of a validation has tokens only: the rest is interpolated between other lines, and
        has the mean rate after the last one."""
        if all(x in fields for fields in rows):
            return [fields[x] for fields in rows]
        pairs = ((fields.get("tokens"), fields.get(x)) for _, fields in self.curve.rows)
        tokens_N, values_N = np.array([(0, 0), *(pair for pair in pairs if all(map(is_number, pair)))], float).T
        last, rate = tokens_N[-1], values_N[-1] / max(tokens_N[-1], 1)

        def at(own: Any) -> float | None:
            if not is_number(own) or not last:
                return None
            return float(rate * own if own >= last else np.interp(own, tokens_N, values_N))

        return [fields[x] if x in fields else at(fields.get("tokens")) for fields in rows]


class Run(Entry):
    """A stage of a run."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder.parent.name, folder.name, Curve(folder / METRICS))
        self.folder = folder
        self._events, self._recipe, self._metrics = map(
            KeptFile, (folder / EVENTS, folder / "recipe.json", folder / METRICS)
        )
        self._end = "running"

    def refresh(self, points: int, now: float) -> None:
        """Reads what has changed. now: seconds since the epoch."""
        if self._recipe.changed():
            self.recipe = flat(self._recipe.json({}))
        self.curve.refresh(points)
        if self._events.changed():
            events = self._events.lines()
            last = next((e for e in reversed(events) if str(e.get("kind")) in ENDS), {"kind": "start"})
            planned = next((e["steps"] for e in reversed(events) if is_number(e.get("steps"))), None)
            self.steps, self.reason = planned or self.recipe.get("train.steps"), str(last.get("reason", ""))
            self._end = ENDS[last["kind"]]
            self.status = "diverged" if "not finite" in self.reason else self._end
        self._metrics.changed()
        written = max(self._metrics.modified, self._events.modified)
        self.age = max(0.0, now - written) if written else 0.0
        if self._end == "running":
            self.status = "stuck" if self.age > self._patience() else "running"
            self.reason = "no line for long: the run waits, or its process was killed" if self.status == "stuck" else ""

    def _patience(self) -> float:
        times = [f["seconds"] for _, f in self.curve.rows[-12:] if is_number(f.get("seconds"))]
        if not self.curve.rows:
            return FIRST_LINE_SECONDS
        return max(STUCK_SECONDS, STUCK_GAPS * (times[-1] - times[-2]) if len(times) > 1 else 0)


KINDS = {"trials.jsonl": "study.json", "cells.jsonl": "plan.json", "sweep.jsonl": "results.json"}
"""The trials of a comparison, an IsoFLOP study and a sweep, and the file that says what each of them is."""


def find_studies(out: Path) -> dict[str, Path]:
    """The folders of studies by name."""
    return {path.parent.name: path.parent for trials in KINDS for path in out.glob(f"lab/*/{trials}")}


class Study:
    """A study: its trials, read again as the file grows, and its verdicts."""

    def __init__(self, folder: Path) -> None:
        trials = next((name for name in KINDS if (folder / name).exists()), "trials.jsonl")
        names = (KINDS[trials], "verdicts.json", trials, "arms.jsonl")
        self._study, self._verdicts, self._trials, self._arms = (KeptFile(folder / name) for name in names)
        self.entries: dict[str, Entry] = {}
        self.registered: dict[str, Any] = {}

    def refresh(self, now: float) -> None:
        if self._study.changed():
            self.registered = self._study.json({})
        if self._trials.changed():
            recipes = {str(arm.get("arm")): arm.get("recipe") for arm in self._arms.lines()}
            trials = (run for line in self._trials.lines() for run in _runs(line))
            self.entries = {str(number): _trial(trial, recipes) for number, trial in enumerate(trials)}
        for entry in self.entries.values():
            entry.age = max(0.0, now - self._trials.modified)

    @property
    def kind(self) -> str:
        """The kind of study, for readers."""
        rungs = self.registered.get("rungs")
        several = isinstance(rungs, dict) and len(rungs) > 1
        named = {"cells.jsonl": "IsoFLOP grid", "sweep.jsonl": "Sweep"}
        return named.get(self._trials.path.name, "Ladder" if several else "Study")

    def tables(self) -> dict[str, Any]:
        """The registered rules, the verdicts, and the mean final score of each arm."""
        arms: dict[tuple[str, int | None], list[Entry]] = {}
        for entry in self.entries.values():
            arms.setdefault((entry.name, entry.steps), []).append(entry)
        shown = {k: v for k, v in self.registered.items() if k not in ("recipe", "rungs", "plan")}
        return {
            "registered": flat(shown),
            "verdicts": [_verdict(row) for row in objects(self._verdicts.json([]))],
            "arms": [_arm(entries) for entries in arms.values()],
        }


def _runs(line: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs of a line: one, or those of a sweep's trial. Each is named by its arm, its size or its trial."""
    if "runs" in line:
        return [{**run, "recipe": f"trial {line.get('trial')}"} for run in objects(line["runs"])]
    if is_number(budget := line.get("budget")):
        return [{**line, "recipe": f"{line.get('size')} at {budget:.3g} FLOPs"}]
    return [line]


def _trial(trial: dict[str, Any], recipes: dict[str, Any]) -> Entry:
    """A finished trial; the lines of its curve are its validations."""
    arm, recipe, curve = str(trial.get("recipe", "")), recipes.get(str(trial.get("recipe", ""))), Curve(Path())
    points = objects(trial.get("curve"))
    curve.rows = [(number, point | {"val_bpb": point.pop("bpb", None)}) for number, point in enumerate(points, 1)]
    curve.end, curve.identity = len(points), 1
    names = ("tokens", "flops", "seconds", "tokens_per_second", "peak_bytes")
    curve.last = {name: trial[name] for name in names if name in trial}
    curve.last |= {"step": trial.get("steps"), "val_bpb": trial.get("bpb")}
    entry = Entry(arm, f"seed {trial.get('seed')}", curve)
    entry.status = "diverged" if trial.get("bpb") is None else "finished"
    entry.steps = steps if is_number(steps := trial.get("steps")) else None
    entry.recipe = flat(recipe) if isinstance(recipe, dict) else {}
    entry.recipe |= {k: trial[k] for k in ("seed", "data_seed", "pair", "rung", "value") if k in trial}
    entry.recipe |= {"arm": arm, "train.steps": entry.steps}
    return entry


def _arm(entries: list[Entry]) -> dict[str, Any]:
    def values(name: str) -> list[float]:
        return [entry.curve.last[name] for entry in entries if is_number(entry.curve.last.get(name))]

    scores, rates = values("val_bpb"), values("tokens_per_second")
    return {
        "arm": entries[0].name,
        "steps": entries[0].steps,
        "n": len(entries),
        "diverged": len(entries) - len(scores),
        "mean": mean(scores) if scores else None,
        "sd": stdev(scores) if len(scores) > 1 else None,
        "tokens_per_second": mean(rates) if rates else None,
    }


def _verdict(row: dict[str, Any]) -> dict[str, Any]:
    """A row of verdicts.json. Every field may be missing."""
    if isinstance(row.get("interval"), list) and len(row["interval"]) == 2:
        row["low"], row["high"] = row["interval"]
    return {name: row.get(name) for name in ("idea", "axis", "n", "mean", "low", "high", "verdict")}
