"""The records of a comparison, at one size or on the ladder: its rules, arms, trials, speeds and n-grams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self, TypedDict

from quern.lab.ladder.rungs import Rung
from quern.lab.study import Study
from quern.records import read_lines, typed

ARMS, TRIALS, SPEEDS, BASELINES = "arms.jsonl", "trials.jsonl", "speeds.jsonl", "baselines.jsonl"
FILES = (Study.PLAN, ARMS, TRIALS, SPEEDS, BASELINES)


@dataclass(frozen=True)
class Plan:
    """The rules that a comparison fixes before its first run.

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
    """An arm when it joined the study. code: `rungs.code_fingerprint`; source: text of its file, or ""."""

    arm: str
    registered: str
    commit: str | None
    code: str
    recipe: dict[str, Any]
    source: str


@dataclass(frozen=True)
class TrialRecord:
    """A finished trial: the fields of `trainer.Trial`, and what it rests on.

    Args:
        recipe: Name of the arm.
        rung: Number of the rung.
        seed: Number of the pair: both arms have its seeds of initial weights and data order (`Plan.vary`).
        value: The tuned field's; None for the recipe's own.
        commit: Commit of the code; changed: tracked files that differed from it.
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


class Comparison(Study):
    """An open comparison."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.plan = typed(self.body, Plan)

    @classmethod
    def of(cls, folder: Path, plan: Plan, arms: Sequence[ArmRecord]) -> Self:
        """Opens a study, new or begun, and adds the arms that it lacks. Raises ValueError if it has other rules, or an
        arm's code has changed."""
        study = cls.register(folder, asdict(plan))
        for file in FILES[1:]:
            (folder / file).touch()
        for arm in arms:
            before = study.arms.get(arm.arm)
            if before is None:
                study.add(ARMS, asdict(arm))
            elif before.code != arm.code:
                raise ValueError(
                    f"the code that {arm.arm} trains with has changed since the study {study.name} began (commit "
                    f"{before.commit}): go back to that commit, or name another study with --study"
                )
        return study

    def refresh(self) -> None:
        self.arms = {one.arm: one for one in read_lines(self.folder / ARMS, ArmRecord)}
        self.trials: dict[tuple[str, int, float | None], dict[int, TrialRecord]] = {}
        """By arm, rung and value of the tuned field: the trials by seed."""
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
