"""What a run's folder says about the run: its JSON and JSON-lines records, read once and put in order.

Every record is optional, since a run may have stopped anywhere: a missing file is an empty one, a line torn
by a kill is left out and mentioned in `notes`. Nothing here computes a model or opens a checkpoint.
Folder: run.json, evaluate.jsonl and samples.jsonl beside one folder per stage (pretrain, sft) that holds
recipe.json, metrics.jsonl and events.jsonl.
Units: seconds are those spent in training steps, `flops` and `tokens` are counted from the start of the
stage.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STAGE_TITLES = {"untrained": "Untrained", "pretrain": "Pretraining", "sft": "Fine-tuning"}
EVENT_TIMES = ("time", "utc", "at")


@dataclass(frozen=True)
class StageRecords:
    """`metrics` are the lines of training steps, `validations` those of evaluators; both in the order of
    steps.
    """

    name: str
    recipe: dict[str, Any]
    metrics: list[dict[str, Any]]
    validations: list[dict[str, Any]]
    events: list[dict[str, Any]]

    @property
    def title(self) -> str:
        return STAGE_TITLES.get(self.name, self.name)

    def last(self, key: str) -> float | None:
        """The latest finite value of a metric; validations carry their own keys."""
        values = self.column(key)[1]
        return values[-1] if values else None

    def column(self, key: str, against: str = "step") -> tuple[list[float], list[float]]:
        """(x, y) of the lines that have a finite `key`. Where a line has no `against`, it follows from its
        step.
        """
        xs: list[float] = []
        ys: list[float] = []
        for line in self.validations if key.startswith("val_") else self.metrics:
            y = finite(line.get(key))
            x = finite(line.get(against))
            if x is None:
                x = self._at_step(against, finite(line.get("step")))
            if x is not None and y is not None:
                xs.append(x)
                ys.append(y)
        return xs, ys

    def _at_step(self, key: str, step: float | None) -> float | None:
        """Linear between the training lines around `step`, from zero at step zero; at the last line's value
        after.
        """
        if step is None:
            return None
        before = (0.0, 0.0)
        for line in self.metrics:
            at, value = finite(line.get("step")), finite(line.get(key))
            if at is None or value is None:
                continue
            if at >= step:
                share = (step - before[0]) / (at - before[0]) if at > before[0] else 1.0
                return before[1] + share * (value - before[1])
            before = (at, value)
        return before[1] if before != (0.0, 0.0) else None

    def steps_of(self, kind: str) -> list[float]:
        """The steps at which events of a kind happened."""
        steps = (finite(event.get("step")) for event in self.events if event.get("kind") == kind)
        return [step for step in steps if step is not None]

    def resumed_at(self) -> list[float]:
        """The steps at which training went on; resuming what was finished already trains nothing."""
        end = self.last("step") or 0.0
        return [step for step in self.steps_of("resume") if step < end]


@dataclass(frozen=True)
class RunRecords:
    """`scores` keeps the latest line of each stage, task and metric, `samples` the latest of each prompt."""

    name: str
    folder: Path
    run: dict[str, Any]
    recipe: dict[str, Any]
    stages: list[StageRecords]
    scores: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)

    def stage(self, name: str) -> StageRecords | None:
        return next((stage for stage in self.stages if stage.name == name), None)


def read_run(folder: Path) -> RunRecords:
    """Read every record of a run. Raises FileNotFoundError when the folder holds none."""
    notes: list[str] = []
    stages = [_read_stage(path, folder, notes) for path in _stage_folders(folder)]
    run = _read_object(folder / "run.json", folder, notes)
    scores = _read_lines(folder / "evaluate.jsonl", folder, notes)
    samples = _read_lines(folder / "samples.jsonl", folder, notes)
    if not (stages or run or scores or samples):
        raise FileNotFoundError(
            f"{folder} holds no records of a run; give a run's folder such as out/runs/NAME, "
            "or train one first with `quern run`"
        )
    recipe = _read_object(folder / "recipe.json", folder, notes)
    recipe = recipe or next((stage.recipe for stage in stages if stage.recipe), {})
    latest = {(line.get("stage"), line.get("task"), line.get("metric")): line for line in scores}
    return RunRecords(
        name=folder.resolve().name,
        folder=folder,
        run=run,
        recipe=recipe,
        stages=stages,
        scores=list(latest.values()),
        samples=_latest(samples),
        notes=notes,
    )


def finite(value: Any) -> float | None:
    """A number as a float; None for anything else, for NaN and for infinities."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def event_time(event: dict[str, Any]) -> str:
    """The event's time as text, to the second, or nothing."""
    text = next((str(event[key]) for key in EVENT_TIMES if event.get(key)), "")
    return text.replace("T", " ")[:19]


def _latest(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last answer of each stage to each prompt: a run may be evaluated more than once."""
    found: dict[str, dict[str, Any]] = {}
    for sample in samples:
        messages = sample.get("messages")
        asked = messages
        if isinstance(messages, list) and all(isinstance(message, dict) for message in messages):
            asked = [message for message in messages if message.get("role") != "assistant"]
        key = json.dumps([sample.get("stage"), sample.get("kind"), sample.get("prompt"), asked])
        found[key] = sample
    return list(found.values())


def _stage_folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    known = list(STAGE_TITLES)
    found = [path for path in folder.iterdir() if path.is_dir() and _is_stage(path)]
    return sorted(found, key=lambda path: (known.index(path.name) if path.name in known else len(known), path.name))


def _is_stage(path: Path) -> bool:
    return (path / "metrics.jsonl").exists() or (path / "events.jsonl").exists()


def _read_stage(path: Path, folder: Path, notes: list[str]) -> StageRecords:
    lines = _read_lines(path / "metrics.jsonl", folder, notes)
    lines.sort(key=lambda line: finite(line.get("step")) or 0.0)
    validations = [line for line in lines if any(key.startswith("val_") for key in line)]
    return StageRecords(
        name=path.name,
        recipe=_read_object(path / "recipe.json", folder, notes),
        metrics=[line for line in lines if "loss" in line or line not in validations],
        validations=validations,
        events=_read_lines(path / "events.jsonl", folder, notes),
    )


def _read_object(path: Path, folder: Path, notes: list[str]) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        notes.append(f"{path.relative_to(folder)} is not a JSON object and was left out.")
        return {}
    return found


def _read_lines(path: Path, folder: Path, notes: list[str]) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    found: list[dict[str, Any]] = []
    unread = 0
    # Only "\n" ends a record: str.splitlines would also cut at separators inside a sample's text.
    for text in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if isinstance(line, dict):
            found.append(line)
        else:
            unread += 1
    if unread:
        plural = "s" if unread > 1 else ""
        notes.append(f"{unread} line{plural} of {path.relative_to(folder)} could not be read and left out.")
    return found
