"""The trials of a sweep, in a folder that any number of workers share; each may die at any moment.

`sweep.jsonl` has the finished trials. A trial that runs has a file of its own, `running/NUMBER.jsonl`: its values, then
its finished runs. Its worker holds a lock on that file, which the kernel releases when the worker dies; another worker
then continues the trial. Optuna's study is made from these records for each new trial, in memory.
"""

from __future__ import annotations

import fcntl
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import optuna
from optuna.exceptions import TrialPruned
from optuna.trial import TrialState

from quern.lab.search.space import Space, apply
from quern.lab.verdict import WORST, score
from quern.recipe import Recipe
from quern.records import drop_torn_end, read_lines, strict
from quern.resolve import resolve
from quern.temporaries import alone_in, write_whole

TRIALS, RUNNING = "sweep.jsonl", "running"
LOOK_SECONDS = 1.0
SHOWN_FIELDS, SHOWN_REASON = 5, 100
MOST_FAILURES = 2
"""A trial that errors have ended so often is not tried again."""
BRACKETS = "completed_rung_"
"""What Hyperband remembers of a trial."""
MakeStudy = Callable[[int], optuna.Study]
"""(number of the new trial) → an empty study with its sampler and pruner."""


@dataclass
class Claim:
    """A trial that this worker runs. started: by the clock of `time.time`."""

    number: int
    values: dict[str, Any]
    baseline: bool
    file: TextIO
    runs: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.time)

    def note(self, **line: Any) -> None:
        """Appends a line to the trial's file, and waits until it is on the disk."""
        self.file.write(json.dumps(strict(line), allow_nan=False) + "\n")
        self.file.flush()
        os.fsync(self.file.fileno())


class Trials:
    """The trials of a sweep for one worker.

    Args:
        folder: Of the sweep.
        wanted: How many trials are to finish.
        points: The values of the first trials; the sampler makes the others.
        baseline: Whether the first point is the recipe's own values.
        space: Of the search.
        make_study: Makes Optuna's study for a new trial.
        log: Takes lines for the user.
    """

    def __init__(
        self,
        folder: Path,
        wanted: int,
        points: Sequence[dict[str, Any]],
        baseline: bool,
        space: Space,
        make_study: MakeStudy,
        log: Callable[[str], None],
    ) -> None:
        self.folder, self.wanted, self.points, self.baseline = folder, wanted, points, baseline
        self.space, self.make_study, self.log = space, make_study, log
        (folder / RUNNING).mkdir(parents=True, exist_ok=True)

    def finished(self) -> list[dict[str, Any]]:
        """The finished trials, by number."""
        return read_lines(self.folder / TRIALS)

    def __iter__(self) -> Iterator[tuple[Claim, optuna.Trial]]:
        """Yields trials to run until all are finished, those of other workers too. Finish each before the next."""
        while True:
            with self._alone():
                finished, running = self.finished(), self._running()
                if len(finished) >= self.wanted and not running:
                    return
                claim = self._abandoned(running) or self._new(finished, running)
            if claim is None:
                if len(finished) >= self.wanted:
                    return
                time.sleep(LOOK_SECONDS)
                continue
            try:
                yield claim, self._trial(claim, finished)
            finally:
                claim.file.close()

    def finish(self, claim: Claim, trial: optuna.Trial, outcome: str, value: float | None, reason: str | None) -> None:
        """Writes a finished trial to the records."""
        frozen = trial.study.trials[trial.number]
        line = {
            "trial": claim.number,
            "outcome": outcome,
            "reason": reason,
            "bpb": value,
            "values": claim.values,
            "baseline": claim.baseline,
            "seconds": time.time() - claim.started,
            "reported": {str(step): one for step, one in frozen.intermediate_values.items()},
            "brackets": {name: value for name, value in frozen.system_attrs.items() if name.startswith(BRACKETS)},
            "runs": claim.runs,
        }
        with self._alone():
            lines = sorted([*self.finished(), strict(line)], key=lambda one: one["trial"])
            write_whole(self.folder / TRIALS, "".join(json.dumps(one, allow_nan=False) + "\n" for one in lines))
            (self.folder / RUNNING / f"{claim.number}.jsonl").unlink()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with alone_in(self.folder, lambda line: None):
            yield

    def _running(self) -> dict[int, Path]:
        """The files of trials that are not finished. One whose trial is finished is left by a worker that died."""
        known = {one["trial"] for one in self.finished()}
        found = {int(path.stem): path for path in (self.folder / RUNNING).glob("*.jsonl")}
        for number in known & found.keys():
            found.pop(number).unlink()
        return dict(sorted(found.items()))

    def _abandoned(self, running: Mapping[int, Path]) -> Claim | None:
        for number, path in running.items():
            file = path.open("a+", encoding="utf-8")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                continue
            drop_torn_end(path)
            lines = read_lines(path)
            if not lines:  # its worker died before it had written the values
                file.close()
                path.unlink()
                return None
            self.log(f"trial {number} was left unfinished: it goes on")
            runs = [line["run"] for line in lines if "run" in line]
            failures = [line["failure"] for line in lines if "failure" in line]
            return Claim(number, lines[0]["values"], lines[0]["baseline"], file, runs, failures)
        return None

    def _new(self, finished: Sequence[dict[str, Any]], running: Mapping[int, Path]) -> Claim | None:
        taken = {one["trial"] for one in finished} | running.keys()
        number = next(number for number in range(len(taken) + 1) if number not in taken)
        if len(taken) >= self.wanted:
            return None
        if number < len(self.points):
            values = self.points[number]
        else:
            values = self.space.suggest(fill(self.make_study(number), finished, self.space).ask())
        file = (self.folder / RUNNING / f"{number}.jsonl").open("a+", encoding="utf-8")
        fcntl.flock(file, fcntl.LOCK_EX)
        claim = Claim(number, values, self.baseline and number == 0, file)
        claim.note(values=values, baseline=claim.baseline)
        return claim

    def _trial(self, claim: Claim, finished: Sequence[dict[str, Any]]) -> optuna.Trial:
        """Optuna's trial with the values of a claim, for reports and pruning."""
        study = fill(self.make_study(claim.number), finished, self.space)
        study.enqueue_trial(claim.values)
        trial = study.ask()
        self.space.suggest(trial)
        return trial


def fill(study: optuna.Study, lines: Sequence[dict[str, Any]], space: Space) -> optuna.Study:
    """Adds finished trials to an empty study."""
    probe = optuna.create_study().ask()
    space.suggest(probe)
    for line in lines:
        reported = {int(step): value for step, value in line["reported"].items() if value is not None}
        pruned = line["outcome"] == "pruned" and not line["runs"]  # in its first run, by Hyperband
        study.add_trial(
            optuna.trial.create_trial(
                state=TrialState.PRUNED if pruned else TrialState.COMPLETE,
                params=line["values"],
                distributions=probe.distributions,
                value=None if pruned else line["bpb"],
                intermediate_values=reported,
                user_attrs={"outcome": line["outcome"]},
                system_attrs=line.get("brackets", {}),
            )
        )
    return study


@dataclass(frozen=True)
class Plan:
    """What every trial of a study has in common. It must not change between starts.

    Args:
        recipe: As JSON.
        space: The values of each field, as text.
        seeds: (seed, data seed) of each run of a trial.
        pruner: As in the options.
        evaluations: Validations of each run.
        grid: All trials are points of a grid.
        source: The text of the recipe's file, if it has one.
    """

    recipe: dict[str, Any]
    space: dict[str, str]
    seeds: list[list[int]]
    pruner: str
    evaluations: int
    grid: bool
    source: str | None = None


def run_trial(claim: Claim, trial: optuna.Trial, trials: Trials, plan: Plan, recipe: Recipe, trainer: Any) -> str:
    """Trains a trial and writes its value. Returns a line about it.

    An error ends the worker, and the next start or another worker goes on with the trial. After `MOST_FAILURES` errors
    it is finished with the outcome "failed", so that the sweep can continue.
    """
    reason: str | None = None
    try:
        outcome, value, reason = _measure(claim, trial, plan, apply(recipe, claim.values), trainer)
    except TrialPruned:
        outcome, value = "pruned", list(trial.study.trials[trial.number].intermediate_values.values())[-1]
    except OSError:  # of the disk: the values are not the reason
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        claim.note(failure=reason)
        if len(claim.failures) + 1 < MOST_FAILURES:
            trials.log(f"trial {claim.number} failed: {reason}")
            raise
        outcome, value = "failed", WORST
        _report_missing(claim, trial, plan)
    trials.finish(claim, trial, outcome, value, reason)
    shown = "" if value is None else f"{value:.4f} bits per byte, "
    texts = [f"{name.replace('_', '-')}={_shown(value)}" for name, value in claim.values.items()]
    more = " …" if len(texts) > SHOWN_FIELDS else ""
    why = f" ({reason.partition(chr(10))[0][:SHOWN_REASON]})" if reason else ""
    return f"trial {claim.number}: {shown}{outcome}{why}; {' '.join(texts[:SHOWN_FIELDS])}{more}"


def _measure(
    claim: Claim, trial: optuna.Trial, plan: Plan, recipe: Recipe, trainer: Any
) -> tuple[str, float, str | None]:
    """Trains the runs that the trial still lacks. Returns the outcome, the mean of the bits per byte, and a reason."""
    try:
        resolve(recipe)
    except ValueError as error:
        _report_missing(claim, trial, plan)
        return "refused", WORST, str(error)
    for pair, (seed, data_seed) in enumerate(plan.seeds):
        if pair >= len(claim.runs):
            hyperband = plan.pruner == "hyperband" and pair == 0
            how: dict[str, Any] = {"on_eval": _reporter(trial)} if hyperband else {}
            try:
                done = trainer.train(
                    recipe,
                    name=f"trial {claim.number}",
                    seed=seed,
                    data_seed=data_seed,
                    evaluations=plan.evaluations,
                    **how,
                )
            except (MemoryError, RuntimeError) as error:
                if not _out_of_memory(error):
                    raise
                _report_missing(claim, trial, plan)
                return "out of memory", WORST, str(error)
            claim.runs.append(strict(done.to_json()))
            claim.note(run=claim.runs[-1])
        if plan.pruner == "wilcoxon":
            trial.report(score(claim.runs[pair]["bpb"]), pair)
            if pair + 1 < len(plan.seeds) and trial.should_prune():
                # As Optuna advises: the mean so far tells the sampler more than "pruned".
                return "pruned", statistics.fmean(score(one["bpb"]) for one in claim.runs[: pair + 1]), None
    scores = [score(one["bpb"]) for one in claim.runs]
    return ("diverged" if WORST in scores else "finished"), statistics.fmean(scores), None


def _reporter(trial: optuna.Trial) -> Callable[[Any], None]:
    """Reports each validation of a run, and ends the run when the pruner asks for it."""
    count = iter(range(1, 1_000_000))

    def on_eval(point: Any) -> None:
        trial.report(score(point.bpb), next(count))
        if trial.should_prune():
            raise TrialPruned

    return on_eval


def _report_missing(claim: Claim, trial: optuna.Trial, plan: Plan) -> None:
    """Tells Wilcoxon's test the value of seeds that are not trained, which it needs if the trial is the best so far."""
    if plan.pruner == "wilcoxon":
        for pair in range(len(claim.runs), len(plan.seeds)):
            trial.report(WORST, pair)


def _out_of_memory(error: Exception) -> bool:
    import torch

    return isinstance(error, MemoryError | torch.OutOfMemoryError)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def end_with(parent: int) -> None:
    """In a thread of a worker: ends the process when the one that started it has ended."""
    while os.getppid() == parent:
        with suppress(InterruptedError):
            time.sleep(LOOK_SECONDS)
    os._exit(1)
