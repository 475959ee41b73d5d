"""The training loop: batches prefetched onto the devices, steps, records, evaluation, checkpoints, signals.

What quern/train/loop.py does, with the same records. Time is counted in steps only; evaluation, saving and the first
step after a start, which compiles, are left out. The state on disk, batches as a pure function of (seed, step) and the
counters in the checkpoint's JSON make a resumed run log what the uninterrupted one would, bit for bit.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from quern.data.batch import Batches
from quern.data.loader import prefetch
from quern.grug import checkpoint
from quern.grug.loss import Batch
from quern.grug.mesh import anywhere
from quern.grug.state import JaxTrainState, StepConfig, device_batch, train_step
from quern.optim.schedule import Multipliers
from quern.records import StageFolder
from quern.train.guard import EXIT_DIVERGED, EXIT_DONE, EXIT_NOT_SAVED, EXIT_STOPPED, Guard, Stop

Evaluator = Callable[[JaxTrainState], dict[str, Any]]


@dataclass
class Counters:
    """What the host counts; goes into every checkpoint's JSON. See quern/train/state.py."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    unlogged_nats: float = 0.0
    unlogged_tokens: int = 0
    skips: int = 0
    skips_in_row: int = 0


@dataclass(frozen=True)
class JaxTrainingPlan:
    """What a run trains for. flops_per_token and peak_flops (of all devices, per second) feed the MFU."""

    cfg: StepConfig
    mesh: Mesh
    steps: int
    schedule: Callable[[int], Multipliers]
    micro_batch_rows: int
    max_skips: int
    log_every: int
    save_every: int
    keep: int
    flops_per_token: float
    peak_flops: float
    evaluators: Sequence[tuple[int, Evaluator]] = ()
    meta: dict[str, Any] = field(default_factory=dict)
    """Goes into every checkpoint: the recipe, the tokenizer's fingerprint."""


def train(
    state: JaxTrainState,
    counters: Counters,
    loader: Batches,
    plan: JaxTrainingPlan,
    folder: StageFolder,
    checkpoints: Path,
    log: Callable[[str], None],
    advance: Callable[[int, dict[str, Any]], None] = lambda step, line: None,
) -> tuple[int, JaxTrainState]:
    """Trains from counters.step to plan.steps, on the mesh that is set → (exit code of train/guard.py, the state).

    state is donated, counters advance in place. folder: this process's records; checkpoints: the folder of all
    processes' checkpoints. say takes lines for the user, advance each logging line. SIGTERM and SIGINT, in any of the
    processes, finish the step, save and return EXIT_STOPPED.
    """
    start = counters.step
    folder.rewind(start)
    folder.event("resume" if start else "start", step=start, steps=plan.steps)
    guard, window, fresh = _guard(counters, plan), _Window(), True
    saver = checkpoint.JaxSaver(checkpoints, plan.keep)
    try:
        with Stop() as stop, closing(device_batches(loader, start, plan)) as batches, saver:
            for batch, tokens, positions in batches:
                began = time.perf_counter()
                state, metrics = train_step(state, batch, plan.schedule(counters.step), plan.cfg)
                loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])  # the step's one wait
                seconds = time.perf_counter() - began
                if fresh:
                    folder.event("compile", step=counters.step, seconds=round(seconds, 3))
                    fresh = False
                else:
                    window = window.add(positions, seconds, counters)
                verdict = guard.observe(bool(np.isfinite(loss) and np.isfinite(norm)))
                _count(counters, guard, verdict, loss, tokens)
                if verdict != "step":
                    folder.event("skip", step=counters.step, loss=loss, grad_norm=norm)
                if verdict == "stop":
                    saver.wait()
                    return _diverged(counters, folder, checkpoints, log), state
                last = counters.step == plan.steps
                if counters.step % plan.log_every == 0 or last:
                    advance(counters.step, _log(counters, loss, norm, window, plan, folder))
                    window = _Window()
                stopping = not last and anywhere(stop.requested)
                _evaluate(state, counters, last, plan, folder)
                if counters.step % plan.save_every == 0 or last or stopping:
                    _save(saver, state, counters, plan, folder)
                if stopping:
                    saver.wait()
                    folder.event("stop", step=counters.step, reason="signal")
                    log(f"stopped after step {counters.step} as asked, and saved: go on with --resume")
                    return EXIT_STOPPED, state
    except checkpoint.CheckpointError as error:
        folder.event("stop", step=counters.step, reason=str(error))
        log(f"stopped at step {counters.step}: {error}")
        return EXIT_NOT_SAVED, state
    folder.event("finish", step=counters.step, tokens=counters.tokens, seconds=round(counters.seconds, 3))
    return EXIT_DONE, state


def resume(
    checkpoints: Path, like: JaxTrainState, mesh: Mesh, log: Callable[[str], None]
) -> tuple[JaxTrainState, Counters] | None:
    """Where the newest good checkpoint left off; None when there is none. like: see checkpoint.load."""
    found = checkpoint.latest(checkpoints, log)
    if found is None:
        return None
    path, manifest = found
    return checkpoint.load(path, like, mesh), Counters(**manifest["meta"]["counters"])


def device_batches(
    loader: Batches, start: int, plan: JaxTrainingPlan, ahead: int = 2
) -> Generator[tuple[Batch, int, int]]:
    """(batch on the devices, valid targets, positions) of steps start … plan.steps - 1, placed ahead in a thread."""
    ready: queue.Queue[tuple[Batch, int, int] | BaseException | None] = queue.Queue(maxsize=ahead)
    closed = threading.Event()

    def hand_over(item: tuple[Batch, int, int] | BaseException | None) -> None:
        while not closed.is_set():
            try:
                return ready.put(item, timeout=0.1)
            except queue.Full:
                continue

    def work() -> None:
        try:
            with closing(prefetch(loader, start, plan.steps)) as batches:
                for batch in batches:
                    placed = device_batch(batch, plan.micro_batch_rows, plan.mesh)
                    hand_over((placed, int(batch.mask.sum()), batch.tokens.size))
                    if closed.is_set():
                        return
            hand_over(None)
        except BaseException as error:  # whatever it is, the consumer must hear of it rather than wait
            hand_over(error)

    thread = threading.Thread(target=work, name="device batches", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        closed.set()
        thread.join(timeout=10)


@dataclass(frozen=True)
class _Window:
    """What was timed since the last logging line."""

    positions: int = 0
    seconds: float = 0.0

    def add(self, positions: int, seconds: float, counters: Counters) -> _Window:
        counters.seconds += seconds
        return _Window(self.positions + positions, self.seconds + seconds)


def _count(counters: Counters, guard: Guard, verdict: str, loss: float, tokens: int) -> None:
    counters.step += 1
    counters.tokens += tokens
    counters.skips, counters.skips_in_row = guard.skips, guard.skips_in_row
    if verdict == "step":
        counters.unlogged_nats += loss * tokens
        counters.unlogged_tokens += tokens


def _guard(counters: Counters, plan: JaxTrainingPlan) -> Guard:
    guard = Guard(plan.max_skips)
    guard.load_state({"skips": counters.skips, "skips_in_row": counters.skips_in_row})
    return guard


def _log(
    counters: Counters, loss: float, norm: float, window: _Window, plan: JaxTrainingPlan, folder: StageFolder
) -> dict[str, Any]:
    """Records a logging line and begins the next one's means; returns it."""
    line: dict[str, Any] = {
        "step": counters.step,
        "tokens": counters.tokens,
        "flops": counters.tokens * plan.flops_per_token,
        "seconds": round(counters.seconds, 4),
        "loss": counters.unlogged_nats / counters.unlogged_tokens if counters.unlogged_tokens else loss,
        "grad_norm": norm,
        "lr": plan.schedule(counters.step - 1).lr,
    }
    if window.seconds:
        rate = window.positions / window.seconds
        line["tokens_per_second"] = round(rate, 1)
        line["mfu"] = round(rate * plan.flops_per_token / plan.peak_flops, 4)
    if counters.skips:
        line["skipped"] = counters.skips
    folder.metric(**line)
    counters.unlogged_nats, counters.unlogged_tokens = 0.0, 0
    return line


def _evaluate(state: JaxTrainState, counters: Counters, last: bool, plan: JaxTrainingPlan, folder: StageFolder) -> None:
    for every, evaluator in plan.evaluators:
        if counters.step % every == 0 or last:
            folder.metric(step=counters.step, tokens=counters.tokens, **evaluator(state))


def _save(
    saver: checkpoint.JaxSaver, state: JaxTrainState, counters: Counters, plan: JaxTrainingPlan, folder: StageFolder
) -> None:
    start = time.perf_counter()
    saver.save(counters.step, state, {**plan.meta, "counters": asdict(counters)})
    folder.event("save", step=counters.step, seconds=round(time.perf_counter() - start, 3))


def _diverged(counters: Counters, folder: StageFolder, checkpoints: Path, log: Callable[[str], None]) -> int:
    found = checkpoint.latest(checkpoints, log)
    good = f"the last good checkpoint is {found[0]}" if found else "there is no checkpoint yet"
    reason = f"{counters.skips_in_row} steps in a row were not finite; {good}"
    folder.event("stop", step=counters.step, reason=reason)
    log(f"stopped at step {counters.step}: {reason}. Lower the learning rate (--optim.lr-scale) and resume from there.")
    return EXIT_DIVERGED
