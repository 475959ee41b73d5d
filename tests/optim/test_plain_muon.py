"""Muon as first published, against a polar decomposition by SVD in float64 and against torch's own."""

from typing import Any

import numpy as np
import pytest
import torch

from quern.optim.muon import PlainMuon
from tests.support.deviation import random

Scalars = dict[str, Any]
SHAPES = [(12, 20), (20, 12), (8, 8), (1, 9)]


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


@pytest.mark.parametrize("shape", SHAPES)
def test_ten_updates_are_those_of_the_svd(shape: tuple[int, int]) -> None:
    rule, master = PlainMuon(), random(*shape, seed=9)[None]
    state = rule.init_state(master)
    for step in range(10):
        scalars: Scalars = dict(rule.scalars(step + 1, 0.05, 0.9, 1.0))
        rule.update_(master, random(*shape, seed=step)[None], state, scalars, dtype=torch.float32, out=None)
    expected = torch.from_numpy(by_svd(shape, 10, 0.05, 0.9)).float()
    torch.testing.assert_close(master[0], expected, rtol=0, atol=2e-5)


def test_matrices_of_a_stack_do_not_mix_and_out_is_the_master_rounded() -> None:
    rule, stack = PlainMuon(), random(3, 6, 10, seed=9)
    grads, out = random(3, 6, 10), torch.empty(3, 6, 10, dtype=torch.bfloat16)
    scalars: Scalars = dict(rule.scalars(1, 0.1, 0.9, 1.0))
    alone = [m[None].clone() for m in stack]
    rule.update_(stack, grads, rule.init_state(stack), scalars, dtype=torch.float32, out=out)
    for i, master in enumerate(alone):
        rule.update_(master, grads[i : i + 1], rule.init_state(master), scalars, dtype=torch.float32, out=None)
        torch.testing.assert_close(stack[i], master[0], rtol=1e-6, atol=1e-6)
    assert torch.equal(out, stack.bfloat16())
