"""What every benchmark shares: repeated measures with their spread, the printed table, the JSON record.

Wall-clock timings on a shared machine are noisy. So things that are compared are measured in turns
(`alternate`), a figure is the median of its rounds with the lowest and the highest beside it, and a
comparison is the median of the rounds' own ratios. It measures nothing itself.
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
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import quern
from quern.machine import Machine
from quern.records import git_hash

if TYPE_CHECKING:
    from quern.bench.material import Material

PACKAGES = ("torch", "numpy", "tiktoken", "rustbpe")


@dataclass(frozen=True)
class Setup:
    """machine: what computes; rounds: how often each figure is taken; quick: tiny sizes, whose figures mean
    nothing; batch_tokens: tokens of one optimizer step in `train`; start: whether `train` also measures
    starts; say: takes lines for the user.
    """

    machine: Machine
    seed: int
    rounds: int
    quick: bool
    batch_tokens: int
    start: bool
    material: Material
    log: Callable[[str], None]


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
    """measures: all figures; settings: the sizes they hold for; lines: a table of its own instead of the
    usual one."""

    measures: Sequence[Measure]
    settings: Mapping[str, Any] = field(default_factory=dict)
    lines: Sequence[str] = ()


def alternate(rounds: int, jobs: Mapping[str, Callable[[], float]]) -> dict[str, tuple[float, ...]]:
    """Runs the jobs in turns and returns what each gave in each round.

    A first pass is not counted, it warms caches; every other round goes backwards, so that no job always
    follows the same one.
    """
    taken: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(rounds + 1):
        for name in list(jobs)[:: 1 if turn % 2 == 0 else -1]:
            value = jobs[name]()
            if turn:
                taken[name].append(value)
    return {name: tuple(values) for name, values in taken.items()}


def seconds_of(job: Callable[[], object], machine: Machine | None = None) -> float:
    """Wall-clock seconds of one call, the device's work included."""
    if machine is not None:
        machine.synchronize()
    start = time.perf_counter()
    job()
    if machine is not None:
        machine.synchronize()
    return time.perf_counter() - start


def rates(amount: float, seconds: Sequence[float]) -> tuple[float, ...]:
    """Amounts per second."""
    return tuple(amount / one for one in seconds)


def ratios(above: Sequence[float], below: Sequence[float]) -> tuple[float, ...]:
    """Round by round, so that what slows both down falls out."""
    return tuple(a / b for a, b in zip(above, below, strict=True))


def number(value: float) -> str:
    """Three or more digits that count, never an exponent."""
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 10 else 3
    return f"{value:,.{digits}f}"


def table(measures: Sequence[Measure]) -> list[str]:
    """A line for each figure: name, median, unit, spread, note."""
    rows = [
        (m.name, number(m.median), m.unit, f"{number(min(m.values))} .. {number(max(m.values))}", m.note)
        for m in measures
    ]
    name, median, unit, spread = (max((len(row[i]) for row in rows), default=0) for i in range(4))
    return [
        f"  {row[0]:{name}}  {row[1]:>{median}} {row[2]:{unit}}  {row[3]:>{spread}}  {row[4]}".rstrip() for row in rows
    ]


def versions() -> dict[str, str]:
    """Of quern, its source, Python and the packages whose speed is measured."""
    found = {"quern": quern.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    found["git"] = git_hash(Path(__file__).parent) or "unknown"
    return found


def load_average() -> float | None:
    """Processes that wanted to run during the last minute, where the system says so: what a timing competes
    with."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def record(what: str, outcome: Outcome, setup: Setup, seconds: float, load: float | None) -> dict[str, Any]:
    """The JSON body of out/bench/<what>.json."""
    return {
        "what": what,
        "utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": setup.machine.describe(),
        "versions": versions(),
        "seed": setup.seed,
        "rounds": setup.rounds,
        "quick": setup.quick,
        "load_average_before": load,
        "seconds": round(seconds, 2),
        "settings": dict(outcome.settings),
        "measures": [measure.to_json() for measure in outcome.measures],
    }


def write(path: Path, body: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".tmp-{os.getpid()}")
    temporary.write_text(json.dumps(body, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(path)


def repeated(items: Sequence[Any], count: int) -> list[Any]:
    """The first `count` of the items repeated without end."""
    return list(islice((item for _ in range(count // max(1, len(items)) + 1) for item in items), count))
