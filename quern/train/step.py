"""One optimizer step: accumulate the gradients of a global batch, look whether they are finite, update.

The loss is the sum over valid targets divided by their number in the whole batch, so the number of micro-batches
cannot change it. A step whose loss or gradient norm is not finite touches no weights.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

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
    """One step; advances `state` whatever the verdict ("step", "skip" or "stop"), which is the same on all ranks.

    batch: this replica's rows of the global batch.
    """
    part, tokens = accumulate(state, batch, machine, micro_batch_rows, multipliers.window)
    totals = torch.stack([part.float(), part.new_tensor(batch.tokens.size, dtype=torch.float32)])
    state.optimizer.mesh.data.all_reduce(totals).wait()
    loss, positions = totals
    norm = state.optimizer.grad_norm()
    loss_value, norm_value = torch.stack([loss, norm]).tolist()  # the step's one wait for the device
    verdict = state.guard.observe(bool(np.isfinite(loss_value) and np.isfinite(norm_value)))
    if verdict == "step":
        if clip_norm is not None:
            state.optimizer.clip_grads(clip_norm, norm)
        state.optimizer.step(state.step - state.guard.skips, multipliers)
    state.step += 1
    state.tokens += tokens
    return StepResult(loss_value, norm_value, tokens, int(positions), verdict)


def accumulate(
    state: TrainState, batch: Batch, machine: Machine, micro_batch_rows: int, window: float = 1.0
) -> tuple[torch.Tensor, int]:
    """Leaves the gradients in the optimizer's buffers → (this replica's part of the mean loss, 0-dim; valid targets of
    the global batch).

    While the last micro-batch's backward runs, gradients are summed over the replicas as they come.
    """
    count = torch.tensor(int(batch.mask.sum()), device=machine.device)
    state.optimizer.mesh.data.all_reduce(count).wait()
    tokens = int(count)
    if tokens == 0:
        raise ValueError("a batch without a single target cannot train: check the data's masks")
    state.optimizer.drop_grads()  # the first micro-batch's gradients are taken as they come
    loss = torch.zeros((), device=machine.device)
    micros = list(batch.split(micro_batch_rows))
    for number, micro in enumerate(micros, start=1):
        inputs, targets, scale = to_device(micro, tokens, machine)
        total, _ = loss_sum(state.model, inputs, targets, scale, window, machine.attention)
        with state.optimizer.last_backward() if number == len(micros) else nullcontext():
            total.backward()
        loss += total.detach()
    return loss, tokens


def to_device(batch: Batch, valid_targets: int, machine: Machine) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """→ tokens, targets (B, T) int64 and scale (B, T) fp32 = mask · weight / valid_targets, on the device."""
    scale = batch.mask.astype(np.float32)
    if batch.weight is not None:
        scale *= batch.weight
    scale /= valid_targets
    arrays = (batch.tokens.astype(np.int64), batch.targets.astype(np.int64), scale)
    tokens, targets, scales = (torch.from_numpy(a).to(machine.device, non_blocking=True) for a in arrays)
    return tokens, targets, scales
