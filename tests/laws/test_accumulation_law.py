"""Law: micro-batches of any size = one batch: loss, every gradient, one update; whatever the masks."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from quern.data.loader import Batch
from quern.optim.schedule import Multipliers
from quern.train.state import TrainState
from quern.train.step import accumulate, send_batch, train_step
from tests.laws.table import Law
from tests.support.toy_training import CPU, ROWS, toy_loader, toy_recipe, toy_state

pytestmark = pytest.mark.usefixtures("eager")

BAR = 1e-5


def batch_of(kind: str) -> Batch:
    """full; uneven: rows hold one to all of their targets; weighted: those with signed weights; sft: the loader's."""
    if kind == "sft":
        return toy_loader(masked=True).batch(3)
    batch = toy_loader().batch(0)
    if kind == "full":
        return batch
    rng = np.random.default_rng(5)
    mask = np.zeros_like(batch.mask)
    for row, count in enumerate((1, 16, 2, 9, 0, 16, 5, 1)):  # also a row, hence a micro-batch, without any
        mask[row, rng.permutation(16)[:count]] = True
    weight = rng.normal(size=mask.shape).astype(np.float32) if kind == "weighted" else None
    return replace(batch, mask=mask, weight=weight)


def ours(state: TrainState, batch: Batch, rows: int) -> torch.Tensor:
    return accumulate(state, send_batch(batch, state.optimizer.mesh, CPU, rows), CPU)


@cache
def updated(kind: str, rows: int) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The loss, every gradient, and the weights after one update."""
    # Not seed 0: one gradient of its fine-tuning cancels to 1e-11, which Adam's first step makes a whole rate.
    state = toy_state(replace(toy_recipe(), seed=3))
    loss = ours(state, batch_of(kind), rows)
    state.optimizer.grad_norm()
    grads = {name: p.grad.clone() for name, p in state.model.named_parameters()}
    state.optimizer.step(0, Multipliers())
    return loss, grads, {name: p.detach() for name, p in state.model.named_parameters()}


def deviation(kind: str, rows: int) -> tuple[float, float, float]:
    """Relative differences of (loss, the worst gradient, the worst weight after one update) from the whole batch."""
    loss, grads, weights = updated(kind, ROWS)
    loss_n, grads_n, weights_n = updated(kind, rows)
    return (
        abs(float(loss_n - loss)) / abs(float(loss)),
        max(((grads_n[name] - g).norm() / g.norm()).item() for name, g in grads.items()),
        max(((weights_n[name] - w).norm() / w.norm()).item() for name, w in weights.items()),
    )


@pytest.mark.parametrize("kind", ["full", "uneven", "weighted", "sft"])
def test_accumulated_is_whole(kind: str, law: Law) -> None:
    worst = [0.0, 0.0, 0.0]
    for rows in (1, 2, 3, 5):
        worst = [max(pair) for pair in zip(worst, deviation(kind, rows), strict=True)]
    for name, value in zip(("loss", "every gradient", "the weights after one update"), worst, strict=True):
        law(f"accumulation N = 1: {name}", value, BAR, "relative, fp32")


def test_the_whole_step_is_the_same(law: Law) -> None:
    """Through `train_step`, with clipping, over three steps: what is reported and where the weights go."""
    states, loader = (toy_state(), toy_state()), toy_loader(masked=True)
    for step in range(3):
        one, many = (
            train_step(state, loader.batch(step), Multipliers(), CPU, micro_batch_rows=rows, clip_norm=0.05)
            for state, rows in zip(states, (ROWS, 1), strict=True)
        )
        assert (many.loss, many.grad_norm) == pytest.approx((one.loss, one.grad_norm), rel=BAR)
        assert (many.tokens, many.verdict) == (one.tokens, one.verdict)
    weights = [torch.cat([p.flatten() for p in state.model.parameters()]) for state in states]
    worst = ((weights[1] - weights[0]).norm() / weights[0].norm()).item()
    law("accumulation N = 1: weights after three clipped steps", worst, BAR, "relative, fp32")


def in_bf16(rows: int, grad_dtype: str) -> torch.Tensor:
    """All gradients of a batch in bf16, from micro-batches of `rows`."""
    state = toy_state(toy_recipe(grad_dtype=grad_dtype), replace(CPU, dtype=torch.bfloat16))
    ours(state, batch_of("full"), rows)
    state.optimizer.grad_norm()
    return torch.cat([p.grad.float().flatten() for p in state.model.parameters()])


def test_gradients_in_fp32_accumulate_more_exactly(law: Law) -> None:
    """In bf16, of 8 micro-batches: one rounding of each part and of the whole is left, 0.17% · √2, plus noise."""
    whole = in_bf16(ROWS, "compute")
    apart = {dtype: float((in_bf16(1, dtype) - whole).norm() / whole.norm()) for dtype in ("fp32", "compute")}
    law("accumulation N = 1: bf16, gradients summed in fp32", apart["fp32"], 2.5e-3, "relative, 2-norm")
    assert apart["compute"] > 2.5e-3
