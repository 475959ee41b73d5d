"""The one training loop, for pretraining and fine-tuning alike; they differ in their batches and schedules.

What happens around the steps is passed in: evaluators as (every, function), records as `Records`, progress as
a function. Time is counted in steps only: evaluation, saving and the first step after a start, which compiles, are
left out.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quern.data.batch import Batch, BatchSource
from quern.data.loader import prefetch
from quern.machine import Machine
from quern.mesh import FIRST_STEP, SAMPLING, TRAINING, Mesh
from quern.model.count import FlopCounter
from quern.optim.schedule import Multipliers
from quern.records import Records
from quern.train import checkpoint, manifest
from quern.train.guard import EXIT_DIVERGED, EXIT_DONE, EXIT_NOT_SAVED, EXIT_STOPPED, Stop
from quern.train.heartbeat import StragglerDetector
from quern.train.horizon import Horizon, Plan
from quern.train.replicas import refuse_unequal_replicas
from quern.train.saver import Saver
from quern.train.state import TrainState
from quern.train.step import DeviceBatch, StepResult, send_batch, train_on

Evaluator = Callable[[TrainState], dict[str, Any]]


@dataclass(frozen=True)
class TrainingPlan:
    """The plan of one stage. peak_flops (of the machine, per second) feeds the MFU."""

    steps: int
    """Steps of the first plan, where there is a budget."""
    schedule: Callable[[float], Multipliers]
    micro_batch_rows: int
    """Rows in one forward pass."""
    clip_norm: float | None
    log_every: int
    save_every: int | None
    """Steps between checkpoints; None saves none, not even at the end."""
    keep: int
    flops: FlopCounter
    peak_flops: float
    evaluators: Sequence[tuple[int, Evaluator]] = ()
    save_in_background: bool = False
    row_tokens: int | None = None
    """Tokens of the rows that micro_batch_rows counts; a forward pass has more of shorter ones. None: all are equal."""
    keep_step: int | None = None
    """A step that is saved and whose checkpoint is never removed: the last one before the rates fall."""
    budget_seconds: float | None = None
    """Time in steps that the run takes: the steps are planned again while it trains (horizon.py)."""
    recorded: Sequence[Plan] = ()
    """Plans that the run made before it was interrupted, for the steps that it repeats."""
    go_on: str = "--resume"
    """The command that continues after a stop, for messages."""
    lower_rates: str = "--optim.lr-scale"
    """The flag that halves the rates, for messages."""
    meta: dict[str, Any] = field(default_factory=dict)
    """Goes into every checkpoint beside the state: the recipe, the tokenizer's fingerprint, …"""


def train(
    state: TrainState,
    loader: BatchSource,
    plan: TrainingPlan,
    machine: Machine,
    folder: Records,
    log: Callable[[str], None],
    advance: Callable[[TrainState, dict[str, Any]], None] = lambda state, line: None,
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """Trains from state.step to the end of the plan; returns an exit code of `guard.py`.

    log: takes lines for the user; advance: called after each step with its loss, and the speed once that is known.
    clock: read before and after each step.
    SIGTERM and SIGINT finish the step, save and return EXIT_STOPPED.
    """
    refuse_unequal_replicas(state)
    folder.rewind(state.step)  # also where a run died before its first checkpoint
    if plan.budget_seconds is None:
        state.plans = []
    horizon = Horizon(plan.steps, state.plans, plan.budget_seconds, state.seconds, plan.recorded)
    more = {"plans": plan.recorded} if plan.recorded else {}
    folder.event("resume" if state.step else "start", step=state.step, steps=horizon.steps, **more)
    window, stragglers = _Window(), StragglerDetector()
    fresh, own_seconds = True, 0.0
    mesh = state.optimizer.mesh
    saver = Saver(folder.path / "checkpoints", folder, plan.keep, plan.save_in_background)
    with (
        Stop(alone=mesh.world.size == 1) as stop,
        closing(_batches(state, loader, plan, horizon, machine, stop)) as batches,
    ):
        for batch in batches:
            mesh.progress.begin_step(state.step, FIRST_STEP if fresh else TRAINING)
            told = _exchange(stop, own_seconds, horizon, state, mesh, machine)
            start, waited = clock(), mesh.waited_seconds()
            _seed_draws(state, plan)
            multipliers = plan.schedule(horizon.place(state.step))
            result = train_on(state, batch, multipliers, machine, plan.clip_norm)
            seconds = clock() - start
            own_seconds = seconds - mesh.waited_seconds() + waited
            _count(state, result, seconds, window, folder, None if fresh else horizon)
            fresh = False
            advance(state, {"loss": result.loss} | window.speed())
            if result.verdict == "stop":
                return _diverged(state, saver, plan, folder, log)
            signals, times, wanted = told()
            if horizon.decide(state.step, int(wanted[0])):
                folder.event("plan", step=state.step, steps=horizon.steps, seconds=round(state.seconds, 3))
            if state.step % plan.log_every == 0 or state.step == horizon.steps:
                _log(state, result, window, plan, multipliers.lr, folder)
                window = _Window(window.rate())
            stopping = any(signals) and state.step < horizon.steps
            if times and (slow := stragglers.observe(times)):
                folder.event("slow", step=state.step, reason=slow)
                log(slow)
            _evaluate(state, plan, horizon, folder)
            if _save_is_due(state.step, plan, horizon, stopping):
                try:
                    _save(state, saver, plan, horizon, last=stopping or state.step == horizon.steps)
                except checkpoint.CheckpointError as error:
                    return _not_saved(error, state, folder, log)
            if stopping:
                return _stopped(state, plan, folder, log)
        if state.step < horizon.steps:  # stopped while it waited for text
            try:
                saver.settle()
                if plan.save_every and state.step not in manifest.steps(folder.path / "checkpoints"):
                    _save(state, saver, plan, horizon, last=True)
            except checkpoint.CheckpointError as error:
                return _not_saved(error, state, folder, log)
            return _stopped(state, plan, folder, log)
    folder.event("finish", step=state.step, tokens=state.tokens, seconds=round(state.seconds, 3))
    return EXIT_DONE


def _exchange(
    stop: Stop, seconds: float, horizon: Horizon, state: TrainState, mesh: Mesh, machine: Machine
) -> Callable[[], list[Any]]:
    """Starts to tell every rank whether a signal has reached this one, how long its previous step took, and how many
    steps the run should have by its clock.

    All ranks stop after the same step. A signal to one of several ranks during a step counts from the next step on.

    Returns:
        A function to call after the step, whose wait for the device covers the exchange. It returns three lists with a
        value of each rank: the signals, the seconds and the steps wanted, of which rank 0's counts. A process alone
        hears at once, and has no seconds to compare.
    """
    if mesh.world.size == 1:
        return lambda: [[stop.requested], [], [horizon.wanted(state.step, state.seconds)]]
    wanted = horizon.wanted(state.step, state.seconds)
    own = machine.send(torch.tensor([float(stop.requested), seconds, wanted], dtype=torch.float64))
    heard = own.new_empty(3 * mesh.world.size)
    mesh.world.all_gather(heard, own).wait()
    told = machine.read_later(heard.view(-1, 3).T)
    return told


def _batches(
    state: TrainState, loader: BatchSource, plan: TrainingPlan, horizon: Horizon, machine: Machine, stop: Stop
) -> Generator[DeviceBatch, None, None]:
    """This replica's rows of the batches to come, on the device, until the run has its steps.

    Batches that can be read ahead are sent a step ahead: the device has them when their step begins. Others depend on
    the model, and each is made when its step begins, outside the time in steps. A rank that is alone waits for no text
    once it was asked to stop.
    """
    mesh, steps = state.optimizer.mesh, itertools.count(state.step)
    own = {"rank": mesh.data.rank, "ranks": mesh.data.size}

    def send(batch: Batch) -> DeviceBatch:
        rows = plan.micro_batch_rows * max(1, (plan.row_tokens or 0) // batch.tokens.shape[1])
        progress = plan.schedule(horizon.place(min(next(steps), horizon.steps - 1))).progress
        return send_batch(batch, mesh, machine, rows, plan.flops(batch, progress))

    def give_up() -> bool:
        return stop.alone and stop.requested and state.step > 0

    if not loader.ahead:
        while state.step < horizon.steps:
            with mesh.progress.during(SAMPLING):
                batch = loader.batch(state.step, **own)
            yield send(batch)
        return
    if state.step >= horizon.steps:
        return
    ahead, last = None, plan.steps if plan.budget_seconds is None else None
    with closing(prefetch(loader, state.step, last, **own, give_up=give_up)) as batches:
        for sent in map(send, batches):
            if ahead is not None:
                yield ahead
                if state.step == horizon.steps:
                    return
            ahead = sent
    if ahead is not None:
        yield ahead


def _seed_draws(state: TrainState, plan: TrainingPlan) -> None:
    """Seeds a model's draws in a step (dropout) from seed, step and replica, so a resumed run draws the same."""
    facts = plan.meta.get("seed", 0), state.step, state.optimizer.mesh.data.rank
    torch.manual_seed(int(np.random.SeedSequence(facts).generate_state(1)[0]))  # mixed: it reads 32 bits on a CPU


def _count(
    state: TrainState, result: StepResult, seconds: float, window: _Window, folder: Records, horizon: Horizon | None
) -> None:
    """Adds a step to what is reported later. horizon: None for the first since the start, which compiles."""
    if horizon is None:
        folder.event("compile", step=state.step, seconds=round(seconds, 3))
    else:
        horizon.observe(seconds)
        state.seconds += seconds
        window.seconds += seconds
        window.positions += result.positions
        window.flops += result.flops.model
    state.flops += result.flops
    if result.verdict == "step":
        state.unlogged_nats += result.loss * result.tokens
        state.unlogged_tokens += result.tokens
    elif result.verdict == "empty":
        folder.event("empty", step=state.step)
    else:
        folder.event("skip", step=state.step, loss=result.loss, grad_norm=result.grad_norm)


def _log(state: TrainState, last: StepResult, window: _Window, plan: TrainingPlan, lr: float, folder: Records) -> None:
    folder.metric(**_metrics(state, last, window, plan, lr))
    state.unlogged_nats, state.unlogged_tokens = 0.0, 0


def _evaluate(state: TrainState, plan: TrainingPlan, horizon: Horizon, folder: Records) -> None:
    """Runs the evaluators that are due after this step."""
    for every, evaluator in plan.evaluators:
        if horizon.due(state.step, every) or state.step == horizon.steps:
            with state.optimizer.mesh.progress.during("evaluating"):
                folder.metric(step=state.step, tokens=state.tokens, **_evaluated(state, evaluator))


def _save_is_due(step: int, plan: TrainingPlan, horizon: Horizon, stopping: bool) -> bool:
    if plan.save_every is None:
        return False
    due = horizon.due(step, plan.save_every) or horizon.reaches(plan.keep_step, step)
    return stopping or due or step == horizon.steps


def _save(state: TrainState, saver: Saver, plan: TrainingPlan, horizon: Horizon, last: bool) -> None:
    """Raises CheckpointError. last: waits for what is saved in the background."""
    with state.optimizer.mesh.progress.during("saving"):
        saver.save(state, plan.meta | {"kept": horizon.reaches(plan.keep_step, state.step)})
        if last:
            saver.settle()


def _evaluated(state: TrainState, evaluator: Evaluator) -> dict[str, Any]:
    """Returns the evaluator's figures for the model, without dropout."""
    state.model.eval()
    try:
        return evaluator(state)
    finally:
        state.model.train()


def resume(
    state: TrainState,
    folder: Path,
    log: Callable[[str], None],
    check: Callable[[dict[str, Any], Path], None] = lambda meta, path: None,
) -> bool:
    """Puts `state` where the newest good checkpoint left it. Rank 0 decides which one that is.

    Args:
        state: A fresh state around the same model.
        folder: The checkpoints.
        log: Takes lines for the user.
        check: Called with the checkpoint's meta and path before anything is restored; raises to refuse it.

    Returns:
        False where there is no checkpoint.

    Raises:
        CheckpointError: There are checkpoints, and none of them is good.
    """
    mesh, found = state.optimizer.mesh, None
    if mesh.main and (found := manifest.latest(folder, log)) is None and manifest.steps(folder):
        raise checkpoint.CheckpointError(
            f"none of the checkpoints under {folder} is good: put back a copy of one, or remove that folder and begin "
            "again"
        )
    step = mesh.world.broadcast_object(found[1]["step"] if found else None)
    if step is None:
        return False
    path = manifest.path_of(folder, step)
    tensors, meta = checkpoint.load(path, verified=True)
    check(meta, path)
    try:
        state.restore(tensors, meta["state"])
    except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise checkpoint.CheckpointError(f"{path} does not hold the state of this training: {error!r}") from error
    return True


@dataclass
class _Window:
    """The steps that were timed since the last logging line. earlier: tokens per second of the lines before."""

    earlier: float | None = None
    positions: int = 0
    flops: float = 0
    seconds: float = 0.0

    def rate(self) -> float | None:
        """Tokens per second, once a step was timed."""
        return self.positions / self.seconds if self.seconds else self.earlier

    def speed(self) -> dict[str, float]:
        rate = self.rate()
        return {} if rate is None else {"tokens_per_second": rate}


def _metrics(state: TrainState, last: StepResult, window: _Window, plan: TrainingPlan, lr: float) -> dict[str, Any]:
    rate = window.positions / window.seconds if window.seconds else None
    line = {
        "step": state.step,
        "tokens": state.tokens,
        "flops": state.flops.total,
        "seconds": round(state.seconds, 4),
        "loss": state.unlogged_nats / state.unlogged_tokens if state.unlogged_tokens else last.loss,
        "grad_norm": last.grad_norm,
        "lr": lr,
    }
    if rate is not None:
        line["tokens_per_second"] = round(rate, 1)
        line["mfu"] = round(window.flops / window.seconds / plan.peak_flops, 4)
    if state.guard.skips:
        line["skipped"] = state.guard.skips
    return line


def _stopped(state: TrainState, plan: TrainingPlan, folder: Records, log: Callable[[str], None]) -> int:
    folder.event("stop", step=state.step, reason="signal")
    saved = f", and saved: continue with `{plan.go_on}`" if plan.save_every else ""
    log(f"stopped after step {state.step} as asked{saved}")
    return EXIT_STOPPED


def _not_saved(error: Exception, state: TrainState, folder: Records, log: Callable[[str], None]) -> int:
    folder.event("stop", step=state.step, reason=str(error))
    log(f"stopped at step {state.step}: {error}")
    return EXIT_NOT_SAVED


def _diverged(state: TrainState, saver: Saver, plan: TrainingPlan, folder: Records, log: Callable[[str], None]) -> int:
    try:
        saver.settle()
    except checkpoint.CheckpointError as error:
        return _not_saved(error, state, folder, log)
    found = manifest.latest(folder.path / "checkpoints", log)
    good = f"the last good checkpoint is {found[0]}" if found else "there is no checkpoint yet"
    reason = f"{state.guard.skips_in_row} steps in a row were not finite; {good}"
    folder.event("stop", step=state.step, reason=reason)
    advice = f"go on from there with lower rates, `{plan.go_on} {plan.lower_rates}`" if found else "lower the rates"
    log(f"stopped at step {state.step}: {reason}. Next, {advice}")
    return EXIT_DIVERGED
