"""A study's folder: what was registered before the first run, and one line for each finished trial.

`study.json` holds the registration and never changes; another registration in the same folder is refused.
`trials.jsonl` grows by one line per finished trial, which is synced to the disk. A crash can tear only the last line,
which is dropped when the folder is opened again.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quern.lab.idea import with_verdict
from quern.lab.names import compare_facts
from quern.lab.trainer import Trial
from quern.records import append_synced, drop_torn_end, read_json, read_lines, typed
from quern.stages.session import silent
from quern.temporaries import write_whole

AXES = ("steps", "flops", "seconds")
"""What the arms have equal: optimizer steps, training FLOPs, or wall clock."""
TRIALS = "trials.jsonl"


@dataclass(frozen=True)
class Registration:
    """What a comparison fixes before its first run.

    Args:
        base: Name of the baseline.
        ideas: Names of the arms that are compared with it.
        recipes: The recipe of each arm, as JSON.
        sources: The text of each arm's own file, where it has one.
        steps: Optimizer steps of the baseline.
        axes: Of `AXES`.
        horizons: Shares of `steps` that the baseline is also trained for.
        horizon_pairs: Pairs with which those are trained.
        evaluations: Validations in a trial.
        delta: Bits per byte. Differences below it do not matter.
        alpha: On each axis, the share of the ideas called better or worse that may be expected to make no difference.
        tau2: Variance of the prior of the effect size (`evidence.log_bayes_factor`).
        most_pairs: Pairs after which an idea stays undecided.
        vary: What differs between the pairs: both seeds, init or data.
        seed: Of the first pair; pair k has seed + k.
        text: Fingerprint of the baseline's text.
        same_time: Where the times of a step differ by at most this share, the trial with equal steps also counts as
            equal in time: the clock of one pair is not more exact.
        detectable_sd: Smallest effect that is detected with a probability of 80 %, in standard deviations of the
            pairs' differences.
        metric: What is compared; lower is better.
    """

    base: str
    ideas: tuple[str, ...]
    recipes: dict[str, Any]
    sources: dict[str, str]
    steps: int
    axes: tuple[str, ...]
    horizons: tuple[float, ...]
    horizon_pairs: int
    evaluations: int
    delta: float
    alpha: float
    tau2: float
    most_pairs: int
    vary: str
    seed: int
    text: str
    same_time: float
    detectable_sd: float
    metric: str = "validation bits per byte after the last step"

    def seeds(self, pair: int) -> tuple[int, int]:
        """The seeds of the initial weights and of the data order of a pair."""
        return (
            self.seed + pair * (self.vary in ("both", "init")),
            self.seed + pair * (self.vary in ("both", "data")),
        )

    def other_lengths(self) -> tuple[int, ...]:
        """The numbers of steps that `horizons` mean."""
        return tuple(max(1, round(share * self.steps)) for share in self.horizons)

    def to_json(self) -> dict[str, Any]:
        """JSON types only."""
        return json.loads(json.dumps(asdict(self)))

    @staticmethod
    def from_json(body: Mapping[str, Any]) -> Registration:
        """The inverse of `to_json`; other keys are ignored."""
        names = Registration.__dataclass_fields__
        return typed({name: body[name] for name in names}, Registration)


@dataclass(frozen=True)
class Entry:
    """A finished trial in its study. pair: from 0; beside: the other arms that alternated with it."""

    pair: int
    beside: tuple[str, ...]
    trial: Trial


class Study:
    """An open study.

    Args:
        folder: Its folder.
        registration: What was registered.
        facts: Machine, versions and time of the registration.
    """

    def __init__(self, folder: Path, registration: Registration, facts: dict[str, Any]) -> None:
        self.folder, self.registration, self.facts = folder, registration, facts
        self.entries: list[Entry] = []
        self._trials: defaultdict[tuple[str, int, int], list[Entry]] = defaultdict(list)
        for body in read_lines(folder / TRIALS):
            self._keep(Entry(body["pair"], tuple(body["beside"]), Trial.from_json(body)))

    @property
    def name(self) -> str:
        return self.folder.name

    def add(self, pair: int, beside: tuple[str, ...], trial: Trial) -> None:
        """Appends a finished trial to the records, and waits until it is on the disk."""
        entry = Entry(pair, beside, trial)
        append_synced(self.folder / TRIALS, {"pair": entry.pair, "beside": list(entry.beside), **entry.trial.to_json()})
        self._keep(entry)

    def _keep(self, entry: Entry) -> None:
        self.entries.append(entry)
        self._trials[entry.trial.recipe, entry.pair, entry.trial.steps].append(entry)

    def find(self, arm: str, pair: int, steps: int) -> Trial | None:
        """The first trial of an arm in a pair with this number of steps."""
        return next((one.trial for one in self._trials.get((arm, pair, steps), ())), None)

    def alternated(self, idea: str) -> tuple[Trial | None, Trial | None]:
        """The first pair of the baseline and an idea, whose arms alternated. Of several such pairs, which a kill
        leaves, the last one: only its trials are of one time."""
        base, steps = self.registration.base, self.registration.steps
        found = [
            [one.trial for one in self._trials.get((arm, 0, steps), ()) if other in one.beside]
            for arm, other in ((base, idea), (idea, base))
        ]
        return (found[0][-1], found[1][-1]) if all(found) else (None, None)


def register(
    folder: Path, registration: Registration, facts: dict[str, Any], log: Callable[[str], None] = silent
) -> Study:
    """Opens a study; writes its registration if it is new.

    Args:
        folder: The study's folder.
        registration: What the study fixes.
        facts: Of this start (`names.start_facts`).
        log: Takes a warning if a study continues with other software.

    Raises:
        ValueError: The folder holds a study with another registration; the message names the difference.
    """
    path = folder / "study.json"
    if path.exists():
        study = read_study(folder)
        ours, theirs = _identity(registration), _identity(study.registration)
        changed = [name for name in ours if ours[name] != theirs.get(name)]
        if changed:
            raise ValueError(
                f"the study {folder.name} was registered with another {', '.join(changed)}, which must not change "
                "after the first run: give the same arguments, or name another study with --study"
            )
        if warning := compare_facts(folder.name, study.facts, facts):
            log(warning)
        drop_torn_end(folder / TRIALS)
        return read_study(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({**registration.to_json(), "facts": facts}, indent=2) + "\n")
    return read_study(folder)


def _identity(registration: Registration) -> dict[str, Any]:
    """What must not change. The verdicts in the ideas' docstrings may: `quern lab log` writes them."""
    body = registration.to_json()
    return body | {"sources": {name: with_verdict(source, "") for name, source in body["sources"].items()}}


def read_study(folder: Path) -> Study:
    """Reads a study.

    Raises:
        FileNotFoundError: The folder holds no study.
        ValueError: Its records cannot be read.
    """
    path = folder / "study.json"
    if not path.is_file():
        raise FileNotFoundError(f"there is no study in {folder}: `quern lab compare` makes one")
    try:
        body = read_json(path, dict[str, Any])
        return Study(folder, Registration.from_json(body), typed(body["facts"], dict[str, Any]))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a study that this version of quern can read: {error}") from error
