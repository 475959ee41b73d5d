"""Shared by all benchmarks: rounds of measurements, figures with their spread, the printed table, the JSON record.

Wall-clock timings on a shared machine are noisy. So the jobs of a comparison alternate (`alternate`), a figure is the
median of its rounds with the lowest and the highest value, and a ratio is the median of the ratios of the rounds.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import quern
from quern.machine import Machine
from quern.records import git_hash
from quern.temporaries import write_whole

if TYPE_CHECKING:
    from quern.bench.material import Material

PACKAGES = ("torch", "numpy", "tiktoken", "rustbpe")


@dataclass(frozen=True)
class Setup:
    """Settings of a benchmark.

    Attributes:
        machine: The machine to measure.
        seed: Seed of all random numbers.
        rounds: Values of each figure.
        quick: Use tiny sizes, whose figures mean nothing.
        batch_tokens: Tokens of an optimizer step, for `train`, `ranks` and `grug`.
        start: Measure start-up too, for `train`.
        material: The text to measure on.
        log: Takes lines for the user.
    """

    machine: Machine
    seed: int
    rounds: int
    quick: bool
    batch_tokens: int
    start: bool
    material: Material
    log: Callable[[str], None]

    def seconds(self, jobs: Mapping[str, Callable[[], object]]) -> dict[str, tuple[float, ...]]:
        """Returns the seconds of each job in each round; the jobs alternate."""
        return alternate(self.rounds, {k: lambda job=job: seconds_of(job, self.machine) for k, job in jobs.items()})


@dataclass(frozen=True)
class Measure:
    """One figure: a value for each round."""

    name: str
    unit: str
    values: tuple[float, ...]
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def to_json(self) -> dict[str, Any]:
        spread = {"median": self.median, "low": min(self.values), "high": max(self.values)}
        body = {"name": self.name, "unit": self.unit, **spread, "values": list(self.values)}
        return {**body, "note": self.note} if self.note else body


@dataclass(frozen=True)
class Outcome:
    """Result of a benchmark: its figures, the sizes used, and lines to print instead of the usual table."""

    measures: Sequence[Measure]
    settings: Mapping[str, Any] = field(default_factory=dict)
    lines: Sequence[str] = ()


def alternate(rounds: int, jobs: Mapping[str, Callable[[], float]]) -> dict[str, tuple[float, ...]]:
    """Runs each job once per round and returns the values by job.

    A first pass warms caches and is not counted. Every other round runs in reverse order, so that no job always follows
    the same job.
    """
    taken: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(rounds + 1):
        for name in list(jobs)[:: 1 if turn % 2 == 0 else -1]:
            value = jobs[name]()
            if turn:
                taken[name].append(value)
    return {name: tuple(values) for name, values in taken.items()}


def seconds_of(job: Callable[[], object], machine: Machine | None = None) -> float:
    """Returns the wall-clock seconds of one call, with the work of the machine's device included."""
    if machine is not None:
        machine.synchronize()
    start = time.perf_counter()
    job()
    if machine is not None:
        machine.synchronize()
    return time.perf_counter() - start


def rates(amount: float, seconds: Sequence[float]) -> tuple[float, ...]:
    """Returns the amount per second of each round."""
    return tuple(amount / one for one in seconds)


def ratios(above: Sequence[float], below: Sequence[float]) -> tuple[float, ...]:
    """Returns the ratio of each round, in which a slowdown of both sides cancels out."""
    return tuple(a / b for a, b in zip(above, below, strict=True))


def scaled(factor: float, values: Sequence[float]) -> tuple[float, ...]:
    return tuple(factor * value for value in values)


def number(value: float) -> str:
    """Formats a value with three or more digits, or one below 0.01 with an exponent."""
    if 0 < abs(value) < 0.01:
        return f"{value:.1e}"
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 10 else 3
    return f"{value:,.{digits}f}"


def table(measures: Sequence[Measure]) -> list[str]:
    """Returns one line for each figure: name, median, unit, spread, note."""
    rows = [
        (m.name, number(m.median), m.unit, f"{number(min(m.values))} .. {number(max(m.values))}", m.note)
        for m in measures
    ]
    name, median, unit, spread = (max((len(row[i]) for row in rows), default=0) for i in range(4))
    return [f"  {a:{name}}  {b:>{median}} {c:{unit}}  {d:>{spread}}  {e}".rstrip() for a, b, c, d, e in rows]


def versions() -> dict[str, str]:
    """Returns the versions of quern, its source, Python and the measured packages."""
    found = {"quern": quern.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    found["git"] = git_hash(Path(__file__).parent) or "unknown"
    return found


def load_average() -> float | None:
    """Returns the mean number of runnable processes in the last minute, or None if the system has no such number."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def head(what: str, machine: Machine, seed: int, quick: bool, load: float | None) -> dict[str, Any]:
    """Returns the fields that all records begin with."""
    return {
        "what": what,
        "utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine.describe(),
        "versions": versions(),
        "seed": seed,
        "quick": quick,
        "load_average_before": load,
    }


def record(what: str, outcome: Outcome, setup: Setup, seconds: float, load: float | None) -> dict[str, Any]:
    """Returns the JSON body of out/bench/<what>.json."""
    return {
        **head(what, setup.machine, setup.seed, setup.quick, load),
        "rounds": setup.rounds,
        "seconds": round(seconds, 2),
        "settings": dict(outcome.settings),
        "measures": [measure.to_json() for measure in outcome.measures],
    }


def write(path: Path, body: Mapping[str, Any]) -> None:
    write_whole(path, json.dumps(body, indent=2, ensure_ascii=False) + "\n")
