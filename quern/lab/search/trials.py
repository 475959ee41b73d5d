"""The trials of a sweep: claimed by number, recorded run by run, and told to Optuna.

`sweep.jsonl` has a line for each finished trial. `running.jsonl` has lines of the trials that have begun: their values,
each finished run, each error. A trial whose worker died goes on after its finished runs. Optuna's study is made from
these records for each trial, in memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from textwrap import shorten
from typing import Any

import optuna
import torch
from optuna.exceptions import TrialPruned
from optuna.trial import TrialState

from quern.lab.search.results import TRIALS
from quern.lab.search.space import Space, apply, distributions, shown
from quern.lab.study import Study
from quern.lab.trainer import Point, Trainer
from quern.lab.verdict import WORST, score
from quern.recipe import Recipe
from quern.records import read_lines, strict
from quern.resolve import resolve
from quern.validate import flag

RUNNING = "running.jsonl"
SHOWN_FIELDS, SHOWN_REASON = 5, 200
MOST_FAILURES = 2  # a trial that errors have ended so often is not tried again
BRACKETS = "completed_rung_"  # prefix of the attributes in which Hyperband keeps a trial's state


@dataclass
class Begun:
    """A trial that has begun, with its finished runs and the errors that ended it."""

    values: dict[str, Any]
    baseline: bool
    runs: list[dict[str, Any]] = field(default_factory=list)
    failures: int = 0


class Sweep(Study):
    """An open sweep."""

    PLAN = "sweep.json"

    def refresh(self) -> None:
        lines = read_lines(self.folder / TRIALS)
        self.finished = sorted({line["trial"]: line for line in lines}.values(), key=lambda line: line["trial"])
        self.begun: dict[int, Begun] = {}
        for line in read_lines(self.folder / RUNNING):
            if "values" in line:
                self.begun[line["trial"]] = Begun(line["values"], line["baseline"])
            elif "run" in line:
                self.begun[line["trial"]].runs.append(line["run"])
            else:
                self.begun[line["trial"]].failures += 1

    def missing(self, wanted: int) -> list[int]:
        """The numbers of the trials that have not finished."""
        return sorted(set(range(wanted)) - {line["trial"] for line in self.finished})


@dataclass
class Trial:
    """One trial of a sweep, claimed by this worker. recipe: whose fields it sets; optuna: for reports and pruning."""

    sweep: Sweep
    number: int
    recipe: Recipe
    optuna: optuna.Trial

    @property
    def begun(self) -> Begun:
        return self.sweep.begun[self.number]

    def note(self, **line: Any) -> None:
        self.sweep.add(RUNNING, {"trial": self.number, **line})

    def run(self, trainer: Trainer, log: Callable[[str], None]) -> str:
        """Trains the trial and records its value. Returns a line about it. An error ends the worker; after
        `MOST_FAILURES` of them the trial is finished as "failed"."""
        reason, began = None, time.time()
        try:
            outcome, value, reason = self._measure(trainer)
        except TrialPruned:
            outcome, value = "pruned", list(self._reported().values())[-1]
        except OSError:  # of the disk: the values are not the reason
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            self.note(failure=reason)
            if self.begun.failures < MOST_FAILURES:
                log(f"trial {self.number} failed: {reason}")
                raise
            outcome, value = "failed", WORST
            self._report_missing()
        self._finish(outcome, value, reason, time.time() - began)
        texts = [f"{flag(name)}={shown(value)}" for name, value in self.begun.values.items()]
        more = " …" if len(texts) > SHOWN_FIELDS else ""
        why = f" ({shorten(reason.partition(chr(10))[0], SHOWN_REASON, placeholder=' …')})" if reason else ""
        told = f"trial {self.number}: {value:.4f} bits per byte, {outcome}{why}"
        return f"{told}; {' '.join(texts[:SHOWN_FIELDS])}{more}"

    def _measure(self, trainer: Trainer) -> tuple[str, float, str | None]:
        """Trains the runs that the trial still lacks. Returns the outcome, the mean of the scores, and a reason."""
        plan, recipe = self.sweep.body, apply(self.recipe, self.begun.values)
        try:
            resolve(recipe)
        except ValueError as error:
            self._report_missing()
            return "refused", WORST, str(error)
        scores: list[float] = []
        for pair, (seed, data_seed) in enumerate(plan["seeds"]):
            if pair >= len(self.begun.runs):
                train = partial(trainer.train, recipe, name=f"trial {self.number}", seed=seed, data_seed=data_seed)
                if plan["pruner"] == "hyperband" and pair == 0:
                    train = partial(train, on_eval=self._report)
                try:
                    done = train(evaluations=plan["evaluations"])
                except (MemoryError, torch.OutOfMemoryError) as error:
                    self._report_missing()
                    return "out of memory", WORST, str(error)
                self.note(run=strict(asdict(done)))
            scores.append(score(self.begun.runs[pair]["bpb"]))
            if plan["pruner"] == "wilcoxon":
                self.optuna.report(scores[-1], pair)
                if pair + 1 < len(plan["seeds"]) and self.optuna.should_prune():
                    # As Optuna advises: the mean so far tells the sampler more than "pruned".
                    return "pruned", statistics.fmean(scores), None
        return ("diverged" if WORST in scores else "finished"), statistics.fmean(scores), None

    def _report(self, point: Point) -> None:
        """Reports a validation of a run, and ends the run when the pruner asks for it."""
        self.optuna.report(score(point.bpb), 1 + len(self._reported()))
        if self.optuna.should_prune():
            raise TrialPruned

    def _report_missing(self) -> None:
        """Tells Wilcoxon's test the value of seeds that are not trained: it needs them if the trial is the best."""
        if self.sweep.body["pruner"] == "wilcoxon":
            for pair in range(len(self.begun.runs), len(self.sweep.body["seeds"])):
                self.optuna.report(WORST, pair)

    def _reported(self) -> dict[int, float]:
        return self.optuna.study.trials[self.optuna.number].intermediate_values

    def _finish(self, outcome: str, value: float, reason: str | None, seconds: float) -> None:
        attributes = self.optuna.study.trials[self.optuna.number].system_attrs
        line = {
            "trial": self.number,
            "outcome": outcome,
            "reason": reason,
            "bpb": value,
            "values": self.begun.values,
            "baseline": self.begun.baseline,
            "seconds": seconds,
            "reported": {str(step): one for step, one in self._reported().items()},
            "brackets": {name: value for name, value in attributes.items() if name.startswith(BRACKETS)},
            "runs": self.begun.runs,
        }
        self.sweep.add(TRIALS, line)


def begin(
    sweep: Sweep, number: int, space: Space, point: dict[str, Any] | None, baseline: bool, study: optuna.Study
) -> optuna.Trial:
    """Begins a trial, or goes on with one that was left. point: its values, if the sampler does not make them; study:
    empty, with sampler and pruner."""
    begun, fill_in = sweep.begun.get(number), fill(study, sweep.finished, space)
    if known := begun.values if begun else point:
        fill_in.enqueue_trial(known)
    trial = fill_in.ask(distributions(space))
    if begun is None:
        sweep.add(RUNNING, {"trial": number, "values": trial.params, "baseline": baseline})
    return trial


def fill(study: optuna.Study, lines: Sequence[dict[str, Any]], space: Space) -> optuna.Study:
    """Adds finished trials to an empty study."""
    for line in lines:
        pruned = line["outcome"] == "pruned" and not line["runs"]  # in its first run, by Hyperband
        study.add_trial(
            optuna.trial.create_trial(
                state=TrialState.PRUNED if pruned else TrialState.COMPLETE,
                params=line["values"],
                distributions=distributions(space),
                value=None if pruned else line["bpb"],
                intermediate_values={int(at): value for at, value in line["reported"].items() if value is not None},
                user_attrs={"outcome": line["outcome"]},
                system_attrs=line.get("brackets", {}),
            )
        )
    return study
