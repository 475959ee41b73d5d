"""Advantages, penalties, the clipped objective, and pass@k against plain definitions."""

from itertools import combinations

import numpy as np
import pytest
import torch

from quern.rl.advantages import advantages, clipped_ratios, is_uniform, overlong_penalty, pass_at_k
from quern.rl.rollouts import divergence


def test_advantages_of_a_group_add_up_to_zero() -> None:
    rewards = np.array([[1.0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
    found = advantages(rewards)
    assert found.tolist() == [[0.75, -0.25, -0.25, -0.25], [0.5, 0.5, -0.5, -0.5], [0, 0, 0, 0]]
    normalized = advantages(rewards, normalize=True)
    assert normalized[:2].std(axis=1) == pytest.approx(1)
    assert normalized[2].tolist() == [0, 0, 0, 0]
    assert [is_uniform(row) for row in rewards] == [False, False, True]


def test_the_penalty_for_length_grows_to_one() -> None:
    assert [overlong_penalty(length, 100, 20) for length in (10, 80, 85, 90, 100, 130)] == [0, 0, 0.25, 0.5, 1, 1]
    assert overlong_penalty(100, 100, 0) == 0


def test_weights_of_clipped_ratios_give_the_gradient_of_the_clipped_objective() -> None:
    rng = np.random.default_rng(0)
    before, now = rng.normal(-1, 0.5, 400), rng.normal(-1, 0.5, 400)
    weights, low, high = rng.normal(0, 1, 400), 0.2, 0.28
    logprobs = torch.tensor(now, requires_grad=True)
    ratio = (logprobs - torch.tensor(before)).exp()
    advantage = torch.tensor(weights)
    torch.minimum(ratio * advantage, ratio.clip(1 - low, 1 + high) * advantage).sum().backward()
    assert logprobs.grad is not None
    found = clipped_ratios(now, before, weights, low, high)
    assert found == pytest.approx(logprobs.grad.numpy(), abs=1e-12)
    assert 50 < (found == 0).sum() < 350
    assert clipped_ratios(now, now, weights, low, high) == pytest.approx(weights)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_reply() -> None:
    for samples in range(1, 7):
        for right in range(samples + 1):
            for k in range(1, samples + 1):
                subsets = list(combinations(range(samples), k))
                share = sum(any(index < right for index in subset) for subset in subsets) / len(subsets)
                assert pass_at_k(right, samples, k) == pytest.approx(share)
    for wrong in ((1, 3, 4), (4, 3, 1), (1, 3, 0)):
        with pytest.raises(ValueError, match="not defined"):
            pass_at_k(*wrong)


def test_the_divergence_is_unbiased_and_its_gradient_is_the_weight() -> None:
    ours, theirs = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.5, 0.3])
    estimate = divergence(np.log(ours), np.log(theirs))
    assert (estimate >= 0).all()
    assert (ours * estimate).sum() == pytest.approx((ours * np.log(ours / theirs)).sum())
