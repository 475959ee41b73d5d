"""One optimizer step: accumulate the gradients of a global batch, check that they are finite, update.

The loss is the sum over valid targets divided by their number in the whole batch, so the number of micro-batches
cannot change it. A step whose loss or gradient norm is not finite touches no weights.

The host waits for the device once in a step, for the loss and the gradient norm. A batch is sent ahead (`send_batch`):
its copy and its counts are there when that wait ends. tests/train/test_waits.py counts the waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quern.data.loader import Batch
from quern.machine import Machine
from quern.mesh import Mesh
from quern.model.base import LanguageModel, loss_sum
from quern.model.count import Flops
from quern.optim.schedule import Multipliers
from quern.parallel.sharding import Slice
from quern.train.state import TrainState, refuse_unequal_replicas

Evaluator = Callable[[Any], dict[str, Any]]
"""Takes the state, which holds the counters too, and returns values for the log."""
Told = list[list[float]]
"""The numbers that each rank told the others with a step, in rank order."""


@dataclass(frozen=True)
class DeviceBatch:
    """This replica's rows of a global batch, on the device."""

    micros: list[tuple[Tensor, Tensor, Tensor]]  # tokens, targets and scale (`to_device`) of each forward pass
    counts: Callable[[], list[int]]
    """Returns, once they have reached the host, over all replicas: the valid targets, the positions, the FLOPs of
    products and of attention, and the forward passes that a replica must make."""
    weighted: bool  # whether the targets have weights
    update_flops: float


@dataclass(frozen=True)
class StepResult:
    """The result of a step. loss: nats per valid target; grad_norm: global, before clipping; tokens: valid targets;
    positions: all that were computed, masked ones too; flops: without a skipped update; verdict: the guard's."""

    loss: float
    grad_norm: float
    tokens: int
    positions: int
    flops: Flops
    verdict: str


@dataclass
class TorchBackend:
    """The loop's `Backend` in PyTorch: a state on a machine. seed: for a model's draws in a step (dropout)."""

    run: TrainState
    machine: Machine
    clip_norm: float | None = None
    seed: int = 0

    @property
    def mesh(self) -> Mesh:
        return self.run.optimizer.mesh

    def begin(self) -> None:
        refuse_unequal_replicas(self.run)

    def send(self, batch: Batch, rows: int, flops: Flops) -> DeviceBatch:
        return send_batch(batch, self.mesh, self.machine, rows, flops)

    def step(self, sent: DeviceBatch, multipliers: Multipliers, tell: Sequence[float]) -> tuple[StepResult, Told]:
        heard: Callable[[], Told] = list
        if self.mesh.world.size > 1:
            own = _send(torch.tensor(tell, dtype=torch.float64), self.machine)
            everyones = own.new_empty(len(tell) * self.mesh.world.size)
            self.mesh.world.all_gather(everyones, own).wait()
            heard = self.machine.read_later(everyones.view(self.mesh.world.size, -1))
        # A resumed run draws what the uninterrupted one would. Mixed: a CPU reads 32 bits of the seed.
        facts = self.seed, self.run.step, self.mesh.data.rank
        torch.manual_seed(int(np.random.SeedSequence(facts).generate_state(1)[0]))
        result = train_on(self.run, sent, multipliers, self.machine, self.clip_norm)
        return result, heard()  # the step's wait for the device covers the exchange

    def evaluate(self, evaluator: Evaluator) -> dict[str, Any]:
        with evaluating(self.run.model):
            return evaluator(self.run)

    def save(self) -> list[dict[str, Slice]]:
        return [self.run.optimizer.slices()]

    def restore(self, tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> None:
        self.run.restore(tensors, meta)


@contextmanager
def evaluating(model: LanguageModel) -> Iterator[None]:
    """Runs the body without dropout, and returns the model to its mode."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def train_step(
    state: TrainState,
    batch: Batch,
    multipliers: Multipliers,
    machine: Machine,
    *,
    micro_batch_rows: int,
    clip_norm: float | None = None,
) -> StepResult:
    """Sends a batch and trains on it: `send_batch`, then `train_on`, whose arguments these are."""
    sent = send_batch(batch, state.optimizer.mesh, machine, micro_batch_rows)
    return train_on(state, sent, multipliers, machine, clip_norm)


def train_on(
    state: TrainState, batch: DeviceBatch, multipliers: Multipliers, machine: Machine, clip_norm: float | None = None
) -> StepResult:
    """Runs one step and advances `state`.

    The verdict of the result is the same on all ranks: "step", "skip", "stop", or "empty" for weighted targets of which
    there are none. Raises ValueError for a batch without weights and without targets.
    """
    targets, positions, products, attention, _ = batch.counts()
    if targets == 0:
        if not batch.weighted:
            raise ValueError("a batch without a single target cannot train: check the data's masks")
        state.empty_steps += 1
        state.step += 1  # no reply of these rollouts was better than another of its question
        return StepResult(0.0, 0.0, 0, positions, Flops(), "empty")
    part = accumulate(state, batch, machine, multipliers.progress)
    state.optimizer.mesh.data.all_reduce(part).wait()
    norm = state.optimizer.grad_norm()
    progress = state.optimizer.mesh.progress
    progress.waiting = True  # on a GPU the collectives above end here
    try:
        loss, norm_value = torch.stack([part, norm]).tolist()
    finally:
        progress.waiting = False
    verdict = state.guard.observe(bool(np.isfinite(loss) and np.isfinite(norm_value)))
    if verdict == "step":
        if clip_norm is not None:
            state.optimizer.clip_grads(clip_norm, norm)
        state.optimizer.step(state.updates, multipliers)
    state.step += 1
    state.tokens += targets
    flops = Flops(products, attention, batch.update_flops if verdict == "step" else 0)
    return StepResult(loss, norm_value, targets, positions, flops, verdict)


def accumulate(state: TrainState, batch: DeviceBatch, machine: Machine, progress: float = 1.0) -> Tensor:
    """Leaves the gradients in the optimizer's buffers; the last backward pass sums them over the replicas. Returns this
    replica's part of the mean loss, a 0-dim tensor on the device."""
    inputs, targets, scale = batch.micros[0]
    missing = batch.counts()[-1] - len(batch.micros)
    micros = batch.micros + [(inputs, targets, torch.zeros_like(scale))] * missing
    state.optimizer.drop_grads()  # the first micro-batch's gradients are taken as they come
    loss = torch.zeros((), device=machine.device)
    for number, (inputs, targets, scale) in enumerate(micros, start=1):
        total, _ = loss_sum(state.model, inputs, targets, scale, progress, machine.attention)
        with state.optimizer.last_backward() if number == len(micros) else nullcontext():
            total.backward()
        loss += total.detach()
    return loss


def send_batch(
    batch: Batch, mesh: Mesh, machine: Machine, micro_batch_rows: int, flops: Flops | None = None
) -> DeviceBatch:
    """Starts to copy this replica's rows and to count the targets of all replicas. On GPUs the host does not wait.

    Replicas that share parameters gather them in equally many passes, so those with fewer micro-batches add empty ones.
    """
    flops = flops or Flops()
    parts = list(batch.split(micro_batch_rows))
    counted = [int(batch.mask.sum()), batch.tokens.size, int(flops.products), int(flops.attention)]
    sums = _send(torch.tensor(counted), machine)
    mesh.data.all_reduce(sums).wait()
    passes = _send(torch.tensor([len(parts)]), machine)
    if mesh.zero == 3:
        mesh.data.all_reduce(passes, "max").wait()
    micros = [to_device(part, sums[0], machine) for part in parts]
    return DeviceBatch(micros, machine.read_later(torch.cat([sums, passes])), batch.weight is not None, flops.update)


def to_device(batch: Batch, valid_targets: int | Tensor, machine: Machine) -> tuple[Tensor, Tensor, Tensor]:
    """Starts to copy tokens, targets (B, T) int64 and scale (B, T) fp32 = mask · weight / valid_targets."""
    scale = batch.mask.astype(np.float32)
    if batch.weight is not None:
        scale *= batch.weight
    tokens, targets, scales = (_send(torch.from_numpy(a), machine) for a in (batch.tokens, batch.targets, scale))
    return tokens.long(), targets.long(), scales / valid_targets


def _send(tensor: Tensor, machine: Machine) -> Tensor:
    """Copies a tensor from the host to the device; to a GPU from pinned memory, so that the host does not wait."""
    if machine.device.type == "cuda":
        return tensor.pin_memory().to(machine.device, non_blocking=True)
    return tensor.to(machine.device)  # Metal would read the host's memory after it is free (pytorch issue 189690)
