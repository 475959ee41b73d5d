"""One optimizer step: what counts, what is clipped, and what a step that is not finite leaves behind: nothing."""

import gc
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from quern.data.loader import Batch
from quern.kernels.cross_entropy import cross_entropy_plain
from quern.model.base import loss_sum
from quern.model.context import CausalContext
from quern.optim.schedule import Multipliers
from quern.train.state import TrainState
from quern.train.step import _send, accumulate, send_batch, to_device, train_step
from tests.support.toy_training import CPU, ROWS, differing, poisoned, snapshot, toy_loader, toy_state

pytestmark = pytest.mark.usefixtures("eager")


def step(state: TrainState, batch: Batch, clip_norm: float | None = None, max_rows: int = 3):  # type: ignore[no-untyped-def]
    return train_step(state, batch, Multipliers(), CPU, micro_batch_rows=max_rows, clip_norm=clip_norm)


# The loss and its gradients ---------------------------------------------------------------------------------


def test_loss_is_the_mean_over_valid_targets_and_gradients_are_autograds() -> None:
    batch = toy_loader(masked=True).batch(2)
    assert 0 < batch.mask.sum() < batch.mask.size
    state, twin = toy_state(), toy_state()
    sent = send_batch(batch, state.optimizer.mesh, CPU, 3)
    loss = accumulate(state, sent, CPU)
    state.optimizer.grad_norm()
    x_BTD = twin.model(torch.from_numpy(batch.tokens).long(), CausalContext())
    targets = torch.from_numpy(batch.targets).long().flatten()
    losses = cross_entropy_plain(x_BTD.flatten(0, 1), twin.model.head.weight, targets, twin.model.cap)
    expected = losses[torch.from_numpy(batch.mask).flatten()].mean()
    expected.backward()
    assert sent.counts() == [batch.mask.sum(), batch.mask.size, 0, 0, -(-ROWS // 3)]
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for (name, p), other in zip(state.model.named_parameters(), twin.model.parameters(), strict=True):
        assert ((p.grad - other.grad).norm() / other.grad.norm()).item() <= 5e-5, name


def test_scale_is_mask_times_weight_over_the_global_count() -> None:
    batch = toy_loader(masked=True).batch(0)
    weight = np.linspace(-1, 2, batch.mask.size, dtype=np.float32).reshape(batch.mask.shape)
    _, _, scale = to_device(replace(batch, weight=weight), 50, CPU)
    assert scale.dtype == torch.float32
    assert np.array_equal(scale.numpy(), np.where(batch.mask, weight / np.float32(50), np.float32(0)))


def test_a_batch_without_a_single_target_is_refused_before_anything_moves() -> None:
    state, batch = toy_state(), toy_loader().batch(0)
    before = snapshot(state)
    with pytest.raises(ValueError, match="a batch without a single target cannot train: check the data's masks"):
        step(state, replace(batch, mask=np.zeros_like(batch.mask)))
    assert differing(snapshot(state), before) == [] and state.step == 0


@pytest.mark.parametrize("kind", ["cpu", "mps"])
def test_only_pinned_memory_is_copied_later(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metal would read the host's memory after it is free (pytorch issue 189690)."""
    copies: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *_, **how: copies.append(how) or self)
    _send(torch.ones(1), replace(CPU, device=torch.device(kind)))
    assert copies == [{}]


def test_a_rank_is_said_to_wait_while_it_reads_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the host is blocked there, not in the collectives."""
    state, seen, read = toy_state(), list[bool](), torch.Tensor.tolist
    progress = state.optimizer.mesh.progress
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: seen.append(progress.waiting) or read(self))
    step(state, toy_loader().batch(0))
    assert seen[-1] and seen.count(True) == 1 and not progress.waiting


# Clipping ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "clip_norm"), [(1, 0.01), (ROWS, 0.01), (ROWS, 10.0)])  # above the norm: as it is
def test_gradient_norm_and_clipping_are_torchs_over_the_whole_batch(rows: int, clip_norm: float) -> None:
    batch, state, twin = toy_loader().batch(0), toy_state(), toy_state()
    loss_sum(twin.model, *to_device(batch, int(batch.mask.sum()), CPU))[0].backward()
    norm = torch.nn.utils.clip_grad_norm_(twin.model.parameters(), clip_norm)
    result = step(state, batch, clip_norm=clip_norm, max_rows=rows)
    assert result.grad_norm == pytest.approx(norm.item(), rel=1e-5) and 0.02 < result.grad_norm < 10
    for (name, p), other in zip(state.model.named_parameters(), twin.model.parameters(), strict=True):
        assert ((p.grad - other.grad).norm() / other.grad.norm()).item() <= 2e-5, name


# Steps that are not finite ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "row", "clip_norm"),  # in the first micro-batch, in the last
    [(math.nan, 0, None), (math.inf, ROWS - 1, None), (-math.inf, 0, 0.1), (math.nan, ROWS - 1, 0.1)],
)
def test_a_loss_that_is_not_finite_leaves_no_trace_and_the_next_step_is_taken(
    value: float, row: int, clip_norm: float | None
) -> None:
    loader = toy_loader()
    state, never = toy_state(), toy_state()
    for other in (state, never):
        step(other, loader.batch(0))
    before = snapshot(state)
    result = step(state, poisoned(loader.batch(1), value, row), clip_norm)
    assert result.verdict == "skip" and not math.isfinite(result.loss)
    assert differing(snapshot(state), before) == []
    assert (state.step, state.guard.skips, state.guard.skips_in_row) == (2, 1, 1)
    after, clean = step(state, loader.batch(2)), step(never, loader.batch(2))
    assert after.verdict == "step" and state.guard.skips_in_row == 0
    assert (after.loss, after.grad_norm) == (clean.loss, clean.grad_norm)
    # As if the skipped step had never been: moments, bias corrections and all.
    assert differing(snapshot(state), snapshot(never)) == []


@pytest.mark.parametrize(
    ("name", "value"), [("head.weight", math.nan), ("blocks.0.mlp.up.weight", math.inf), ("smear_scale", math.nan)]
)
def test_one_gradient_that_is_not_finite_is_enough(name: str, value: float) -> None:
    loader, state = toy_loader(), toy_state()
    before = snapshot(state)

    def spoil(grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        grad.view(-1)[0] = value
        return grad

    hook = dict(state.model.named_parameters())[name].register_hook(spoil)
    result = step(state, loader.batch(0))
    assert result.verdict == "skip" and math.isfinite(result.loss) and not math.isfinite(result.grad_norm)
    assert differing(snapshot(state), before) == []
    hook.remove()
    assert step(state, loader.batch(1)).verdict == "step"
    assert differing(snapshot(state), before) != []


def test_the_check_for_traces_can_fail() -> None:
    """A loop that looks at nothing before it updates."""
    loader, state = toy_loader(), toy_state()
    before = snapshot(state)
    accumulate(state, send_batch(poisoned(loader.batch(0)), state.optimizer.mesh, CPU, 3), CPU)
    state.optimizer.step(0, Multipliers())
    assert differing(snapshot(state), before) != []


def test_steps_leave_no_tensors_in_cycles() -> None:
    """`process.py` lets Python look for cycles seldom; one that held activations would hold their memory."""
    state, batch = toy_state(), toy_loader(masked=True).batch(0)
    step(state, batch)
    gc.collect()
    # Other tests' tensors may go meanwhile. A deprecated object of PyTorch warns when `isinstance` asks it.
    before = {id(one) for one in gc.get_objects() if issubclass(type(one), torch.Tensor)}
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for _ in range(3):
            step(state, batch)
        gc.collect()
        assert not [one for one in gc.garbage if issubclass(type(one), torch.Tensor) and id(one) not in before]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
