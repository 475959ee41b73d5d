"""Law: the optimizer equals its oracles: torch.optim.AdamW, and Muon written over again in NumPy with an SVD."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import polar

from quern.optim.adamw import AdamW, Scalar
from quern.optim.muon import Muon, newton_schulz, polar_express
from tests.laws.table import Law

STEPS = 20
BETAS, WEIGHT_DECAY = (0.8, 0.95), 0.1
ADAMW_BAR = 1e-6


def adamw_deviation(eps: float) -> float:
    """The largest relative difference (2-norms) of the weights from torch.optim.AdamW's over 20 steps, fp32."""
    generator = torch.Generator().manual_seed(0)
    oracle = torch.nn.Parameter(torch.randn(37, 11, generator=generator))
    adamw = torch.optim.AdamW([oracle], lr=0.1, betas=BETAS, eps=eps, weight_decay=WEIGHT_DECAY)
    rule = AdamW(BETAS, eps, WEIGHT_DECAY)
    ours = oracle.detach().clone().flatten()
    m, v = torch.zeros_like(ours), torch.zeros_like(ours)
    worst = 0.0
    for step in range(1, STEPS + 1):
        lr = 0.1 * (1 - step / 25)
        adamw.param_groups[0]["lr"] = lr
        grad = 0.03 * torch.randn(37, 11, generator=generator)
        oracle.grad = grad.clone()
        adamw.step()
        scalars: dict[str, Scalar] = {**rule.scalars(step, lr, momentum=0.0, decay=1.0)}
        rule.update_(ours, grad.flatten(), {"m": m, "v": v}, scalars, dtype=torch.float32, out=None)
        worst = max(worst, ((ours.view_as(oracle) - oracle).norm() / oracle.norm()).item())
    return worst


def test_adamw_is_torchs_adamw(law: Law) -> None:
    # The first eps is of the size of the gradients, so that its place in the formula shows.
    worst = max(adamw_deviation(eps) for eps in (1e-2, 1e-10))
    law("AdamW = torch.optim.AdamW, 20 steps", worst, ADAMW_BAR, "relative, fp32")


def with_spectrum(rows: int, columns: int, smallest: float) -> np.ndarray:
    """A random matrix whose singular values are spaced evenly, on a log scale, from 1 to the smallest one."""
    left, _, right = np.linalg.svd(np.random.default_rng(0).normal(size=(rows, columns)), full_matrices=False)
    return (left * np.geomspace(1, smallest, min(rows, columns))) @ right


SHAPES = [(32, 32), (48, 16), (16, 48), (1, 8), (8, 1)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_polar_express_converges_to_the_polar_factor(dtype: torch.dtype, law: Law) -> None:
    worst = 0.0
    for rows, columns in SHAPES:
        x = with_spectrum(rows, columns, smallest=1e-3)
        found = polar_express(torch.tensor(x, dtype=dtype)[None], steps=12)[0].double().numpy()
        worst = max(worst, float(np.abs(found - polar(x)[0]).max()))
    law(f"Polar Express, 12 steps = SVD polar factor, {str(dtype)[6:]}", worst, 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_five_steps_come_near_the_polar_factor(dtype: torch.dtype, law: Law) -> None:
    low, high, cosine = math.inf, 0.0, 1.0
    for rows, columns in [(64, 64), (96, 32), (32, 96)]:
        x = with_spectrum(rows, columns, smallest=1e-2)
        found = polar_express(torch.tensor(x, dtype=dtype)[None])[0].double().numpy()
        spectrum, exact = np.linalg.svd(found, compute_uv=False), polar(x)[0]
        low, high = min(low, spectrum[-1]), max(high, spectrum[0])
        cosine = min(cosine, float((found * exact).sum() / np.linalg.norm(found) / np.linalg.norm(exact)))
    name = str(dtype)[6:]
    law(f"Polar Express, 5 steps: singular values, {name}", f"{low:.3f} to {high:.3f}", bar="0.84 to 1.15")
    law(f"Polar Express, 5 steps: cosine with U·Vᵀ, {name}", cosine, bar="≥ 0.99")
    assert low >= 0.84 and high <= 1.15 and cosine >= 0.99


def response(orthogonalize: Callable[..., torch.Tensor], values: np.ndarray) -> np.ndarray:
    """Returns the singular values after five steps; `values` are shares of the Frobenius norm.

    A (2, 2) diagonal matrix holds the value and what is left of the norm.
    """
    pairs = torch.tensor(np.stack([values, np.sqrt(1 - values**2)], -1))
    return orthogonalize(torch.diag_embed(pairs), 5)[:, 0, 0].numpy()


def test_the_bands_that_five_steps_reach(law: Law) -> None:
    polar = response(polar_express, np.geomspace(1e-3, 1 - 1e-9, 4000))
    law("Polar Express, 5 steps, inputs from 0.001", f"{polar.min():.3f} to {polar.max():.3f}", bar="0.84 to 1.15")
    assert polar.min() >= 0.84 and polar.max() <= 1.15
    quintic = response(newton_schulz, np.geomspace(1e-2, 1 - 1e-9, 4000))
    law("Newton–Schulz, 5 steps, inputs from 0.01", f"{quintic.min():.3f} to {quintic.max():.3f}", bar="0.68 to 1.14")
    assert quintic.min() >= 0.68 and quintic.max() <= 1.14


MUON: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "beta2": 0.8, "weight_decay": 0.4}
MUON_BAR = 1e-8


def reference_muon(
    weight: np.ndarray, grads: list[np.ndarray], *, lr: float, momentum: float, beta2: float, weight_decay: float
) -> np.ndarray:
    """Muon by the papers' formulas, one matrix, exact polar factor."""
    rows, columns = weight.shape
    velocity, second = np.zeros_like(weight), 0.0
    for grad in grads:
        velocity = momentum * velocity + (1 - momentum) * grad
        update = momentum * velocity + (1 - momentum) * grad
        lengths = np.linalg.norm(update, axis=1, keepdims=True)
        update = polar(update / lengths * np.sqrt((lengths**2).mean()))[0]
        update = update / np.linalg.norm(update) * np.sqrt(min(rows, columns))
        second = beta2 * second + (1 - beta2) * (update**2).mean(axis=1 if rows >= columns else 0, keepdims=True)
        scaled = update / np.sqrt(second)
        update = scaled * np.linalg.norm(update) / np.linalg.norm(scaled)
        decay = weight_decay * weight * (np.sign(update) == np.sign(weight))
        weight = weight - lr * np.sqrt(max(1, rows / columns)) * (update + decay)
    return weight


def test_muon_is_the_papers_formulas_with_an_svd(law: Law) -> None:
    worst = 0.0
    for rows, columns in [(12, 12), (20, 8), (8, 20)]:
        random = np.random.default_rng(rows)
        start = 0.1 * random.normal(size=(rows, columns))
        loudness = np.geomspace(1, 30, rows)[:, None]  # loud and quiet rows
        grads = [loudness * random.normal(size=(rows, columns)) for _ in range(5)]
        master = torch.tensor(start)[None].clone()
        state = Muon().init_state(master)
        for grad in grads:
            Muon(steps=30).update_(master, torch.tensor(grad)[None], state, MUON, dtype=torch.float64, out=None)
        expected = reference_muon(start, grads, **MUON)
        moved = np.linalg.norm(expected - start)
        worst = max(worst, float(np.linalg.norm(master[0].numpy() - expected) / moved))
    law("Muon, 5 updates = NumPy with the SVD polar factor", worst, MUON_BAR, "relative, fp64, 30 steps")


def test_a_stack_is_updated_as_its_matrices_alone(law: Law) -> None:
    worst = 0.0
    for dtype in (torch.float32, torch.bfloat16):
        for rows, columns in [(24, 24), (40, 16), (16, 40)]:
            generator = torch.Generator().manual_seed(1)
            master = torch.randn(5, rows, columns, generator=generator)
            grads = [torch.randn(5, rows, columns, generator=generator).to(dtype) for _ in range(3)]
            stack, single = master.clone(), master.clone()
            state = Muon().init_state(stack)
            alone = [Muon().init_state(single[i : i + 1]) for i in range(5)]
            for grad in grads:
                Muon().update_(stack, grad, state, MUON, dtype=dtype, out=None)
                for i, mine in enumerate(alone):
                    part = slice(i, i + 1)
                    Muon().update_(single[part], grad[part], mine, MUON, dtype=dtype, out=None)
            worst = max(worst, ((stack - single).norm() / stack.norm()).item())
    law("Muon on a stack = on each matrix alone", worst, 1e-6, "relative")
