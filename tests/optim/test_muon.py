"""Muon's parts, each by the property it is there for; its variants against NumPy."""

from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter

from experiments.adam_h_head import AdamH
from quern.optim.adamw import AdamW
from quern.optim.groups import Rule
from quern.optim.muon import Muon, MuonH, PlainMuon, newton_schulz, norms, polar_express, sphere_step_
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


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize(("rows", "columns"), [(16, 16), (24, 6), (6, 24)])
def test_the_step_has_an_orthogonal_matrixs_norm_however_far_the_iteration_came(
    rows: int, columns: int, steps: int
) -> None:
    change = updated(random(1, rows, columns), steps=steps, weight_decay=0.0) - random(1, rows, columns, seed=9)
    expected = 0.1 * max(1, rows / columns) ** 0.5 * min(rows, columns) ** 0.5
    assert change.norm().item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("rule", [Muon(), PlainMuon()])
def test_out_is_the_rounded_master(rule: Rule) -> None:
    master, out = random(2, 8, 8), torch.zeros(2, 8, 8, dtype=torch.bfloat16)
    scalars: Any = rule.scalars(1, 0.1, 0.9, 1.0)
    rule.update_(master, random(2, 8, 8, seed=1), rule.init_state(master), scalars, dtype=torch.float32, out=out)
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


def test_a_step_on_the_sphere_is_the_formula() -> None:
    master, update = random(3, 12, 8).double(), random(3, 12, 8, seed=1).double()
    expected = []
    for weight, direction in zip(master.numpy(), update.numpy(), strict=True):
        moved = weight - 0.3 * np.linalg.norm(weight) * direction / np.linalg.norm(direction)
        expected.append(np.linalg.norm(weight) * moved / np.linalg.norm(moved))
    sphere_step_(master, update, norms(master), 0.3)
    np.testing.assert_allclose(master.numpy(), np.array(expected), rtol=1e-12)


def by_svd(shape: tuple[int, int], updates: int, lr: float, momentum: float) -> np.ndarray:
    """The quintic on the singular values themselves; momentum as in the source: lerp to g, then Nesterov's."""
    master = random(*shape, seed=9).double().numpy()
    buffer = np.zeros(shape)
    for step in range(updates):
        grad = random(*shape, seed=step).double().numpy()
        buffer = momentum * buffer + (1 - momentum) * grad
        u, s, vt = np.linalg.svd((1 - momentum) * grad + momentum * buffer, full_matrices=False)
        s = s / np.sqrt((s**2).sum())
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        master -= lr * max(1, shape[0] / shape[1]) ** 0.5 * (u * s) @ vt
    return master


@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (8, 8), (1, 9)])
def test_ten_updates_of_plain_muon_are_those_of_the_svd(shape: tuple[int, int]) -> None:
    rule, master = PlainMuon(), random(*shape, seed=9)[None]
    state = rule.init_state(master)
    for step in range(10):
        scalars: Any = dict(rule.scalars(step + 1, 0.05, 0.9, 1.0))
        rule.update_(master, random(*shape, seed=step)[None], state, scalars, dtype=torch.float32, out=None)
    expected = torch.from_numpy(by_svd(shape, 10, 0.05, 0.9)).float()
    torch.testing.assert_close(master[0], expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("rule", [MuonH(), AdamH((0.9, 0.95), 1e-10)])
def test_the_norm_stays_and_the_loss_falls(rule: MuonH | AdamH) -> None:
    """The loss is the squared distance to matrices of the same norm."""
    master, wanted = random(2, 16, 24), random(2, 16, 24, seed=5)
    wanted *= (master.square().sum((1, 2)) / wanted.square().sum((1, 2))).sqrt()[:, None, None]
    before, state = master.clone(), rule.init_state(master)
    out = torch.empty_like(master, dtype=torch.bfloat16)
    for step in range(1, 41):
        scalars = dict(rule.scalars(step, 0.05, 0.9, 1.0))
        rule.update_(master, 2 * (master - wanted), state, scalars, dtype=torch.float32, out=out)  # type: ignore
    torch.testing.assert_close(master.square().sum((1, 2)), before.square().sum((1, 2)), rtol=1e-5, atol=0)
    assert (master - wanted).square().sum() < 0.2 * (before - wanted).square().sum()
    assert torch.equal(out, master.bfloat16())
