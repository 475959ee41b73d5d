"""The files that the board reads, as curves: a stage of a run, with its recipe and status, and a trial of a study.

Metrics grow: of a long file, lines at evenly spaced offsets are parsed, and the lines of validations; then only what
was appended. Small files are read again when they change.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from quern.records import EVENTS, METRICS, objects, read_json, read_lines, strict
from quern.runs.origin import flat

Body = TypeVar("Body", dict[str, Any], list[Any])


class KeptFile:
    """A small file that is read again when its size or time changed. modified: seconds since the epoch; 0 if the file
    is missing."""

    def __init__(self, path: Path) -> None:
        self.path, self.modified, self._size = path, 0.0, -1

    def changed(self) -> bool:
        before = self.modified, self._size
        try:
            facts = self.path.stat()
            self.modified, self._size = facts.st_mtime, facts.st_size
        except OSError:
            self.modified, self._size = 0.0, 0
        return (self.modified, self._size) != before

    def json(self, empty: Body) -> Body:
        """The file's object or list; `empty` if it is missing or damaged, since the board must show the other runs."""
        with suppress(OSError, ValueError):
            return strict(read_json(self.path, type(empty)))
        return empty

    def lines(self) -> list[dict[str, Any]]:
        """The objects of a JSONL file, without damaged lines and a last line that has no newline."""
        with suppress(OSError, ValueError):
            return strict(read_lines(self.path, skip_damaged=True))
        return []


def is_number(value: Any) -> bool:
    """Whether a JSON value is a finite number that the page can draw."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


WHOLE_BYTES, TAIL_BYTES = 48 << 10, 2 << 10
"""All lines of so many new bytes are parsed; of more bytes those at the end, a sample, and a validation after each."""
VALIDATION = b'"val_'


class Curve:
    """The sampled lines of a metrics file, which may be missing; `read_lines` would parse all lines each time.

    Attributes:
        rows: The offset after each line, and the line's fields; in file order.
        modified: Seconds since the epoch; 0 if the file is missing.
        end: Offset after the last complete line.
        identity: Changes when the file is replaced, as a resumed run does; earlier offsets are then void.
        last: The latest value of each field; a null leaves the one before.
        damaged: Lines that are not JSON objects; they are left out.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.modified, self._sampled = path, 0.0, 0
        self.clear(0)

    def clear(self, identity: int) -> None:
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.end, self.identity, self.damaged = 0, identity, 0
        self.last: dict[str, Any] = {}

    def refresh(self, points: int) -> None:
        """Reads what is new. points: lines to sample, and at most as many validations."""
        try:
            with self.path.open("rb") as file:
                facts = os.fstat(file.fileno())
                self.modified = facts.st_mtime
                inode = facts.st_ino % (1 << 53)  # the page's numbers are doubles
                replaced = self.identity != inode or facts.st_size < self.end
                grown = len(self.rows) > 4 * max(self._sampled, 256)
                if replaced or grown or points > self._sampled:
                    self.clear(inode)
                    self._sampled = max(points, 0 if replaced else self._sampled)
                if facts.st_size > self.end:
                    self._extend(file, self._sampled)
        except FileNotFoundError:
            self.modified = 0.0
            self.clear(0)

    def _extend(self, file: BinaryIO, points: int) -> None:
        file.seek(self.end)
        content = file.read()
        size = content.rfind(b"\n") + 1
        whole_from, ends = max(0, size - TAIL_BYTES) if size > WHOLE_BYTES else 0, set[int]()
        step = max(1, size // max(points, 1))
        for at in range(0, whole_from, step):
            ends.add(content.find(b"\n", at))
            if (validation := content.find(VALIDATION, at, min(at + step, whole_from))) >= 0:
                ends.add(content.find(b"\n", validation))
        while (end := content.find(b"\n", whole_from)) >= 0:
            ends.add(end)
            whole_from = end + 1
        parsed = _parse([content[content.rfind(b"\n", 0, end) + 1 : end] for end in sorted(ends)])
        for end, fields in zip(sorted(ends), parsed, strict=True):
            if isinstance(fields, dict):
                self.rows.append((self.end + end + 1, fields))
                self.last |= {name: value for name, value in fields.items() if value is not None}
            else:
                self.damaged += 1
        self.end += size


def _parse(lines: list[bytes]) -> list[Any]:
    """The value of each line; None for a line that is not JSON. All are parsed as one array, which is faster."""
    try:
        values = json.loads(b"[" + b",".join(lines) + b"]", parse_constant=lambda name: None)
    except (ValueError, RecursionError):
        values = []
    if len(values) == len(lines):
        return values
    return [None] if len(lines) == 1 else [value for line in lines for value in _parse([line])]


STUCK_SECONDS, STUCK_GAPS = 120, 10
"""A run is stuck after this long without a line, and this many times the usual time between two lines."""
FIRST_LINE_SECONDS = 900  # allowed before the first line: data is prepared and the model is compiled
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
        along = "step" if x == "steps" else x
        found = [fields for _, fields in rows[first:] if is_number(fields.get(y)) and is_number(fields.get(along))]
        return [fields[along] for fields in found], [fields[y] for fields in found]


class Run(Entry):
    """A stage of a run."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder.parent.name, folder.name, Curve(folder / METRICS))
        self.folder = folder
        self._events, self._recipe = KeptFile(folder / EVENTS), KeptFile(folder / "recipe.json")
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
        written = max(self.curve.modified, self._events.modified)
        self.age = max(0.0, now - written) if written else 0.0
        if self._end == "running":
            self.status = "stuck" if self.age > self._patience() else "running"
            self.reason = "no line for long: the run waits, or its process was killed" if self.status == "stuck" else ""

    def _patience(self) -> float:
        # A validation has the time of the step before it.
        times = [f["seconds"] for _, f in self.curve.rows[-12:] if "loss" in f and is_number(f.get("seconds"))]
        if not self.curve.rows:
            return FIRST_LINE_SECONDS
        return max(STUCK_SECONDS, STUCK_GAPS * (times[-1] - times[-2]) if len(times) > 1 else 0)


KINDS = {"trials.jsonl": "study.json", "cells.jsonl": "plan.json", "sweep.jsonl": "results.json"}
"""The trials of a comparison, an IsoFLOP study and a sweep, and the file that says what each of them is."""


class StudyRecords:
    """A study's trials, read again as the file grows, and its verdicts."""

    def __init__(self, folder: Path) -> None:
        trials = next((name for name in KINDS if (folder / name).exists()), "trials.jsonl")
        names = (KINDS[trials], "verdicts.json", trials, "arms.jsonl")
        self._study, self._verdicts, self._trials, self._arms = (KeptFile(folder / name) for name in names)
        self.entries: dict[str, Entry] = {}
        self.registered: dict[str, Any] = {}

    def refresh(self, now: float) -> None:
        if self._study.changed():
            self.registered = self._study.json({})
        if self._trials.changed() | self._arms.changed():
            arms = {str(arm.get("arm")): arm for arm in self._arms.lines()}
            self.entries = {}
            for number, trial in enumerate(run for line in self._trials.lines() for run in _runs(line)):
                arm = arms.get(str(trial.get("recipe")), {})
                if trial.get("code") == arm.get("code", trial.get("code")):  # else of the file before its repair
                    self.entries[str(number)] = _trial(trial, arm.get("recipe"))
        for entry in self.entries.values():
            entry.age = max(0.0, now - self._trials.modified)

    @property
    def kind(self) -> str:
        named = {"cells.jsonl": "IsoFLOP grid", "sweep.jsonl": "Sweep"}
        return named.get(self._trials.path.name, "Ladder" if self.registered.get("ladder") else "Study")

    def tables(self) -> dict[str, Any]:
        """The registered rules without what the page draws, and the verdicts as they were written."""
        shown = {k: v for k, v in self.registered.items() if k not in ("recipe", "rungs", "plan", "cells")}
        verdicts = objects(self._verdicts.json([]))
        for row in verdicts:
            match row:
                case {"interval": [low, high]}:  # an earlier version wrote both ends as a pair
                    row |= {"low": low, "high": high}
        return {"registered": flat(shown), "verdicts": verdicts}


def _runs(line: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs of a line: one, or those of a sweep's trial. Each is named by its arm, its size or its trial."""
    if "runs" in line:
        named = {"recipe": f"trial {line.get('trial')}", "values": line.get("values")}
        return [{**run, **named} for run in objects(line["runs"])]
    if is_number(budget := line.get("budget")):
        return [{**line, "recipe": f"{line.get('size')} at {budget:.3g} FLOPs"}]
    return [line]


def _trial(trial: dict[str, Any], recipe: Any) -> Entry:
    """A finished trial; the lines of its curve are its validations."""
    arm, curve = str(trial.get("recipe", "")), Curve(Path())
    points = objects(trial.get("curve"))
    curve.rows = [(number, point | {"val_bpb": point.pop("bpb", None)}) for number, point in enumerate(points, 1)]
    curve.end, curve.identity = len(points), 1
    names = ("tokens", "flops", "seconds", "tokens_per_second")
    curve.last = {name: trial[name] for name in names if name in trial}
    curve.last |= {"step": trial.get("steps"), "val_bpb": trial.get("bpb")}
    which = "".join(f", {name} {trial[name]}" for name in ("rung", "value") if name in trial)
    entry = Entry(arm, f"seed {trial.get('seed')}{which}", curve)
    entry.status = "diverged" if trial.get("bpb") is None else "finished"
    if error := trial.get("error"):
        entry.status, entry.reason = "failed", str(error)
    entry.steps = steps if is_number(steps := trial.get("steps")) else None
    entry.recipe = flat(recipe) if isinstance(recipe, dict) else {}
    entry.recipe |= values if isinstance(values := trial.get("values"), dict) else {}
    entry.recipe |= {k: trial[k] for k in ("seed", "data_seed", "rung", "value") if k in trial}
    entry.recipe |= {"arm": arm, "train.steps": entry.steps}
    return entry
