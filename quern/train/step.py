"""One optimizer step: accumulate the gradients of a global batch, check that they are finite, update.

The loss is the sum over valid targets divided by their number in the whole batch, so the number of micro-batches
cannot change it. A step whose loss or gradient norm is not finite touches no weights.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch

from quern.data.loader import Batch
from quern.machine import Machine
from quern.model.loss import loss_sum
from quern.optim.schedule import Multipliers
from quern.train.state import TrainState


@dataclass(frozen=True)
class StepResult:
    """loss: nats per valid target; grad_norm: global, before clipping; tokens: valid targets; positions: all
    that were computed, masked ones too; verdict: the guard's."""

    loss: float
    grad_norm: float
    tokens: int
    positions: int
    verdict: str


def train_step(
    state: TrainState,
    batch: Batch,
    multipliers: Multipliers,
    machine: Machine,
    *,
    micro_batch_rows: int,
    clip_norm: float | None = None,
) -> StepResult:
    """Runs one step and advances `state`. The host waits for the device once, for the loss and the gradient norm.

    Args:
        state: Model and optimizer.
        batch: This replica's rows of the global batch.
        multipliers: The schedule's values for this step.
        machine: The machine.
        micro_batch_rows: Rows in one forward pass.
        clip_norm: Global gradient norm to clip to.

    Returns:
        The result. Its verdict ("step", "skip", "stop", or "empty" for weighted targets of which there are none) is the
        same on all ranks.

    Raises:
        ValueError: No token of the global batch is a target, and the targets have no weights.
    """
    part, tokens = accumulate(state, batch, machine, micro_batch_rows, multipliers.progress)
    totals = torch.stack([part.float(), part.new_tensor(batch.tokens.size, dtype=torch.float32)])
    state.optimizer.mesh.data.all_reduce(totals).wait()
    norm = state.optimizer.grad_norm()
    loss, positions, norm_value = torch.stack([*totals, norm]).tolist()  # the step's wait for the device
    targets = int(tokens)  # ready by now
    if targets == 0:
        if batch.weight is None:
            raise ValueError("a batch without a single target cannot train: check the data's masks")
        state.step += 1  # no reply of these rollouts was better than another of its question
        return StepResult(0.0, 0.0, 0, int(positions), "empty")
    verdict = state.guard.observe(bool(np.isfinite(loss) and np.isfinite(norm_value)))
    if verdict == "step":
        if clip_norm is not None:
            state.optimizer.clip_grads(clip_norm, norm)
        state.optimizer.step(state.earlier_updates + state.step - state.guard.skips, multipliers)
    state.step += 1
    state.tokens += targets
    return StepResult(loss, norm_value, targets, int(positions), verdict)


def accumulate(
    state: TrainState, batch: Batch, machine: Machine, micro_batch_rows: int, progress: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Leaves the gradients in the optimizer's buffers.

    Gradients are summed over the replicas while the backward pass of the last micro-batch runs.

    Returns:
        This replica's part of the mean loss, and the valid targets of the global batch; 0-dim tensors on the device.
    """
    count = torch.tensor(int(batch.mask.sum()), device=machine.device)
    state.optimizer.mesh.data.all_reduce(count).wait()
    parts = list(batch.split(micro_batch_rows))
    if state.optimizer.mesh.zero == 3:
        parts = _as_many_on_all_replicas(parts, state, machine)
    micros = [to_device(micro, count, machine) for micro in parts]
    state.optimizer.drop_grads()  # the first micro-batch's gradients are taken as they come
    loss = torch.zeros((), device=machine.device)
    for number, (inputs, targets, scale) in enumerate(micros, start=1):
        total, _ = loss_sum(state.model, inputs, targets, scale, progress, machine.attention)
        with state.optimizer.last_backward() if number == len(micros) else nullcontext():
            total.backward()
        loss += total.detach()
    return loss, count


def _as_many_on_all_replicas(parts: list[Batch], state: TrainState, machine: Machine) -> list[Batch]:
    """Adds micro-batches without targets: replicas that share parameters gather them in equally many passes."""
    most = torch.tensor(len(parts), device=machine.device)
    state.optimizer.mesh.data.all_reduce(most, "max").wait()
    empty = replace(parts[0], mask=np.zeros_like(parts[0].mask))
    return parts + [empty] * (int(most) - len(parts))


def to_device(
    batch: Batch, valid_targets: int | torch.Tensor, machine: Machine
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copies a batch to the device; on a GPU from pinned memory, so that the host does not wait.

    Returns:
        tokens, targets (B, T) int64 and scale (B, T) fp32 = mask · weight / valid_targets.
    """
    scale = batch.mask.astype(np.float32)
    if batch.weight is not None:
        scale *= batch.weight
    host = [torch.from_numpy(a) for a in (batch.tokens, batch.targets, scale)]
    if machine.device.type == "cuda":
        host = [array.pin_memory() for array in host]
    tokens, targets, scales = (array.to(machine.device, non_blocking=True) for array in host)
    return tokens.long(), targets.long(), scales / valid_targets
