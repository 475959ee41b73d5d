"""FP8's rounding, scales, products and gradients against NumPy; how far they are from exact ones is the law's."""

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from quern.kernels.cross_entropy import CHUNK_TOKENS, cross_entropy
from quern.kernels.fp8 import E4M3, E5M2, HeadProducts, fp8_linear, product, quantise
from quern.kernels.softcap import Cap, NoCap, SigmoidCap, TanhCap
from tests.laws.test_cross_entropy_law import loss_inputs, loss_with_gradients
from tests.support import fp8_oracle as oracle
from tests.support.deviation import random, with_gradients
from tests.support.fp8_oracle import through

pytestmark = pytest.mark.usefixtures("eager")


def array(x: Tensor) -> np.ndarray:
    return x.detach().double().numpy()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_visible_at_a_dynamic_scale(dtype: torch.dtype, bad: float) -> None:
    x = random(16, 16)
    x[3, 4] = bad
    assert quantise(x, dtype).values.float().isnan().any()


@pytest.mark.parametrize("shape", [(16, 24, 16), (16, 16, 24)])
def test_a_product_that_the_hardware_refuses_is_refused_everywhere(shape: tuple[int, int, int]) -> None:
    M, K, N = shape
    with pytest.raises(ValueError, match="make the last two multiples of 16"):
        product(quantise(random(M, K), E4M3), quantise(random(N, K), E4M3), torch.float32, emulated=True)


# The linear layer -------------------------------------------------------------------------------------------


def linear_and_gradients(x: Tensor, weight: Tensor, grad: Tensor) -> list[Tensor]:
    return with_gradients(partial(fp8_linear, emulated=True), (x, weight), grad)


def test_zero_input_and_zero_gradient_give_zeros() -> None:
    x, weight, grad = torch.zeros(16, 32), random(48, 32), random(16, 48)
    y, dx, dw = linear_and_gradients(x, weight, grad)
    assert y.count_nonzero() == 0 and dw.count_nonzero() == 0 and dx.count_nonzero() > 0
    _, dx, dw = linear_and_gradients(random(16, 32), weight, torch.zeros_like(grad))
    assert dx.count_nonzero() == 0 and dw.count_nonzero() == 0


def test_tokens_that_are_no_multiple_of_16_are_filled_up_with_zeros() -> None:
    x, weight, grad = random(20, 32), random(48, 32), random(20, 48)
    found = linear_and_gradients(x, weight, grad)
    filled = linear_and_gradients(F.pad(x, (0, 0, 0, 12)), weight, F.pad(grad, (0, 0, 0, 12)))
    assert all(torch.equal(one, other[: len(one)]) for one, other in zip(found, filled, strict=True))


def test_nothing_waits_for_the_device() -> None:
    """Forward and backward run on tensors without data, which nothing could be read from."""
    with FakeTensorMode():
        y, dx, dw = linear_and_gradients(torch.empty(32, 16), torch.empty(48, 16), torch.empty(32, 48))
        assert (y.shape, dx.shape, dw.shape) == ((32, 48), (32, 16), (48, 16))
        x, weight = torch.empty(32, 16, requires_grad=True), torch.empty(64, 16, requires_grad=True)
        products = emulated_products(x, weight, torch.empty(()))
        assert products.logits(slice(0, 16)).shape == (16, 64)
        assert [t.shape for t in products.gradients(slice(0, 16), torch.empty(16, 64), torch.empty(16))] == [
            (16, 16),
            (64, 16),
        ]


# The head's products in the loss ----------------------------------------------------------------------------

CAPS: dict[str, Cap] = {"tanh": TanhCap(15.0), "sigmoid": SigmoidCap(30.0, 25.0), "no": NoCap()}
emulated_products = partial(HeadProducts, emulated=True)
in_fp8: Any = partial(cross_entropy, products=emulated_products)


def normed_inputs(N: int, V: int, D: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The law's inputs, with normed hidden states and smaller weights."""
    x, weight, targets, scale = loss_inputs(N, V, D)
    return F.rms_norm(x, (D,)), 0.2 * weight, targets, scale


def expected_loss_and_gradients(inputs: tuple[Tensor, ...], cap: Cap) -> list[np.ndarray]:
    """The definition in float64 around the rounded operands; autograd gives the gradient by the logits."""
    x, weight, targets, scale = inputs
    D = x.size(1)
    x8 = through(array(x), oracle.E4M3, np.float32(np.sqrt(D) / 448))
    w8 = through(array(weight), oracle.E4M3, np.float32(24 / 448))
    logits = torch.from_numpy(x8 @ w8.T).requires_grad_()
    losses = F.cross_entropy(cap(logits), targets, reduction="none")
    (losses * scale).sum().backward()
    assert logits.grad is not None
    slope = cap.tanh_form[0] / cap.tanh_form[1] if cap.tanh_form else 1.0
    bound = np.float32(slope * float(scale.abs().max()))
    g8 = through(array(logits.grad), oracle.E5M2, bound * np.float32(1 / 57344))
    return [array(losses), g8 @ w8, g8.T @ x8]


@pytest.mark.parametrize("cap", CAPS)
def test_the_heads_products_in_the_loss(cap: str) -> None:
    inputs = normed_inputs(CHUNK_TOKENS + 48, 208, 32)
    found = loss_with_gradients(in_fp8, inputs, CAPS[cap])
    expected = expected_loss_and_gradients(inputs, CAPS[cap])
    assert np.abs(array(found[0]) - expected[0]).max() <= 2e-5
    for ours, e in zip(found[1:], expected[1:], strict=True):
        # fp32 gradients by the logits are off by some 1e-6, which moves about that share of them, times 8 for
        # the spacing, over a middle to the next E5M2 number, a fourth away: sqrt(1e-5) / 4. FP8 itself: 3e-2.
        assert np.linalg.norm(array(ours) - e) <= 1e-3 * np.linalg.norm(e)


def test_rows_with_small_denominators_keep_their_gradients() -> None:
    """The worst error of a row of dx, over the sum of its terms' sizes, where half of the rows have logits around 10,
    the others around -10, and so denominators that differ by a factor of 10^8."""
    _, weight, targets, _ = normed_inputs(64, 208, 32)
    common = F.normalize(random(32), dim=0)
    weight += 2.1 * common
    x = math.sqrt(32) * common * torch.tensor([1.0, -1.0]).repeat(32)[:, None]
    inputs = x, weight, targets, torch.full((64,), 1 / 64)
    logits = (x @ weight.T).requires_grad_()
    F.cross_entropy(TanhCap(15.0)(logits), targets).backward()
    assert logits.grad is not None
    plain = loss_with_gradients(cross_entropy, inputs, TanhCap(15.0))[1]
    found = loss_with_gradients(in_fp8, inputs, TanhCap(15.0))[1]
    worst = (1 + 1 / 8) * (1 + 1 / 16) - 1  # every gradient and every weight rounded as badly as can be
    assert ((found - plain).norm(dim=1) / (logits.grad.abs() @ weight.norm(dim=1))).max() <= worst


def test_a_head_saturates_and_stays_finite() -> None:
    """Hidden states beyond sqrt(width) and weights beyond 24 count as that much."""
    x, weight, targets, scale = normed_inputs(32, 48, 16)
    x[0], weight[0] = 1e6, -1e6
    at_the_ends = x.clone(), weight.clone()
    at_the_ends[0][0], at_the_ends[1][0] = 4.0, -24.0
    over = loss_with_gradients(in_fp8, (x, weight, targets, scale), TanhCap(15.0))
    ends = loss_with_gradients(in_fp8, (*at_the_ends, targets, scale), TanhCap(15.0))
    assert all(torch.isfinite(a).all() and torch.equal(a, b) for a, b in zip(over, ends, strict=True))


def test_small_gradients_of_the_head_do_not_underflow() -> None:
    """E5M2's smallest normal number is 2^-14 / 57344 of its largest, 2^-29.8; over 448 it would be 2^-22.8."""
    x, weight, _, _ = normed_inputs(16, 48, 16)
    products = emulated_products(x, weight, torch.ones(()))
    dx, _ = products.gradients(slice(0, 16), torch.full((16, 48), 2.0**-29), torch.ones(16))
    expected = torch.full((16, 48), 2.0**-29) @ weight
    assert (dx - expected).norm() <= 2**-3 * expected.norm()


def test_all_masked_is_zero_and_not_nan() -> None:
    x, weight, targets, _ = normed_inputs(16, 48, 16)
    losses, dx, dw = loss_with_gradients(in_fp8, (x, weight, targets, torch.zeros(16)), NoCap())
    assert torch.isfinite(losses).all() and dx.count_nonzero() == 0 and dw.count_nonzero() == 0
