"""The training loop of the JAX twin: prefetched batches, steps, records, evaluation, checkpoints, signals.

It does what quern/train/loop.py does and writes the same records. Only steps are timed: not evaluation, not saving and
not the first step after a start, which compiles. A resumed run logs the same numbers as an uninterrupted one, bit for
bit: a checkpoint holds the state and the counters, and a batch is a pure function of (seed, step).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from quern.data.batch import Batches
from quern.data.prefetch import prefetch_items
from quern.grug import checkpoint
from quern.grug.loss import Batch
from quern.grug.mesh import anywhere
from quern.grug.state import JaxTrainState, StepConfig, device_batch, train_step
from quern.optim.schedule import Multipliers
from quern.records import Records
from quern.train.guard import EXIT_DIVERGED, EXIT_DONE, EXIT_NOT_SAVED, EXIT_STOPPED, Guard, Stop
from quern.train.manifest import CheckpointError

Evaluator = Callable[[JaxTrainState], dict[str, Any]]
PlacedBatch = tuple[Batch, int, int]
"""A batch on the devices, its number of valid targets, its number of positions."""


@dataclass
class Counters:
    """The host's counters, stored in every checkpoint. quern/train/state.py has the same ones."""

    step: int = 0
    tokens: int = 0
    positions: int = 0
    seconds: float = 0.0
    unlogged_nats: float = 0.0
    unlogged_tokens: int = 0
    skips: int = 0
    skips_in_row: int = 0


@dataclass(frozen=True)
class JaxTrainingPlan:
    """How a stage trains. The MFU uses flops_per_token and peak_flops (of all devices, per second); save_every None
    saves nothing."""

    cfg: StepConfig
    mesh: Mesh
    steps: int
    schedule: Callable[[int], Multipliers]
    micro_batch_rows: int
    max_skips: int
    log_every: int
    save_every: int | None
    keep: int
    flops_per_token: float
    peak_flops: float
    evaluators: Sequence[tuple[int, Evaluator]] = ()
    meta: dict[str, Any] = field(default_factory=dict)
    """Stored in every checkpoint: the recipe, the tokenizer's fingerprint."""


def train(
    state: JaxTrainState,
    counters: Counters,
    loader: Batches,
    plan: JaxTrainingPlan,
    folder: Records,
    checkpoints: Path,
    log: Callable[[str], None],
    advance: Callable[[int, dict[str, Any]], None] = lambda step, line: None,
) -> tuple[int, JaxTrainState]:
    """Trains from counters.step to plan.steps on the current mesh.

    SIGTERM or SIGINT in any process ends all of them: they finish the step, save and return EXIT_STOPPED.

    Args:
        state: The state to start from; it is donated.
        counters: Updated in place.
        loader: The batches.
        plan: How to train.
        folder: This process's records.
        checkpoints: The folder of the checkpoints, which all processes share.
        log: Called with lines for the user.
        advance: Called with the step and the fields of each logged line.

    Returns:
        An exit code of train/guard.py, and the last state.
    """
    start = counters.step
    folder.rewind(start)
    folder.event("resume" if start else "start", step=start, steps=plan.steps)
    guard, window, fresh = Guard(plan.max_skips), _Window(), True
    guard.load_state({"skips": counters.skips, "skips_in_row": counters.skips_in_row})
    saver = checkpoint.JaxSaver(checkpoints, plan.keep)
    try:
        with Stop() as stop, closing(device_batches(loader, start, plan)) as batches, saver:
            for batch, tokens, positions in batches:
                began = time.perf_counter()
                state, metrics = train_step(state, batch, plan.schedule(counters.step), plan.cfg)
                loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])  # blocks until the step is done
                seconds = time.perf_counter() - began
                if fresh:
                    folder.event("compile", step=counters.step, seconds=round(seconds, 3))
                    fresh = False
                else:
                    window.add(positions, seconds, counters)
                counters.positions += positions
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
                for every, evaluator in plan.evaluators:
                    if counters.step % every == 0 or last:
                        folder.metric(step=counters.step, tokens=counters.tokens, **evaluator(state))
                if plan.save_every and (counters.step % plan.save_every == 0 or last or stopping):
                    began = time.perf_counter()
                    saver.save(counters.step, state, {**plan.meta, "counters": asdict(counters)})
                    folder.event("save", step=counters.step, seconds=round(time.perf_counter() - began, 3))
                if stopping:
                    saver.wait()
                    folder.event("stop", step=counters.step, reason="signal")
                    log(f"stopped after step {counters.step} as asked, and saved: continue with --resume")
                    return EXIT_STOPPED, state
    except CheckpointError as error:
        folder.event("stop", step=counters.step, reason=str(error))
        log(f"stopped at step {counters.step}: {error}")
        return EXIT_NOT_SAVED, state
    folder.event("finish", step=counters.step, tokens=counters.tokens, seconds=round(counters.seconds, 3))
    return EXIT_DONE, state


def resume(
    checkpoints: Path, like: JaxTrainState, mesh: Mesh, log: Callable[[str], None]
) -> tuple[JaxTrainState, Counters] | None:
    """Loads state and counters of the newest good checkpoint; None without one. like: see checkpoint.load."""
    found = checkpoint.latest(checkpoints, log)
    if found is None:
        return None
    path, manifest = found
    return checkpoint.load(path, like, mesh), Counters(**manifest["meta"]["counters"])


def device_batches(loader: Batches, start: int, plan: JaxTrainingPlan) -> Generator[PlacedBatch, None, None]:
    """The batches of steps start … plan.steps - 1. A thread reads them and places them on the devices early."""

    def place() -> Iterator[PlacedBatch]:
        for step in range(start, plan.steps):
            batch = loader.batch(step)
            placed = device_batch(batch, plan.micro_batch_rows, plan.mesh)
            yield placed, int(batch.mask.sum()), batch.tokens.size

    return prefetch_items(place())


@dataclass
class _Window:
    """Positions and seconds of the steps since the last logged line."""

    positions: int = 0
    seconds: float = 0.0

    def add(self, positions: int, seconds: float, counters: Counters) -> None:
        counters.seconds += seconds
        self.positions += positions
        self.seconds += seconds


def _count(counters: Counters, guard: Guard, verdict: str, loss: float, tokens: int) -> None:
    counters.step += 1
    counters.tokens += tokens
    counters.skips, counters.skips_in_row = guard.skips, guard.skips_in_row
    if verdict == "step":
        counters.unlogged_nats += loss * tokens
        counters.unlogged_tokens += tokens


def _log(
    counters: Counters, loss: float, norm: float, window: _Window, plan: JaxTrainingPlan, folder: Records
) -> dict[str, Any]:
    """Records and returns a line of metrics, and resets the sums of the mean loss."""
    mean = counters.unlogged_nats / counters.unlogged_tokens if counters.unlogged_tokens else loss
    line: dict[str, Any] = {
        "step": counters.step,
        "tokens": counters.tokens,
        "flops": counters.positions * plan.flops_per_token,
        "seconds": round(counters.seconds, 4),
        "loss": mean,
        "perplexity": math.exp(mean) if mean < 700 else math.inf,  # e^710 exceeds a float
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


def _diverged(counters: Counters, folder: Records, checkpoints: Path, log: Callable[[str], None]) -> int:
    found = checkpoint.latest(checkpoints, log)
    good = f"the last good checkpoint is {found[0]}" if found else "there is no checkpoint yet"
    reason = f"{counters.skips_in_row} steps in a row were not finite; {good}"
    folder.event("stop", step=counters.step, reason=reason)
    log(f"stopped at step {counters.step}: {reason}. Lower the learning rate (--optim.lr-scale) and resume from there.")
    return EXIT_DIVERGED
