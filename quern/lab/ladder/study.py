"""A study on the ladder: its rules, arms and trials in one folder, which any number of processes may work on.

`study.json` holds the rules and never changes. `arms.jsonl` has a line for each arm, `trials.jsonl` for each finished
trial, `speeds.jsonl` for each measured speed, `baselines.jsonl` for the n-grams of each rung. Lines are appended under
a lock and synced. A process claims what it trains by a lock that the kernel releases when the process ends.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from quern.lab.ladder.rungs import Rung
from quern.records import append_synced, drop_torn_end, read_json, read_lines, typed
from quern.temporaries import holder, write_whole

PLAN, ARMS, TRIALS, SPEEDS, BASELINES = "study.json", "arms.jsonl", "trials.jsonl", "speeds.jsonl", "baselines.jsonl"
FILES = (PLAN, ARMS, TRIALS, SPEEDS, BASELINES)


@dataclass(frozen=True)
class Plan:
    """What a study fixes before its first run.

    Args:
        base: Name of the baseline.
        rungs: By number, as text.
        numbers: By rung: fingerprint of the baseline's resolved numbers.
        text: Fingerprint of the text.
        data: Name of the text.
        delta: Bits per byte; smaller differences do not matter.
        alpha: Share of the ideas called better or worse that may be expected to make no difference.
        most_pairs: Pairs after which an idea stays undecided.
        tune: Field whose values each arm tries on the lowest rung, or "".
        vary: What differs between the pairs: both seeds, init or data.
        ladder: Whether the rungs are sizes; else a baseline that a trigram beats is not refused.
        facts: Command, machine, versions and time of the start.
        metric: What is compared; lower is better.
    """

    base: str
    rungs: dict[str, Rung]
    numbers: dict[str, str]
    text: str
    data: str
    delta: float
    alpha: float
    most_pairs: int
    tune: str
    vary: str
    ladder: bool
    facts: dict[str, Any]
    metric: str = "validation bits per byte after the last step"

    def seeds(self, pair: int) -> tuple[int, int]:
        """The seeds of the initial weights and of the data order of a pair."""
        return pair * (self.vary != "data"), pair * (self.vary != "init")


@dataclass(frozen=True)
class ArmRecord:
    """An arm when it joined the study. code: see `code.code_fingerprint`; source: text of its file, or ""."""

    arm: str
    registered: str
    commit: str | None
    code: str
    recipe: dict[str, Any]
    source: str


@dataclass(frozen=True)
class TrialRecord:
    """A finished trial.

    Args:
        recipe: Name of the arm.
        rung: Number of the rung.
        seed: Number of the pair: both arms have its seeds of initial weights and data order (`Plan.vary`).
        value: Of the tuned field; None for the recipe's own.
        bpb: Final bits per byte; None for a run that failed.
        steps: Optimizer steps.
        tokens: Targets trained on.
        flops: Training FLOPs.
        seconds: Time in steps, on a machine that may have been busy.
        tokens_per_second: The same, as a rate.
        peak_bytes: Peak memory.
        curve: Validations: step, tokens, FLOPs, seconds, bits per byte.
        commit: Of the code; changed: tracked files that differed from it.
        machine: What trained: device, dtype, compilation, processor, torch.
        time: When the trial ended, as ISO 8601 text.
        text: Fingerprint of the text.
        numbers: Fingerprint of the baseline's resolved numbers.
        code: Fingerprint of the arm's code.
        error: Why there is no result.
    """

    recipe: str
    rung: int
    seed: int
    value: float | None = None
    bpb: float | None = None
    steps: int = 0
    tokens: int = 0
    flops: float = 0.0
    seconds: float = 0.0
    tokens_per_second: float = 0.0
    peak_bytes: int = 0
    curve: tuple[dict[str, Any], ...] = ()
    flops_parts: dict[str, float] = field(default_factory=dict)
    commit: str | None = None
    changed: tuple[str, ...] = ()
    machine: str = ""
    time: str = ""
    text: str = ""
    numbers: str = ""
    code: str = ""
    error: str = ""


class SpeedRecord(TypedDict):
    """How fast an idea is on a rung, as `lab.axes.speed.Speed`."""

    recipe: str
    rung: int
    ratio: float
    error: float
    seconds: float
    pairs: int


Ngrams = TypedDict("Ngrams", {"rung": int, "1": float, "2": float, "3": float})
"""Bits per byte of the n-grams that count the baseline's tokens on a rung, by order."""

Key = tuple[str, int, float | None]
"""Arm, rung, value of the tuned field."""


class Study:
    """An open study. `refresh` reads what other processes have added."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        body = read_json(folder / PLAN, dict[str, Any])
        self.plan = typed(body, Plan)
        self.refresh()

    @property
    def name(self) -> str:
        return self.folder.name

    def refresh(self) -> None:
        """Reads all records again."""
        self.arms = {one.arm: one for one in read_lines(self.folder / ARMS, ArmRecord)}
        self.trials: dict[Key, dict[int, TrialRecord]] = {}
        for trial in read_lines(self.folder / TRIALS, TrialRecord):
            self.trials.setdefault((trial.recipe, trial.rung, trial.value), {}).setdefault(trial.seed, trial)
        speeds: list[SpeedRecord] = read_lines(self.folder / SPEEDS, SpeedRecord)
        self.speeds = {(one["recipe"], one["rung"]): one for one in speeds}
        ngrams: list[Ngrams] = read_lines(self.folder / BASELINES, Ngrams)
        self.ngrams = {one["rung"]: one for one in ngrams}

    @property
    def ideas(self) -> list[str]:
        return [name for name in self.arms if name != self.plan.base]

    def runs(self, arm: str, rung: int, value: float | None = None) -> Mapping[int, TrialRecord]:
        """The finished trials of an arm at a rung, by seed."""
        return self.trials.get((arm, rung, value), {})

    def counted(self, rung: int) -> Ngrams:
        """The n-grams of a rung. Raises ValueError if they are not there."""
        if rung not in self.ngrams:
            raise ValueError(f"{self.folder / BASELINES} has no rung {rung}: run the study again, which counts it")
        return self.ngrams[rung]

    def add(self, file: str, body: Mapping[str, Any]) -> None:
        """Appends a line to one of the study's files, under its lock, and reads it back."""
        with (self.folder / ".append").open("a", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            drop_torn_end(self.folder / file)
            append_synced(self.folder / file, dict(body))
        self.refresh()

    @contextmanager
    def claim(self, name: str) -> Iterator[bool]:
        """Holds a claim for the length of the block. Yields whether this process got it."""
        folder = self.folder / "claims"
        folder.mkdir(exist_ok=True)
        with (folder / name).open("a+", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            lock.truncate(0)
            lock.write(holder())
            lock.flush()
            self.refresh()
            yield True


def open_study(folder: Path, plan: Plan, arms: Sequence[ArmRecord]) -> Study:
    """Opens a study, writes its plan if it is new, and adds the arms that it lacks.

    Raises:
        ValueError: The study has other rules, or an arm's code has changed; the message says what to do.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".append").open("a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / PLAN).exists():
            for file in FILES[1:]:
                (folder / file).touch()
            write_whole(folder / PLAN, json.dumps(asdict(plan), indent=1) + "\n")
    study = Study(folder)
    ours, theirs = _identity(plan), _identity(study.plan)
    changed = [name for name in ours if ours[name] != theirs[name]]
    if changed:
        raise ValueError(
            f"the study {folder.name} was registered with another {', '.join(changed)}, which must not change after "
            "the first run: give the same arguments, or name another study with --study"
        )
    for arm in arms:
        before = study.arms.get(arm.arm)
        if before is None:
            study.add(ARMS, asdict(arm))
        elif before.code != arm.code:
            raise ValueError(
                f"the code that {arm.arm} trains with has changed since the study {folder.name} began (commit "
                f"{before.commit}): go back to that commit, or name another study with --study"
            )
    return study


def _identity(plan: Plan) -> dict[str, Any]:
    """What must not change: all but the facts of the start and the noise that was known then."""
    rungs = {number: {**asdict(rung), "pair_sd": None} for number, rung in plan.rungs.items()}
    return {name: value for name, value in asdict(plan).items() if name != "facts"} | {"rungs": rungs}
