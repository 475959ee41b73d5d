"""The rules that keep every matrix at its norm, against the formula written over again in NumPy."""

import numpy as np
import pytest
import torch

from experiments.adam_h_head import AdamH
from quern.optim.muon import MuonH, sphere_step_
from tests.optim.test_muon import random


def test_a_step_is_the_formula() -> None:
    master, update = random(3, 12, 8).double(), random(3, 12, 8, seed=1).double()
    radius = master.square().sum((1, 2), keepdim=True).sqrt()
    expected = []
    for weight, direction in zip(master.numpy(), update.numpy(), strict=True):
        moved = weight - 0.3 * np.linalg.norm(weight) * direction / np.linalg.norm(direction)
        expected.append(np.linalg.norm(weight) * moved / np.linalg.norm(moved))
    sphere_step_(master, update, radius, 0.3)
    np.testing.assert_allclose(master.numpy(), np.array(expected), rtol=1e-12)


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
