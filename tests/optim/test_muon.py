"""Muon's parts, each by the property it is there for."""

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from quern.optim.adamw import AdamW
from quern.optim.groups import Rule
from quern.optim.muon import (
    Muon,
    PlainMuon,
    newton_schulz,
    polar_express,
)
from tests.support.deviation import random

CONSTANTS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "beta2": 0.9, "weight_decay": 0.1}


def updated(grad: torch.Tensor, dtype: torch.dtype = torch.float32, steps: int = 5, **changes: Any) -> torch.Tensor:
    """A fixed master after one update by `grad`."""
    master, rule = random(*grad.shape, seed=9).to(torch.float32), Muon(steps=steps)
    rule.update_(master, grad, rule.init_state(master), {**CONSTANTS, **changes}, dtype=dtype, out=None)
    return master


@pytest.mark.parametrize("orthogonalize", [polar_express, newton_schulz])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_transposed_matrix_gives_the_transposed_result(orthogonalize: Any, dtype: torch.dtype) -> None:
    x = random(2, 24, 8).to(dtype)
    assert orthogonalize(x).dtype == dtype
    close = {"rtol": 0, "atol": 1e-5 if dtype == torch.float32 else 1e-2}
    torch.testing.assert_close(orthogonalize(x), orthogonalize(x.mT.contiguous()).mT, **close)


@pytest.mark.parametrize("scale", [1e-12, 1e6])
def test_the_update_ignores_the_scale_of_the_gradient(scale: float) -> None:
    grad = random(2, 16, 24)
    torch.testing.assert_close(updated(grad * scale), updated(grad), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps", [5, 9])
def test_a_zero_gradient_moves_nothing_but_by_decay(dtype: torch.dtype, steps: int) -> None:
    master = updated(torch.zeros(2, 8, 12, dtype=dtype), dtype=dtype, steps=steps)
    # update · master = 0 everywhere, which does not grow any weight: all of them decay
    torch.testing.assert_close(master, random(2, 8, 12, seed=9) * (1 - 0.1 * 0.1))


def test_a_dead_row_stays_dead_and_the_rest_finite() -> None:
    grad = random(1, 8, 12)
    grad[0, 3] = 0
    change = updated(grad, weight_decay=0.0) - random(1, 8, 12, seed=9)
    assert torch.isfinite(change).all()
    assert change[0, 3].abs().max() == 0
    assert change[0, 2].abs().max() > 1e-3


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize(("rows", "columns"), [(16, 16), (24, 6), (6, 24)])
def test_the_step_has_an_orthogonal_matrixs_norm_however_far_the_iteration_came(
    rows: int, columns: int, steps: int
) -> None:
    change = updated(random(1, rows, columns), steps=steps, weight_decay=0.0) - random(1, rows, columns, seed=9)
    expected = 0.1 * max(1, rows / columns) ** 0.5 * min(rows, columns) ** 0.5
    assert change.norm().item() == pytest.approx(expected, rel=1e-4)


def test_out_is_the_rounded_master() -> None:
    master, out = random(2, 8, 8), torch.zeros(2, 8, 8, dtype=torch.bfloat16)
    grad, state = random(2, 8, 8, seed=1), Muon().init_state(master)
    Muon().update_(master, grad, state, CONSTANTS, dtype=torch.float32, out=out)
    assert torch.equal(out, master.bfloat16())


@pytest.mark.parametrize("rule", [AdamW(weight_decay=0.1), Muon(weight_decay=0.1), PlainMuon()])
def test_new_scalars_and_sizes_are_not_compiled_anew(rule: Rule) -> None:
    """A schedule changes the scalars at every step: compiled once, and the results are those of Python
    numbers."""
    counter = CompileCounter()
    compiled = torch.compile(rule.update_, backend=counter, dynamic=True, fullgraph=True)
    compilations = []
    for count in (3, 5):
        plain, fused = random(count, 12, 8), random(count, 12, 8)
        plain_state, fused_state = rule.init_state(plain), rule.init_state(fused)
        for step in range(1, 4):
            scalars = rule.scalars(step, 0.1 / step, 0.9 + 0.01 * step, 1 / step)
            tensors: dict[str, Any] = {k: torch.tensor(x, dtype=torch.float64) for k, x in scalars.items()}
            grad = random(count, 12, 8, seed=step)
            rule.update_(plain, grad, plain_state, dict(scalars), dtype=torch.float32, out=None)
            compiled(fused, grad, fused_state, tensors, dtype=torch.float32, out=None)
            compilations.append(counter.frame_count)
        torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-6)
    assert set(compilations) == {1}
