"""`quern lab sweep`: searches the fields of a recipe for the lowest validation bits per byte, with Optuna.

docs/sweeps.md explains trials, kills and workers. Claims work as in all studies (lab/study.py), not by Optuna's
heartbeat: that needs a database, notices a dead worker after minutes, and repeats its trial under another number.

`sweep.jsonl` has a line for each finished trial. `running.jsonl` has lines of the trials that have begun: their values,
each finished run, each error. A trial whose worker died goes on after its finished runs. Optuna's study is made from
these records for each trial, in memory.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from textwrap import shorten
from typing import Any

import numpy as np
import optuna
import torch
from optuna import pruners, samplers
from optuna.exceptions import ExperimentalWarning, TrialPruned
from optuna.trial import TrialState

from quern.lab.options import SweepOptions
from quern.lab.search.results import MEASURED, TRIALS, write_results
from quern.lab.search.space import Space, apply, distributions, point, read_space, shown
from quern.lab.study import Study
from quern.lab.trainer import Point, Trainer
from quern.lab.verdict import WORST, score
from quern.process import end_with_parent, environment, own_place
from quern.recipe import Recipe
from quern.records import read_lines
from quern.resolve import resolve
from quern.terminal import counted
from quern.validate import flag

FEWEST_SEEDS_TO_PRUNE = 5  # Wilcoxon's test on four pairs or fewer hardly reaches the threshold
REDUCTION = 2  # Hyperband's factor between the budgets of a bracket: four brackets for 8 evaluations
WORKER = "QUERN_SWEEP_WORKER"  # the variable of a worker, which ends with the sweep that started it
RUNNING = "running.jsonl"
SHOWN_FIELDS, SHOWN_REASON = 5, 200
MOST_FAILURES = 2  # a trial that errors have ended so often is not tried again
BRACKETS = "completed_rung_"  # prefix of the attributes in which Hyperband keeps a trial's state


def run(
    options: SweepOptions,
    log: Callable[[str], None],
    trainer: Trainer,
    command: Sequence[str] = (),
    variables: Callable[[int], Mapping[str, str]] = lambda worker: {},
    facts: dict[str, Any] | None = None,
    source: str | None = None,
) -> int:
    """Runs trials until all have finished, then writes and logs the results. Returns the exit code. command: starts one
    more worker, with `--workers 1`; variables: environment of a worker by its number, from 1; facts: facts of this
    start, as from `study.start_facts`; source: the text of the recipe's file."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    baseline = resolve(options.recipe)
    space = space_of(options)
    points = _points(options, space, baseline)
    wanted = len(points) if options.sampler == "grid" else options.trials
    sweep = Sweep.register(options.folder, _plan(options, space, baseline.seed, source) | {"facts": facts})
    sweep.compare_facts(facts, log)
    if is_worker := WORKER in environment():
        threading.Thread(target=end_with_parent, args=(sys.stdin,), daemon=True).start()
    done = f", {len(sweep.finished):,} finished before" if sweep.finished else ""
    fields, seeds = counted(len(space), "field"), counted(options.seeds, "seed")
    log(f"sweep {sweep.name}: {counted(wanted, 'trial')}{done}, {options.sampler} over {fields}, {seeds} each")
    log(f"everything is in {options.folder}")
    if "train.batch_tokens" in space and options.recipe.train.steps is not None:
        log("note: train.steps is fixed, so trials with larger batches train on more tokens")
    if not points:
        log("note: the space does not contain the recipe's own values, so no trial is the baseline")

    def do(number: int) -> None:
        if number in sweep.begun:
            log(f"trial {number} was left unfinished: it goes on")
        fixed = points[number] if number < len(points) else None
        study = optuna.create_study(study_name=sweep.name, sampler=_sampler(options, number), pruner=_pruner(options))
        trial = begin(sweep, number, space, fixed, study)
        ended = Trial(sweep, number, options.recipe, trial).run(trainer, log)
        best = min((one["bpb"] for one in sweep.finished if one["outcome"] != "pruned"), default=None)
        shown = "" if best is None else f", best {best:.4f}"
        log(f"{ended}; {len(sweep.finished):,} of {wanted:,} finished{shown}")

    def missing() -> list[int]:
        return sorted(set(range(wanted)) - {line["trial"] for line in sweep.finished})

    with _more_workers(options, command, variables, log):
        sweep.work(missing, lambda number: f"trial-{number}", do)
    if not is_worker:
        study = fill(optuna.create_study(study_name=sweep.name), sweep.finished, space)
        for line in write_results(sweep, sweep.finished, study, space):
            log(line)
    return 0


# Options ----------------------------------------------------------------------------------------------------


def _plan(options: SweepOptions, space: Space, seed: int, source: str | None) -> dict[str, Any]:
    """The plan on which every worker and every later start of the sweep must agree."""
    return {
        "recipe": options.recipe.to_json(),
        "space": {name: one.text for name, one in space.items()},
        "seeds": [[seed + pair, seed + pair] for pair in range(options.seeds)],
        "pruner": options.pruner,
        "evaluations": options.evaluations,
        "grid": options.sampler == "grid",
        "source": source,
    }


def space_of(options: SweepOptions) -> Space:
    """The space of the search. Raises ValueError for a wrong one, and for flags that do not fit."""
    space = read_space(options.space, resolve(options.recipe))
    for name, one in space.items() if options.sampler == "grid" else ():
        if not one.values():
            raise ValueError(f"a grid needs the values of {flag(name)}, not {one.text}: give A,B,C or LOW..HIGH:STEP")
    if options.pruner == "wilcoxon" and options.seeds < FEWEST_SEEDS_TO_PRUNE:
        raise ValueError(f"--pruner wilcoxon needs --seeds {FEWEST_SEEDS_TO_PRUNE} or more, not {options.seeds}")
    if options.pruner == "hyperband" and options.evaluations < REDUCTION**2:
        raise ValueError(f"--pruner hyperband needs --evaluations {REDUCTION**2} or more, not {options.evaluations}")
    return space


def _points(options: SweepOptions, space: Space, baseline: Recipe) -> list[dict[str, Any]]:
    """The trials with fixed values: all of a grid, or the recipe's own values, for comparison."""
    if options.sampler == "grid":
        rows = itertools.product(*(one.values() for one in space.values()))
        return [dict(zip(space, row, strict=True)) for row in rows]
    own = point(space, baseline)
    return [] if own is None else [own]


def _sampler(options: SweepOptions, number: int) -> optuna.samplers.BaseSampler:
    """A sampler with random numbers that no other trial has."""
    seed = int(np.random.SeedSequence((0, number)).generate_state(1)[0])
    if options.sampler == "gp":
        return samplers.GPSampler(seed=seed, deterministic_objective=False)
    return samplers.TPESampler(seed=seed) if options.sampler == "tpe" else samplers.RandomSampler(seed=seed)


def _pruner(options: SweepOptions) -> optuna.pruners.BasePruner:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        if options.pruner == "wilcoxon":
            return pruners.WilcoxonPruner()
        if options.pruner == "hyperband":
            return pruners.HyperbandPruner(min_resource=1, max_resource=options.evaluations, reduction_factor=REDUCTION)
    return pruners.NopPruner()


# Workers ----------------------------------------------------------------------------------------------------


@contextmanager
def _more_workers(
    options: SweepOptions,
    command: Sequence[str],
    variables: Callable[[int], Mapping[str, str]],
    log: Callable[[str], None],
) -> Iterator[None]:
    """Runs the other workers of this machine beside the body. They end by themselves, or with this process."""
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(1, options.workers):
            env, words = {**environment(), WORKER: "1", **variables(number)}, [*command, "--workers", "1"]
            with (options.folder / f"worker-{number}.log").open("ab") as out:
                workers.append(subprocess.Popen(words, env=env, stdin=subprocess.PIPE, stdout=out, stderr=out))
        yield
        for number, worker in enumerate(workers, 1):
            if worker.wait() != 0:
                log(f"worker {number} ended with code {worker.returncode}: see {options.folder}/worker-{number}.log")
    finally:
        for worker in workers:
            with worker:
                worker.terminate()


# Trials -----------------------------------------------------------------------------------------------------


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

    def run(self, trainer: Trainer, log: Callable[[str], None]) -> str:
        """Trains the trial and records its value. Returns a line about it. An error ends the worker; after
        `MOST_FAILURES` of them the trial is finished as "failed"."""
        reason, began = None, time.time()
        try:
            outcome, value, reason = self._measure(trainer)
        except TrialPruned:
            outcome, value = "pruned", list(self._reported().values())[-1]
        except (MemoryError, torch.OutOfMemoryError) as error:
            outcome, value, reason = "out of memory", WORST, str(error)
        except OSError:  # of the disk: the values are not the reason
            raise
        except Exception as error:
            reason = f"{own_place(error)}{type(error).__name__}: {error}"
            self.sweep.add(RUNNING, {"trial": self.number, "failure": reason})
            if self.begun.failures < MOST_FAILURES:
                log(f"trial {self.number} failed: {reason}")
                raise
            outcome, value = "failed", WORST
        if outcome not in MEASURED and self.sweep.body["pruner"] == "wilcoxon":
            for pair in range(len(self.begun.runs), len(self.sweep.body["seeds"])):
                self.optuna.report(WORST, pair)  # its test needs all seeds if the trial is the best
        attributes = self.optuna.study.trials[self.optuna.number].system_attrs
        line = {
            "trial": self.number,
            "outcome": outcome,
            "reason": reason,
            "bpb": value,
            "values": self.begun.values,
            "baseline": self.begun.baseline,
            "seconds": time.time() - began,
            "reported": {str(step): one for step, one in self._reported().items()},
            "brackets": {name: value for name, value in attributes.items() if name.startswith(BRACKETS)},
            "runs": self.begun.runs,
        }
        self.sweep.add(TRIALS, line)
        texts = [f"{flag(name)}={shown(value)}" for name, value in self.begun.values.items()]
        more = " …" if len(texts) > SHOWN_FIELDS else ""
        why = f" ({shorten(reason.partition(chr(10))[0], SHOWN_REASON, placeholder=' …')})" if reason else ""
        told = f"trial {self.number}: {value:.4f} bits per byte, {outcome}{why}"
        return f"{told}; {' '.join(texts[:SHOWN_FIELDS])}{more}"

    def _measure(self, trainer: Trainer) -> tuple[str, float, str | None]:
        """Trains the runs that the trial still lacks. Returns the outcome, the mean of the scores, and a reason."""
        plan, recipe = self.sweep.body, apply(self.recipe, self.begun.values)
        try:
            trainer.check(recipe)
        except ValueError as error:
            return "refused", WORST, str(error)
        scores: list[float] = []
        for pair, (seed, data_seed) in enumerate(plan["seeds"]):
            if pair >= len(self.begun.runs):
                train = partial(trainer.train, recipe, name=f"trial {self.number}", seed=seed, data_seed=data_seed)
                if plan["pruner"] == "hyperband" and pair == 0:
                    train = partial(train, on_eval=self._report)
                done = train(evaluations=plan["evaluations"])
                self.sweep.add(RUNNING, {"trial": self.number, "run": asdict(done)})
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

    def _reported(self) -> dict[int, float]:
        return self.optuna.study.trials[self.optuna.number].intermediate_values


def begin(sweep: Sweep, number: int, space: Space, values: dict[str, Any] | None, study: optuna.Study) -> optuna.Trial:
    """Begins a trial, or goes on with one that was left. values: its own, if the sampler does not make them; study:
    empty, with sampler and pruner."""
    begun, fill_in = sweep.begun.get(number), fill(study, sweep.finished, space)
    if known := begun.values if begun else values:
        fill_in.enqueue_trial(known)
    trial = fill_in.ask(distributions(space))
    if begun is None:
        baseline = values is not None and not sweep.body["grid"]
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
                intermediate_values={int(at): value for at, value in line["reported"].items()},
                user_attrs={"outcome": line["outcome"]},
                system_attrs=line.get("brackets", {}),
            )
        )
    return study
