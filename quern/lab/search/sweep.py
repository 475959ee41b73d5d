"""`quern lab sweep`: searches the fields of a recipe for the lowest validation bits per byte, with Optuna.

A trial trains one set of values on the same seeds as every other trial; its value is the mean of the final bits per
byte. A run that diverges counts as `verdict.WORST`. The records hold everything: a sweep can be killed at any moment
and started again, and any number of workers may share its folder (search/trials.py). The value of the best trial is too
good, because it was selected: confirm it with `quern lab compare` on other seeds.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quern.child import environment
from quern.lab.names import check_name, compare_facts
from quern.lab.options import SweepOptions
from quern.lab.search.space import Space, read_space
from quern.recipe import Recipe
from quern.records import read_json
from quern.resolve import resolve
from quern.temporaries import alone_in, write_whole
from quern.terminal import counted
from quern.validate import install

if TYPE_CHECKING:
    import optuna

    from quern.lab.trainer import Trainer

FEWEST_SEEDS_TO_PRUNE = 5
"""Wilcoxon's test on four pairs or fewer hardly reaches the threshold."""
REDUCTION = 2
"""Hyperband's factor between the budgets of a bracket: four brackets for 8 evaluations."""
PLAN = "sweep.json"
PARENT = "QUERN_SWEEP_PARENT"
"""Variable: the process id of the sweep that started this worker."""


def run(
    options: SweepOptions,
    log: Callable[[str], None],
    trainer: Trainer,
    command: Sequence[str] = (),
    variables: Callable[[int], Mapping[str, str]] = lambda worker: {},
    facts: dict[str, Any] | None = None,
    source: str | None = None,
) -> int:
    """Runs trials until all have finished, then writes and logs the results.

    Args:
        options: Of the sweep.
        log: Takes lines for the user.
        trainer: Trains the runs.
        command: With several workers, the command line that starts one more; `--workers 1` is appended.
        variables: Environment variables of a worker by its number, from 1, such as the GPU that it uses.
        facts: Of this start, as from `names.start_facts`; those of the study's first start are kept.
        source: The text of the recipe's file, if it has one.

    Returns:
        The exit code: 0.

    Raises:
        ValueError: An option or the space is wrong, or the study was started with others or on another kind of device.
        ImportError: The extra `lab` is not installed.
    """
    try:
        import optuna

        from quern.lab.search.results import write_results
        from quern.lab.search.trials import Plan, Trials, end_with, fill, run_trial
    except ImportError as error:
        raise ImportError(f"sweeps need extra packages ({error}): {install('lab')}") from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    baseline = resolve(options.recipe)
    space = read_space(options.space, baseline)
    _check(options, space)
    points, own = _points(options, space, baseline)
    wanted = len(points) if options.sampler == "grid" else options.trials
    plan = Plan(
        options.recipe.to_json(),
        space.texts(),
        [[baseline.seed + pair, baseline.seed + pair] for pair in range(options.seeds)],
        options.pruner,
        options.evaluations,
        options.sampler == "grid",
        source,
    )
    start = _keep_plan(options.folder, asdict(plan), facts, log)

    def make_study(number: int) -> optuna.Study:
        return optuna.create_study(study_name=options.name, sampler=_sampler(options, number), pruner=_pruner(options))

    trials = Trials(options.folder, wanted, points, own, space, make_study, log)
    parent = environment().get(PARENT)
    if parent:
        threading.Thread(target=end_with, args=(int(parent),), daemon=True).start()
    log(f"sweep {options.name}: {_summary(options, space, wanted, len(trials.finished()))}")
    if "train.batch_tokens" in space.texts() and options.recipe.train.steps is not None:
        log("note: train.steps is fixed, so trials with larger batches train on more tokens")
    if not own and options.sampler != "grid":
        log("note: the space does not contain the recipe's own values, so no trial is the baseline")
    with _more_workers(options, command, variables, log):
        for claim, trial in trials:
            ended = run_trial(claim, trial, trials, plan, options.recipe, trainer)
            finished = trials.finished()
            best = min((one["bpb"] for one in finished if one["outcome"] != "pruned"), default=None)
            shown = "" if best is None else f", best {best:.4f}"
            log(f"{ended}; {len(finished):,} of {wanted:,} finished{shown}")
    if parent is None:
        study = fill(make_study(0), trials.finished(), space)
        for line in write_results(options.folder, study, trials.finished(), space, asdict(plan), start):
            log(line)
    return 0


# Options ----------------------------------------------------------------------------------------------------


def _check(options: SweepOptions, space: Space) -> None:
    if options.recipe.train.minutes is not None:
        raise ValueError("a trial trains for steps, so that trials are comparable: give --train.steps")
    check_name(options.name)
    without = [one for one in space.dimensions if not one.values()]
    if options.sampler == "grid" and without:
        name = without[0].name.replace("_", "-")
        raise ValueError(
            f"a grid needs the values of {name}, not the range {without[0].text}: "
            f"list them ({name}=A,B,C) or give a step ({name}=LOW..HIGH:STEP)"
        )
    if options.pruner == "wilcoxon" and options.seeds < FEWEST_SEEDS_TO_PRUNE:
        raise ValueError(
            f"--pruner wilcoxon needs --seeds {FEWEST_SEEDS_TO_PRUNE} or more: with {options.seeds} it has too few "
            "pairs; use --pruner hyperband or none"
        )
    if options.pruner == "hyperband" and options.evaluations < REDUCTION**2:
        raise ValueError(f"--pruner hyperband needs --evaluations {REDUCTION**2} or more, not {options.evaluations}")


def _points(options: SweepOptions, space: Space, baseline: Recipe) -> tuple[list[dict[str, Any]], bool]:
    """The trials with fixed values: all of a grid, or the recipe's own values, for comparison; and whether the first
    one is the recipe's own."""
    if options.sampler == "grid":
        names = [one.name for one in space.dimensions]
        rows = itertools.product(*(one.values() for one in space.dimensions))
        return [dict(zip(names, row, strict=True)) for row in rows], False
    own = space.point(baseline)
    return ([], False) if own is None else ([own], True)


def _sampler(options: SweepOptions, number: int) -> optuna.samplers.BaseSampler:
    """A sampler whose random numbers differ from those of other trials."""
    import numpy as np
    from optuna import samplers

    seed = int(np.random.SeedSequence((options.sampler_seed, number)).generate_state(1)[0])
    if options.sampler == "gp":
        return samplers.GPSampler(seed=seed, deterministic_objective=False)
    return samplers.TPESampler(seed=seed) if options.sampler == "tpe" else samplers.RandomSampler(seed=seed)


def _pruner(options: SweepOptions) -> optuna.pruners.BasePruner:
    import warnings

    from optuna import pruners
    from optuna.exceptions import ExperimentalWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        if options.pruner == "wilcoxon":
            return pruners.WilcoxonPruner()
        if options.pruner == "hyperband":
            return pruners.HyperbandPruner(min_resource=1, max_resource=options.evaluations, reduction_factor=REDUCTION)
    return pruners.NopPruner()


def _keep_plan(
    folder: Path, plan: dict[str, Any], facts: dict[str, Any] | None, log: Callable[[str], None]
) -> dict[str, Any] | None:
    """Writes the plan and the facts of a new study. Raises ValueError if the study has others. Returns its facts."""
    path, ours = folder / PLAN, json.loads(json.dumps(plan))
    with alone_in(folder, log):
        if not path.exists():
            write_whole(path, json.dumps({"plan": ours, "facts": facts}, indent=1) + "\n")
        before = read_json(path, dict[str, Any])
    changed = [name for name in ours if ours[name] != before["plan"].get(name)]
    if changed:
        raise ValueError(
            f"the study '{folder.name}' was started with another {', '.join(changed)}: give the same arguments, "
            "or name another study with --study"
        )
    if warning := compare_facts(folder.name, before["facts"], facts):
        log(warning)
    return before["facts"]


def _summary(options: SweepOptions, space: Space, wanted: int, finished: int) -> str:
    done = f", {finished:,} of them finished" if finished else ""
    fields = f"{len(space.dimensions)} field{'s'[: len(space.dimensions) != 1]}"
    trials, seeds = counted(wanted, "trial"), counted(options.seeds, "seed")
    return f"{trials}{done}, {options.sampler} over {fields}, {seeds} each; everything is in {options.folder}"


# Workers ----------------------------------------------------------------------------------------------------


@contextmanager
def _more_workers(
    options: SweepOptions,
    command: Sequence[str],
    variables: Callable[[int], Mapping[str, str]],
    log: Callable[[str], None],
) -> Iterator[None]:
    """Runs the other workers of this machine beside the body. They end by themselves, or with this process."""
    if options.workers > 1 and not command:
        raise ValueError("--workers needs the command that starts a worker")
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(1, options.workers):
            options.folder.mkdir(parents=True, exist_ok=True)
            env = {**environment(), PARENT: str(os.getpid()), **variables(number)}
            with (options.folder / f"worker-{number}.log").open("ab") as output:
                arguments = [*command, "--workers", "1"]
                workers.append(subprocess.Popen(arguments, stdout=output, stderr=output, env=env))
        yield
        for number, worker in enumerate(workers, 1):
            if worker.wait() != 0:
                log(f"worker {number} ended with code {worker.returncode}: see {options.folder}/worker-{number}.log")
    finally:
        for worker in workers:
            worker.terminate()
            worker.wait()
