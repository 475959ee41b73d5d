"""The chunked loss where it must be exact: masks, scales, chunks. How far it is from its twin is the law's."""

import pytest
import torch

from quern.kernels.cross_entropy import (
    CHUNK_TOKENS,
    cross_entropy,
    cross_entropy_plain,
    polynomial_exp,
    rational_tanh,
)
from quern.kernels.softcap import Cap, NoCap, SigmoidCap, TanhCap

pytestmark = pytest.mark.usefixtures("eager")  # the compiled twin is held to the same bar in the kernel law

CAP = TanhCap(15.0)


def inputs(N: int, D: int = 12, V: int = 37) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(N)
    x = torch.randn(N, D, generator=generator).requires_grad_()
    weight = torch.randn(V, D, generator=generator).requires_grad_()
    return x, weight, torch.randint(0, V, (N,), generator=generator)


def test_masked_targets_give_exactly_no_gradient_and_no_loss() -> None:
    x, weight, targets = inputs(CHUNK_TOKENS + 7)
    scale = torch.zeros(len(x))
    counted = torch.arange(len(x)) % 3 == 0
    scale[counted] = 0.01
    total, losses = cross_entropy(x, weight, targets, scale, CAP)
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
    again, _ = cross_entropy(other_x, weight, other_targets, scale, CAP)
    again.backward()
    assert torch.equal(again, total)
    assert isinstance(weight.grad, torch.Tensor) and torch.equal(weight.grad, weight_grad)


@pytest.mark.parametrize("cap", [TanhCap(1.0), TanhCap(60.0), SigmoidCap(30.0, 3.0), SigmoidCap(120.0, 1.0)])
def test_saturated_logits_stay_finite(cap: Cap) -> None:
    x, weight, targets = inputs(30)
    with torch.no_grad():
        x.mul_(1e4)
    total, losses = cross_entropy(x, weight, targets, torch.ones(30), cap)
    total.backward()
    plain = cross_entropy_plain(x, weight, targets, cap).detach()
    assert x.grad is not None and torch.isfinite(x.grad).all()
    assert cap.tanh_form is not None
    assert (losses - plain).abs().max() <= 1e-5 * 2 * cap.tanh_form[0]


@pytest.mark.parametrize("size", [1e2, 1e4, 1e30])
def test_logits_without_a_cap_may_be_huge(size: float) -> None:
    """Far beyond where exp overflows; all but one entry of a softmax is then zero."""
    x, weight, targets = inputs(30)
    with torch.no_grad():
        x.mul_(size)
    total, losses = cross_entropy(x, weight, targets, torch.ones(30), NoCap())
    total.backward()
    plain = cross_entropy_plain(x, weight, targets, NoCap())
    expected = torch.autograd.grad(plain.sum(), (x, weight))
    assert x.grad is not None and weight.grad is not None and torch.isfinite(losses).all()
    assert torch.allclose(losses, plain, rtol=1e-5, atol=1e-5)
    assert torch.allclose(x.grad, expected[0], rtol=1e-4, atol=1e-5)
    assert torch.allclose(weight.grad, expected[1], rtol=1e-4, atol=1e-5 * size)


@pytest.mark.parametrize("cap", [TanhCap(61.0), SigmoidCap(121.0, 1.0)])
def test_a_cap_that_would_overflow_is_refused(cap: Cap) -> None:
    x, weight, targets = inputs(3)
    with pytest.raises(ValueError, match="is too wide for the chunked loss: keep the range of logits to 120 "):
        cross_entropy(x, weight, targets, torch.ones(3), cap)


def test_tanh_and_exp_over_their_whole_range() -> None:
    y = torch.linspace(-30, 30, 200_001)
    assert (rational_tanh(y).double() - torch.tanh(y.double())).abs().max() <= 4e-7
    assert rational_tanh(torch.tensor([0.0])).item() == 0
    capped = torch.linspace(-1, 1, 100_001)
    for height in (0.3, 1.0, 15.0, 60.0):
        exact = torch.exp(height * capped.double())
        assert ((polynomial_exp(capped, height).double() - exact) / exact).abs().max() <= 1e-6 * max(1, height)
