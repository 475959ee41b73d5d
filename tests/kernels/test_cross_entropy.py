"""The chunked loss where it must be exact: masks, scales, chunks. How far it is from its twin is the law's."""

import math

import numpy as np
import pytest
import torch

from quern.kernels import cross_entropy as module
from quern.kernels.cross_entropy import CHUNK_TOKENS, cross_entropy, cross_entropy_plain
from tests.train.toy import eager

__all__ = ["eager"]  # a fixture
pytestmark = pytest.mark.usefixtures("eager")  # the compiled twin is held to the same bar in the kernel law

SOFTCAP = 15.0


def inputs(N: int, D: int = 12, V: int = 37) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(N)
    x = torch.randn(N, D, generator=generator).requires_grad_()
    weight = torch.randn(V, D, generator=generator).requires_grad_()
    return x, weight, torch.randint(0, V, (N,), generator=generator)


def test_plain_twin_is_the_definition() -> None:
    x, weight, targets = inputs(50)
    z = SOFTCAP * np.tanh(x.detach().double().numpy() @ weight.detach().double().numpy().T / SOFTCAP)
    expected = np.log(np.exp(z).sum(1)) - z[np.arange(50), targets.numpy()]
    assert np.abs(cross_entropy_plain(x, weight, targets, SOFTCAP).detach().numpy() - expected).max() <= 1e-5


def test_masked_targets_give_exactly_no_gradient_and_no_loss() -> None:
    x, weight, targets = inputs(CHUNK_TOKENS + 7)
    scale = torch.zeros(len(x))
    counted = torch.arange(len(x)) % 3 == 0
    scale[counted] = 0.01
    total, losses = cross_entropy(x, weight, targets, scale, SOFTCAP)
    total.backward()
    assert x.grad is not None and weight.grad is not None
    assert x.grad[~counted].count_nonzero() == 0
    assert (x.grad[counted].abs().amax(1) > 0).all()
    assert torch.isclose(total, (losses[counted] * 0.01).sum(), rtol=1e-6)
    # What is masked may be anything: neither loss nor gradient may change in a bit.
    other_x, other_targets = x.detach().clone(), targets.clone()
    other_x[~counted], other_targets[~counted] = 3.0, 0
    other_x.requires_grad_()
    weight_grad, weight.grad = weight.grad, None
    again, _ = cross_entropy(other_x, weight, other_targets, scale, SOFTCAP)
    again.backward()
    assert torch.equal(again, total)
    assert isinstance(weight.grad, torch.Tensor) and torch.equal(weight.grad, weight_grad)


def test_all_masked_is_zero_and_not_nan() -> None:
    x, weight, targets = inputs(5)
    total, _ = cross_entropy(x, weight, targets, torch.zeros(5), SOFTCAP)
    total.backward()
    assert x.grad is not None and weight.grad is not None
    assert total.item() == 0 and x.grad.count_nonzero() == 0 and weight.grad.count_nonzero() == 0


def test_negative_scales_turn_the_gradient_around() -> None:
    """Advantages are signed."""
    x, weight, targets = inputs(20)
    grads = [
        torch.autograd.grad(cross_entropy(x, weight, targets, torch.full((20,), s), SOFTCAP)[0], (x, weight))
        for s in (0.5, -0.5)
    ]
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, -other)


def test_a_gradient_from_above_multiplies() -> None:
    x, weight, targets = inputs(20)
    total, _ = cross_entropy(x, weight, targets, torch.ones(20), SOFTCAP)
    ones = torch.autograd.grad(total, (x, weight), retain_graph=True)
    fours = torch.autograd.grad(4 * total, (x, weight))
    assert all(torch.equal(4 * one, four) for one, four in zip(ones, fours, strict=True))


def test_losses_are_the_same_with_and_without_gradients() -> None:
    x, weight, targets = inputs(CHUNK_TOKENS + 1)
    total, losses = cross_entropy(x, weight, targets, torch.ones(len(x)), SOFTCAP)
    with torch.no_grad():
        total_only, losses_only = cross_entropy(x, weight, targets, torch.ones(len(x)), SOFTCAP)
    assert not losses.requires_grad and losses.dtype == torch.float32
    assert (losses - losses_only).abs().max() <= 2e-5  # the one takes tanh and exp from the library
    assert torch.allclose(total, total_only, rtol=1e-6)


@pytest.mark.parametrize("softcap", [1.0, 15.0, 30.0, 60.0])
def test_saturated_logits_stay_finite(softcap: float) -> None:
    x, weight, targets = inputs(30)
    with torch.no_grad():
        x.mul_(1e4)
    total, losses = cross_entropy(x, weight, targets, torch.ones(30), softcap)
    total.backward()
    plain = cross_entropy_plain(x, weight, targets, softcap).detach()
    assert x.grad is not None and torch.isfinite(x.grad).all()
    assert (losses - plain).abs().max() <= 1e-5 * 2 * softcap


def test_a_softcap_that_would_overflow_is_refused() -> None:
    x, weight, targets = inputs(3)
    with pytest.raises(ValueError, match="softcap 61 is too large for the chunked loss: use at most 60"):
        cross_entropy(x, weight, targets, torch.ones(3), 61)


def test_tanh_and_exp_over_their_whole_range() -> None:
    y = torch.linspace(-30, 30, 200_001)
    assert (module._tanh(y).double() - torch.tanh(y.double())).abs().max() <= 4e-7
    assert module._tanh(torch.tensor([0.0])).item() == 0
    capped = torch.linspace(-1, 1, 100_001)
    for softcap in (0.3, 1.0, 15.0, 60.0):
        exact = torch.exp(softcap * capped.double())
        assert ((module._exp(capped, softcap).double() - exact) / exact).abs().max() <= 1e-6 * max(1, softcap)


def test_uniform_logits_cost_the_logarithm_of_the_vocabulary() -> None:
    x, weight, targets = inputs(9, V=1000)
    _, losses = cross_entropy(torch.zeros_like(x), weight, targets, torch.ones(9), SOFTCAP)
    assert (losses - math.log(1000)).abs().max() <= 1e-5
