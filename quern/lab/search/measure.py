"""Trains one trial of a sweep: its recipe on each of the plan's seeds."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import optuna
from optuna.exceptions import OptunaError, TrialPruned, UpdateFinishedTrialError
from optuna.trial import TrialState

from quern.lab.evidence import WORST, score
from quern.lab.search.queue import FAILURES, RUN, Queue
from quern.lab.search.space import Space, apply
from quern.recipe import Recipe
from quern.records import strict
from quern.resolve import resolve

if TYPE_CHECKING:
    from quern.lab.trainer import Trainer

SHOWN_FIELDS = 5
SHOWN_REASON = 100
MOST_FAILURES = 2
"""A trial that errors have ended so often is not tried again."""


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


def run_trial(
    trial: optuna.Trial,
    queue: Queue,
    plan: Plan,
    space: Space,
    recipe: Recipe,
    trainer: Trainer,
    log: Callable[[str], None],
) -> str:
    """Trains a trial and writes its value. Returns a line about it.

    An error fails the trial, which then starts again in another worker or at the next start. After `MOST_FAILURES`
    errors it is finished with the outcome "failed", so that the sweep can continue.
    """
    state, value = TrialState.COMPLETE, None
    try:
        values = space.suggest(trial)
        try:
            outcome, value = _measure(trial, plan, apply(recipe, values), trainer)
        except TrialPruned:
            outcome, state = "pruned", TrialState.PRUNED
        except (OptunaError, OSError):  # of the storage or the disk: the values are not the reason
            raise
        except Exception as error:
            if not _failed_before(trial, error):
                raise
            outcome, value = "failed", WORST
            _report_missing(trial, plan)
        trial.set_user_attr("outcome", outcome)
    except UpdateFinishedTrialError:
        outcome, value, values = "lost", WORST, {}
    except Exception as error:
        log(f"trial {trial.number} failed: {type(error).__name__}: {error}")
        queue.finish(trial, TrialState.FAIL)
        raise
    if not queue.finish(trial, state, value):
        return f"trial {trial.number} was given to another worker while this one was silent: its result is dropped"
    shown = "" if value is None else f"{value:.4f} bits per byte, "
    texts = [f"{name.replace('_', '-')}={_shown(value)}" for name, value in values.items()]
    more = " …" if len(texts) > SHOWN_FIELDS else ""
    reason = trial.user_attrs.get("reason", "").partition("\n")[0][:SHOWN_REASON]
    outcome += f" ({reason})" if reason else ""
    return f"trial {trial.number}: {shown}{outcome}; {' '.join(texts[:SHOWN_FIELDS])}{more}"


def _failed_before(trial: optuna.Trial, error: Exception) -> bool:
    """Counts an error of a trial and of those that it repeats. Returns whether it is the last that is allowed."""
    failures = trial.user_attrs.get(FAILURES, 0) + 1
    trial.set_user_attr(FAILURES, failures)
    if failures >= MOST_FAILURES:
        trial.set_user_attr("reason", f"{type(error).__name__}: {error}")
    return failures >= MOST_FAILURES


def _measure(trial: optuna.Trial, plan: Plan, recipe: Recipe, trainer: Trainer) -> tuple[str, float]:
    """Trains the runs that the trial still lacks. Returns the outcome and the mean of the bits per byte."""
    scores: list[float] = []

    def give_up(outcome: str, reason: object) -> tuple[str, float]:
        trial.set_user_attr("reason", str(reason))
        _report_missing(trial, plan)
        return outcome, WORST

    try:
        resolve(recipe)
    except ValueError as error:
        return give_up("refused", error)
    for pair, (seed, data_seed) in enumerate(plan.seeds):
        body = trial.user_attrs.get(f"{RUN}{pair}")
        if body is None:
            try:
                done = trainer.train(
                    recipe,
                    name=f"{trial.study.study_name}-{trial.number}",
                    seed=seed,
                    data_seed=data_seed,
                    evaluations=plan.evaluations,
                    on_eval=_hyperband(trial) if plan.pruner == "hyperband" and pair == 0 else _ignore,
                )
            except (MemoryError, RuntimeError) as error:
                if not _out_of_memory(error):
                    raise
                return give_up("out of memory", error)
            body = strict(done.to_json())
            trial.set_user_attr(f"{RUN}{pair}", body)
        scores.append(score(body["bpb"]))
        _report(trial, plan, scores[-1], pair)
        if plan.pruner == "wilcoxon" and pair + 1 < len(plan.seeds) and trial.should_prune():
            # As Optuna advises: the mean so far tells the sampler more than "pruned". It is worse than the best trial.
            return "pruned", statistics.fmean(scores)
    return ("diverged" if WORST in scores else "finished"), statistics.fmean(scores)


def _hyperband(trial: optuna.Trial) -> Callable[[Any], None]:
    """Reports each validation of a run, and ends the run when the pruner asks for it."""
    count = itertools.count(1)

    def on_eval(point: Any) -> None:
        trial.report(score(point.bpb), next(count))
        if trial.should_prune():
            raise TrialPruned

    return on_eval


def _ignore(point: Any) -> None:
    """Lets the run continue."""


def _report(trial: optuna.Trial, plan: Plan, score: float, pair: int) -> None:
    """Tells Wilcoxon's test the value of a seed, which pairs it with the same seed of the best trial."""
    if plan.pruner == "wilcoxon":
        trial.report(score, pair)


def _report_missing(trial: optuna.Trial, plan: Plan) -> None:
    """Tells Wilcoxon's test the value of seeds that are not trained, which it needs if the trial is the best so far."""
    for pair in range(len(plan.seeds)):
        if f"{RUN}{pair}" not in trial.user_attrs:
            _report(trial, plan, WORST, pair)


def _out_of_memory(error: Exception) -> bool:
    import torch

    return isinstance(error, MemoryError | torch.OutOfMemoryError)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
