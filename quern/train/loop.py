"""The one training loop: for pretraining, fine-tuning and reinforcement learning, in PyTorch and in JAX.

A `Backend` computes: PyTorch's is in step.py, JAX's in stages/jax/backend.py. Evaluators, records and progress are
passed in. Time is counted in steps only: evaluation, saving and the first step after a start, which compiles, are left
out.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from quern.data.batch import Batch, BatchSource, prefetch
from quern.mesh import EVALUATING, FIRST_STEP, SAMPLING, TRAINING, Mesh
from quern.model.count import Flops
from quern.optim.schedule import Multipliers
from quern.parallel.sharding import Slice
from quern.process import waiting
from quern.records import Records
from quern.train import checkpoint, manifest, metrics
from quern.train.guard import EXIT_DIVERGED, EXIT_DONE, EXIT_NOT_SAVED, EXIT_STOPPED, Stop
from quern.train.heartbeat import StragglerDetector
from quern.train.horizon import Horizon, Plan
from quern.train.manifest import CheckpointError
from quern.train.state import Counters
from quern.train.step import Evaluator, StepResult, Told


class Backend(Protocol):
    """The state of a run, and the functions that change it. Each rank takes its part of a batch, by `mesh.data`."""

    @property
    def run(self) -> Counters: ...

    @property
    def mesh(self) -> Mesh: ...

    # Checks what must hold before the first step.
    def begin(self) -> None: ...

    # Starts to send this rank's part of a batch to the device, for passes of so many rows.
    def send(self, batch: Batch, rows: int, flops: Flops) -> Any: ...

    # Takes one step, counts it in `run`, and tells the other ranks, if there are any, some numbers beside it.
    def step(self, sent: Any, multipliers: Multipliers, tell: Sequence[float]) -> tuple[StepResult, Told]: ...

    # Runs an evaluator, without dropout.
    def evaluate(self, evaluator: Evaluator) -> dict[str, Any]: ...

    # Returns this rank's slices of the state, for each file that it writes.
    def save(self) -> list[dict[str, Slice]]: ...

    # Puts the state where a checkpoint left it. Raises an error of Python for one that does not fit.
    def restore(self, tensors: dict[str, Any], meta: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class TrainingPlan:
    """The plan of one stage. peak_flops (of the machine, per second) feeds the MFU."""

    steps: int  # steps of the first plan, where there is a budget
    schedule: Callable[[float], Multipliers]
    micro_batch_rows: int  # rows in one forward pass
    log_every: int
    save_every: int | None  # steps between checkpoints; None saves none, not even at the end
    keep: int
    flops: Callable[[Batch, float], Flops]  # takes a batch and the share of the run that is done
    peak_flops: float
    evaluators: Sequence[tuple[int, Evaluator]] = ()
    row_tokens: int | None = None
    """Tokens of the rows that micro_batch_rows counts; a forward pass has more of shorter ones. None: all are equal."""
    keep_step: int | None = None
    """A step that is saved and whose checkpoint is never removed, such as the last one before the rates fall."""
    budget_seconds: float | None = None
    """Time in steps that the run takes: the steps are planned again while it trains (horizon.py)."""
    together: int = 1
    """A signal ends the run after a multiple of so many steps. save_every is a multiple of it, too."""
    recorded: Sequence[Plan] = ()  # plans that the run made before it was interrupted, for the steps that it repeats
    meta: dict[str, Any] = field(default_factory=dict)
    """Goes into every checkpoint beside the state: the recipe, the tokenizer's fingerprint, …"""


class Reporter(NamedTuple):
    """The messages of a run to its user, and the functions that take them."""

    log: Callable[[str], None]
    advance: Callable[[float, float | None], None] = lambda loss, tokens_per_second: None
    """Takes each step's loss, and the tokens per second once they are known."""
    go_on: str = ""  # the command that continues a run that ended early; "" for none
    lower_rates: str = ""  # its flag for lower rates; "" for none


def train(
    backend: Backend,
    loader: BatchSource,
    plan: TrainingPlan,
    folder: Records,
    reporter: Reporter,
    more_follows: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """Trains from `backend.run.step` to the end of the plan; SIGTERM and SIGINT finish the step and save.

    Args:
        folder: This rank's records; checkpoints are below its path.
        more_follows: Whether the caller begins something else after the last step.
        clock: Read before and after each step.

    Returns an exit code of guard.py; EXIT_STOPPED also if a signal came during the last step, and more follows.
    """
    run, mesh = backend.run, backend.mesh
    backend.begin()
    folder.rewind(run.step)  # also where a run died before its first checkpoint
    if plan.budget_seconds is None:
        run.plans = []
    horizon = Horizon(plan.steps, run.plans, plan.budget_seconds, run.seconds, plan.recorded)
    more = {"plans": plan.recorded} if plan.recorded else {}
    folder.event("resume" if run.step else "start", step=run.step, steps=horizon.steps, **more)
    with (
        Stop(mesh.world.size == 1, bool(plan.save_every), "step" if plan.together == 1 else "round") as stop,
        closing(_batches(backend, loader, plan, horizon)) as batches,
    ):
        try:
            code = _steps(backend, batches, plan, horizon, stop, folder, reporter, clock)
            if code == EXIT_DONE:
                folder.event("finish", step=run.step, tokens=run.tokens, seconds=round(run.seconds, 3))
                with checkpoint.failing_together(mesh.world):
                    folder.flush()
        except CheckpointError as error:
            folder.event("stop", step=run.step, reason=str(error))
            reporter.log(f"stopped at step {run.step}: {error}")
            return EXIT_NOT_SAVED
        if code == EXIT_DIVERGED:
            _explain_divergence(run, folder, reporter)
        elif code == EXIT_STOPPED:
            folder.event("stop", step=run.step, reason="signal")
        elif more_follows and any(mesh.world.gather_objects(stop.requested)):
            code = EXIT_STOPPED
        if code == EXIT_STOPPED:
            saved = ", and saved" if plan.save_every else ""
            advice = f": continue with `{reporter.go_on}`" if reporter.go_on else ""
            reporter.log(f"stopped after step {run.step} as asked{saved}{advice}")
    return code


def _steps(
    backend: Backend,
    batches: Generator[Any, None, None],
    plan: TrainingPlan,
    horizon: Horizon,
    stop: Stop,
    folder: Records,
    reporter: Reporter,
    clock: Callable[[], float],
) -> int:
    """Takes the steps that are left, and returns an exit code of guard.py."""
    run, mesh, alone = backend.run, backend.mesh, backend.mesh.world.size == 1
    window, stragglers, fresh, own_seconds = metrics.Window(), StragglerDetector(), True, 0.0
    for batch in batches:
        mesh.progress.begin(FIRST_STEP if fresh else TRAINING, run.step)
        # All ranks stop after the same step: a signal to one of several during a step counts from the next one on.
        tell = () if alone else (float(stop.requested), own_seconds, horizon.wanted(run.step, run.seconds))
        multipliers = plan.schedule(horizon.place(run.step))
        start, waited = clock(), mesh.waited_seconds()
        with waiting("the first step, which may compile the model", log=reporter.log) if fresh else nullcontext():
            result, heard = backend.step(batch, multipliers, tell)
        seconds = clock() - start
        own_seconds = 0.0 if fresh else seconds - mesh.waited_seconds() + waited  # the first step compiles
        if fresh:
            folder.event("compile", step=run.step, seconds=round(seconds, 3))
        else:
            horizon.observe(seconds)
            run.seconds += seconds
            window.add(result, seconds)
        fresh = False
        _count(run, result, folder)
        reporter.advance(result.loss, window.rate())
        if result.verdict == "stop":
            return EXIT_DIVERGED
        if alone:
            heard = [[float(stop.requested), own_seconds, horizon.wanted(run.step, run.seconds)]]
        if horizon.decide(run.step, int(heard[0][2])):  # by rank 0's clock
            folder.event("plan", step=run.step, steps=horizon.steps, seconds=round(run.seconds, 3))
        last = run.step == horizon.steps
        if run.step % plan.log_every == 0 or last:
            folder.metric(**metrics.line(run, result, window, multipliers.lr, plan.peak_flops))
            run.unlogged_nats, run.unlogged_tokens = 0.0, 0
            window = metrics.Window(window.rate())
        stopping = not last and run.step % plan.together == 0 and any(told[0] for told in heard)
        if not alone and (slow := stragglers.observe([told[1] for told in heard])):
            folder.event("slow", step=run.step, reason=slow)
            reporter.log(slow)
        for every, evaluator in plan.evaluators:
            if horizon.due(run.step, every) or last:
                with mesh.progress.during(EVALUATING):
                    folder.metric(**metrics.counts(run), **backend.evaluate(evaluator))
        kept = horizon.reaches(plan.keep_step, run.step)
        finite = not run.guard.skips_in_row  # else the weights may be lost: a run that diverged goes on before them
        if plan.save_every and ((finite and horizon.due(run.step, plan.save_every)) or kept or last or stopping):
            _save(backend, folder, plan, kept)
        if stopping:
            break
    return EXIT_DONE if run.step == horizon.steps else EXIT_STOPPED


def _batches(backend: Backend, loader: BatchSource, plan: TrainingPlan, horizon: Horizon) -> Generator[Any, None, None]:
    """This replica's rows of the batches to come, on the device, until the run has its steps.

    Batches that can be read ahead are sent a step ahead: the device has them when their step begins. Others depend on
    the model, and each is made when its step begins, outside the time in steps.
    """
    run, mesh, steps = backend.run, backend.mesh, itertools.count(backend.run.step)
    own = {"rank": mesh.data.rank, "ranks": mesh.data.size}

    def send(batch: Batch) -> Any:
        rows = plan.micro_batch_rows * max(1, (plan.row_tokens or 0) // batch.tokens.shape[1])
        progress = plan.schedule(horizon.place(min(next(steps), horizon.steps - 1))).progress
        return backend.send(batch, rows, plan.flops(batch, progress))

    if not loader.ahead:
        while run.step < horizon.steps:
            with mesh.progress.during(SAMPLING):
                batch = loader.batch(run.step, **own)
            yield send(batch)
        return
    if run.step >= horizon.steps:
        return
    last = plan.steps if plan.budget_seconds is None else None
    with closing(prefetch(loader, run.step, last, **own)) as batches:
        for sent, _ in itertools.pairwise(itertools.chain(map(send, batches), [None])):  # the next one is on its way
            yield sent
            if run.step == horizon.steps:
                return


def _count(run: Counters, result: StepResult, folder: Records) -> None:
    """Counts a step's FLOPs and loss; one that is empty or not finite is an event."""
    run.flops += result.flops
    if result.verdict == "step":
        run.unlogged_nats += result.loss * result.tokens
        run.unlogged_tokens += result.tokens
    elif result.verdict == "empty":
        folder.event("empty", step=run.step)
    else:
        folder.event("skip", step=run.step, loss=result.loss, grad_norm=result.grad_norm)


def _explain_divergence(run: Counters, folder: Records, reporter: Reporter) -> None:
    reason, advice = "there is no checkpoint yet", "lower the rates"
    if found := manifest.latest(folder.path / "checkpoints", reporter.log):
        again = f"{reporter.go_on} {reporter.lower_rates}".strip()
        reason, advice = f"the last good checkpoint is {found[0]}", f"go on from there with lower rates, `{again}`"
    reason = f"{run.guard.skips_in_row} steps in a row were not finite; {reason}"
    folder.event("stop", step=run.step, reason=reason)
    reporter.log(f"stopped at step {run.step}: {reason}. Next, {advice}")


def resume(
    backend: Backend,
    folder: Path,
    log: Callable[[str], None],
    check: Callable[[dict[str, Any], Path], None] = lambda meta, path: None,
) -> bool:
    """Puts the state where the newest good checkpoint left it. Rank 0 decides which one that is.

    check: called with the checkpoint's meta and path before anything is restored; raises to refuse it. Returns False
    where there is no checkpoint. Raises CheckpointError if there are some, and none of them is good or the good one
    does not hold this training's state, and ValueError for the schema of a newer version.
    """
    mesh, found = backend.mesh, None
    if mesh.main and (found := manifest.latest(folder, log)) is None and manifest.steps(folder):
        raise CheckpointError(f"none of the checkpoints under {folder} is good: put back a copy, or remove that folder")
    step = mesh.world.broadcast_object(found[1]["step"] if found else None)
    if step is None:
        return False
    path = manifest.path_of(folder, step)
    tensors, meta = checkpoint.load(path, verified=True)
    check(meta, path)
    if "trained_by" in meta:
        raise CheckpointError(f"{path} holds the weights of a JAX model alone: begin another run with --from")
    try:
        backend.restore(tensors, meta["state"])
    except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path} does not hold the state of this training: {error!r}") from error
    return True


def _save(backend: Backend, records: Records, plan: TrainingPlan, kept: bool) -> None:
    """Saves the state below the folder of the records. Raises CheckpointError, on all ranks."""
    run, start = backend.run, time.perf_counter()
    with backend.mesh.progress.during("saving"):
        with checkpoint.failing_together(backend.mesh.world):
            records.flush()
        meta = plan.meta | {"kept": kept, "state": run.meta()}
        path = checkpoint.save(records.path / "checkpoints", run.step, backend.save(), meta, plan.keep, backend.mesh)
    records.event("save", path=path.name, step=run.step, seconds=round(time.perf_counter() - start, 3))
