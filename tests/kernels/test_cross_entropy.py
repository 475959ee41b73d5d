"""The chunked loss where it must be exact: masks, scales, chunks. How far it is from its twin is the law's."""

import pytest
import torch

from quern.kernels.cross_entropy import CHUNK_TOKENS, cross_entropy, polynomial_exp, rational_tanh
from quern.kernels.softcap import Cap, NoCap, SigmoidCap, TanhCap
from tests.laws.test_cross_entropy_law import loss_inputs, loss_with_gradients, plain

pytestmark = pytest.mark.usefixtures("eager")  # the compiled twin is held to the same bar in the kernel law


def test_masked_targets_give_exactly_no_gradient_and_no_loss() -> None:
    x, weight, targets, _ = loss_inputs(CHUNK_TOKENS + 7, 37)
    counted, cap = torch.arange(len(x)) % 3 == 0, TanhCap(15.0)
    scale = torch.where(counted, 0.01, 0.0)
    losses, dx, dweight = loss_with_gradients(cross_entropy, (x, weight, targets, scale), cap)
    assert dx[~counted].count_nonzero() == 0
    assert (dx[counted].abs().amax(1) > 0).all()
    total = cross_entropy(x, weight, targets, scale, cap)[0]
    assert torch.isclose(total, (losses[counted] * 0.01).sum(), rtol=1e-6)
    # What is masked may be anything: neither loss nor gradient may change in a bit.
    x[~counted], targets[~counted] = 3.0, 0
    assert torch.equal(cross_entropy(x, weight, targets, scale, cap)[0], total)
    assert torch.equal(loss_with_gradients(cross_entropy, (x, weight, targets, scale), cap)[2], dweight)


@pytest.mark.parametrize("cap", [TanhCap(1.0), TanhCap(60.0), SigmoidCap(30.0, 3.0), SigmoidCap(120.0, 1.0)])
def test_saturated_logits_stay_finite(cap: Cap) -> None:
    x, weight, targets, _ = loss_inputs(30, 37)
    inputs = 1e4 * x, weight, targets, torch.ones(30)
    found, expected = (loss_with_gradients(path, inputs, cap) for path in (cross_entropy, plain))
    assert torch.isfinite(found[1]).all() and cap.tanh_form is not None
    assert (found[0] - expected[0]).abs().max() <= 1e-5 * 2 * cap.tanh_form[0]


@pytest.mark.parametrize("size", [1e2, 1e4, 1e30])
def test_logits_without_a_cap_may_be_huge(size: float) -> None:
    """Far beyond where exp overflows; all but one entry of a softmax is then zero."""
    x, weight, targets, _ = loss_inputs(30, 37)
    inputs = size * x, weight, targets, torch.ones(30)
    found, expected = (loss_with_gradients(path, inputs, NoCap()) for path in (cross_entropy, plain))
    assert torch.isfinite(found[0]).all()
    for ours, theirs, rtol, atol in zip(found, expected, (1e-5, 1e-4, 1e-4), (1e-5, 1e-5, 1e-5 * size), strict=True):
        assert torch.allclose(ours, theirs, rtol=rtol, atol=atol)


@pytest.mark.parametrize("cap", [TanhCap(61.0), SigmoidCap(121.0, 1.0)])
def test_a_cap_that_would_overflow_is_refused(cap: Cap) -> None:
    with pytest.raises(ValueError, match="is too wide for the chunked loss: keep the range of logits to 120 "):
        cross_entropy(*loss_inputs(3, 37), cap)


def test_tanh_and_exp_over_their_whole_range() -> None:
    y = torch.linspace(-30, 30, 200_001)
    assert (rational_tanh(y).double() - torch.tanh(y.double())).abs().max() <= 4e-7
    assert rational_tanh(torch.tensor([0.0])).item() == 0
    capped = torch.linspace(-1, 1, 100_001)
    for height in (0.3, 1.0, 15.0, 60.0):
        exact = torch.exp(height * capped.double())
        assert ((polynomial_exp(capped, height).double() - exact) / exact).abs().max() <= 1e-6 * max(1, height)
