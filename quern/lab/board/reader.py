"""Reads what the board shows, from files alone: the stages of runs, the trials and verdicts of studies, their curves.

out/runs/RUN/STAGE/  recipe.json metrics.jsonl events.jsonl      out/lab/STUDY/  study.json trials.jsonl verdicts.json

Every answer is JSON. A name in a request is looked up among the entries that were found; it never becomes a path.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from quern.lab.board.curve import is_number
from quern.lab.board.entry import Entry, Run, Study, find_studies
from quern.records import METRICS, read_regular
from quern.runs import manage
from quern.runs.run_dir import STAGES, RunDir
from quern.train.metrics import CURVES, RL_CURVES

REPORT = "report.html"
OVERVIEW_POINTS, MOST_POINTS = 32, 2000
"""Lines sampled from each run before any curve is asked for, and at most."""
AXES = ("steps", "tokens", "flops", "seconds")
LABELS = {curve.key: [f"{curve.title}, {curve.unit}", curve.share] for curve in (*RL_CURVES, *CURVES)}
"""Metric → its name for readers, and whether it is a share."""


class NotFound(Exception):
    """A request names something that is not there."""


class Board:
    """The answers of the server. Several threads may ask. out: the output folder."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self._lock = threading.Lock()
        self._runs: dict[str, Run] = {}
        self._studies: dict[str, Study] = {}

    def listing(self, study: str | None = None) -> dict[str, Any]:
        """All runs, or all trials of a study, with status and last values. Raises NotFound."""
        with self._lock:
            self._scan()
            entries = self._entries(study)
            constant = _constant([entry.recipe for entry in entries.values()])
            body = {
                "folder": str(self.out),
                "studies": sorted(self._studies),
                "kinds": {name: study.kind for name, study in self._studies.items()},
                "metrics": _metrics(entries.values()),
                "labels": LABELS,
                "constant": constant,
                "runs": [_shown(name, entry, constant) for name, entry in entries.items()],
            }
            return body | (self._studies[study].tables() if study is not None else {})

    def curves(self, request: dict[str, Any]) -> dict[str, Any]:
        """The points of some entries that the page does not have yet."""
        x, y, asked, points = (request.get(name) for name in ("x", "y", "runs", "points"))
        if x not in AXES or not isinstance(y, str) or not isinstance(asked, dict) or not isinstance(points, int):
            raise ValueError(f"send x (one of {', '.join(AXES)}), y, points and runs")
        points = min(max(points, 2), MOST_POINTS)
        found: dict[str, Any] = {}
        with self._lock:
            entries, now = self._entries(request.get("study")), time.time()
            for name, known in asked.items():
                entry = entries.get(name)
                if entry is None or not (isinstance(known, list) and len(known) == 2 and all(map(is_number, known))):
                    continue
                if isinstance(entry, Run):
                    entry.refresh(points, now)
                fresh = known[0] != entry.curve.identity
                xs, ys = entry.points(x, y, 0 if fresh else int(known[1]))
                at = [entry.curve.identity, entry.curve.end]
                if fresh or at != known:
                    found[name] = {"at": at, "fresh": fresh, "x": xs, "y": ys}
        return {"runs": found}

    def report(self, run: str) -> bytes:
        """The page of a run's report. Raises NotFound."""
        with self._lock:
            self._scan()
            folder = next((entry.folder.parent for entry in self._runs.values() if entry.name == run), None)
        if folder is None or not (folder / REPORT).exists():
            raise NotFound("there is no such report: `quern report` writes it")
        return read_regular(folder / REPORT)

    def manage(self, request: dict[str, Any]) -> dict[str, Any]:
        """Renames a run, or removes it. Raises ValueError if it is in use, or if the new name cannot be had."""
        action, run, to = request.get("action"), request.get("run"), request.get("to")
        with self._lock:
            self._scan()
            if not any(entry.name == run for entry in self._runs.values()):
                raise NotFound("there is no such run")
            told: list[str] = []
            if action == "rename" and isinstance(to, str) and to:
                manage.rename(RunDir(self.out, str(run)), RunDir(self.out, to), told.append)
            elif action == "remove":
                manage.remove(RunDir(self.out, str(run)), told.append)
            else:
                raise ValueError("send action (rename or remove), run, and for rename a name in to")
        return {"told": told}

    def _entries(self, study: Any) -> dict[str, Any]:
        if study is None:
            return self._runs
        if not isinstance(study, str) or study not in self._studies:
            raise NotFound("there is no such study")
        return self._studies[study].entries

    def _scan(self) -> None:
        now = time.time()
        folders = sorted((path.parent for path in self.out.glob(f"runs/*/*/{METRICS}")), key=_order)
        self._runs = {(name := f"{f.parent.name}/{f.name}"): self._runs.get(name) or Run(f) for f in folders}
        found = find_studies(self.out).items()
        self._studies = {name: self._studies.get(name) or Study(folder) for name, folder in found}
        for run in self._runs.values():
            run.refresh(OVERVIEW_POINTS, now)
        for study in self._studies.values():
            study.refresh(now)


def _order(stage: Path) -> tuple[str, int]:
    """Sorts stages under their run, in the order of training."""
    return stage.parent.name, STAGES.index(stage.name) if stage.name in STAGES else len(STAGES)


def _constant(recipes: list[dict[str, Any]]) -> dict[str, Any]:
    """The fields that all recipes have with one value."""
    first = recipes[0] if recipes else {}
    return {k: value for k, value in first.items() if all(k in one and one[k] == value for one in recipes)}


def _metrics(entries: Any) -> list[str]:
    """Names of the numbers that can be drawn."""
    names = {name for entry in entries for name, value in entry.curve.last.items() if is_number(value)}
    return sorted(names - {"step", *AXES})


def _shown(name: str, entry: Entry, constant: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": name,
        "run": entry.name,
        "stage": entry.stage,
        "status": entry.status,
        "reason": entry.reason,
        "age": round(entry.age, 1),
        "steps": entry.steps,
        "damaged": entry.curve.damaged,
        "report": isinstance(entry, Run) and (entry.folder.parent / REPORT).exists(),
        "at": [entry.curve.identity, entry.curve.end],
        "last": {field: value for field, value in entry.curve.last.items() if is_number(value)},
        "recipe": {field: value for field, value in entry.recipe.items() if field not in constant},
    }
