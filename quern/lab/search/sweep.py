"""`quern lab sweep`: searches the fields of a recipe for the lowest validation bits per byte, with Optuna.

docs/sweeps.md explains trials, kills and workers (trials.py). Claims are those of all studies (lab/study.py), not
Optuna's heartbeat: that needs a database, notices a dead worker after minutes, and repeats its trial under another
number.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import optuna
from optuna import pruners, samplers
from optuna.exceptions import ExperimentalWarning

from quern.lab.options import SweepOptions
from quern.lab.search.results import write_results
from quern.lab.search.space import Space, point, read_space
from quern.lab.search.trials import Sweep, Trial, begin, fill
from quern.lab.trainer import Trainer
from quern.process import end_with_parent, environment
from quern.recipe import Recipe
from quern.resolve import resolve
from quern.terminal import counted
from quern.validate import flag

FEWEST_SEEDS_TO_PRUNE = 5  # Wilcoxon's test on four pairs or fewer hardly reaches the threshold
REDUCTION = 2  # Hyperband's factor between the budgets of a bracket: four brackets for 8 evaluations
WORKER = "QUERN_SWEEP_WORKER"  # the variable of a worker, which ends with the sweep that started it


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
    more worker, with `--workers 1`; variables: environment of a worker by its number, from 1; facts: of this start, as
    from `study.start_facts`; source: the text of the recipe's file."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    baseline = resolve(options.recipe)
    space = read_space(options.space, baseline)
    _check(options, space)
    points, is_grid = _points(options, space, baseline), options.sampler == "grid"
    wanted = len(points) if is_grid else options.trials
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
        trial = begin(sweep, number, space, fixed, fixed is not None and not is_grid, study)
        ended = Trial(sweep, number, options.recipe, trial).run(trainer, log)
        best = min((one["bpb"] for one in sweep.finished if one["outcome"] != "pruned"), default=None)
        shown = "" if best is None else f", best {best:.4f}"
        log(f"{ended}; {len(sweep.finished):,} of {wanted:,} finished{shown}")

    with _more_workers(options, command, variables, log):
        sweep.work(lambda: sweep.missing(wanted), lambda number: f"trial-{number}", do)
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


def _check(options: SweepOptions, space: Space) -> None:
    if options.recipe.train.minutes is not None:
        raise ValueError("a trial trains for steps, so that trials are comparable: give --train.steps")
    for name, one in space.items() if options.sampler == "grid" else ():
        if not one.values():
            raise ValueError(
                f"a grid needs the values of {flag(name)}, not the range {one.text}: list them ({flag(name)}=A,B,C) or "
                f"give a step ({flag(name)}=LOW..HIGH:STEP)"
            )
    if options.pruner == "wilcoxon" and options.seeds < FEWEST_SEEDS_TO_PRUNE:
        raise ValueError(
            f"--pruner wilcoxon needs --seeds {FEWEST_SEEDS_TO_PRUNE} or more: with {options.seeds} it has too few "
            "pairs; use --pruner hyperband or none"
        )
    if options.pruner == "hyperband" and options.evaluations < REDUCTION**2:
        raise ValueError(f"--pruner hyperband needs --evaluations {REDUCTION**2} or more, not {options.evaluations}")


def _points(options: SweepOptions, space: Space, baseline: Recipe) -> list[dict[str, Any]]:
    """The trials with fixed values: all of a grid, or the recipe's own values, for comparison."""
    if options.sampler == "grid":
        rows = itertools.product(*(one.values() for one in space.values()))
        return [dict(zip(space, row, strict=True)) for row in rows]
    own = point(space, baseline)
    return [] if own is None else [own]


def _sampler(options: SweepOptions, number: int) -> optuna.samplers.BaseSampler:
    """A sampler whose random numbers differ from those of other trials."""
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
