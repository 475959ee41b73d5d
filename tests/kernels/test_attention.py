"""Attention against a plain loop and the library's own kernel; the grid of shapes is the kernel law's."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quern.kernels.attention import attend, attend_blocked, attend_plain, kept_elements


def inputs(T: int, heads: int = 4, kv_heads: int = 2, E: int = 8, B: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(T)

    def draw(heads: int) -> Tensor:
        return torch.randn(B, T, heads, E, generator=generator).requires_grad_()

    return draw(heads), draw(kv_heads), draw(kv_heads)


def looped(q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int | None) -> np.ndarray:
    """One query at a time, in float64, straight from the definition."""
    B, T, H, E = q.shape
    y = np.zeros_like(q)
    for b in range(B):
        for h in range(H):
            kv = h // (H // k.shape[2])
            for t in range(T):
                low = 0 if window is None else max(0, t - window + 1)
                scores = k[b, low : t + 1, kv] @ q[b, t, h] / math.sqrt(E)
                p = np.exp(scores - scores.max())
                y[b, t, h] = (p / p.sum()) @ v[b, low : t + 1, kv]
    return y


@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize("path", [attend, attend_plain])
def test_both_paths_are_the_definition(path, window: int | None) -> None:  # type: ignore[no-untyped-def]
    q, k, v = inputs(23)
    exact = [x.detach().double().numpy() for x in (q, k, v)]
    expected = looped(exact[0], exact[1], exact[2], window)
    y = path(q, k, v, window)
    assert y.shape == q.shape
    assert np.abs(y.detach().double().numpy() - expected).max() <= 1e-6


def test_the_library_agrees_with_the_plain_twin() -> None:
    q, k, v = inputs(65, heads=6, kv_heads=3)
    turned = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    expected = F.scaled_dot_product_attention(
        turned[0], turned[1], turned[2], is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    assert (attend_plain(q, k, v) - expected).abs().max() <= 1e-6


def test_a_window_as_long_as_the_row_is_no_window() -> None:
    q, k, v = inputs(40)
    for window in (40, 41, 1000):
        assert torch.equal(attend(q, k, v, window), attend(q, k, v))
    assert not torch.equal(attend(q, k, v, 39), attend(q, k, v))


def test_a_window_of_one_returns_the_values() -> None:
    q, k, v = inputs(300)
    assert torch.equal(attend(q, k, v, 1), v.repeat_interleave(2, dim=2))


@pytest.mark.parametrize("T", [17, 300, 700])
@pytest.mark.parametrize("window", [None, 64])
def test_nothing_hidden_leaks_a_single_bit_forward_or_backward(T: int, window: int | None) -> None:
    q, k, v = inputs(T)
    at = T // 2
    before = attend(q, k, v, window)
    with torch.no_grad():
        other_k, other_v = k.clone(), v.clone()
        other_k[:, at], other_v[:, at] = 7.0, -7.0
        after = attend(q, other_k, other_v, window)
    reach = T if window is None else min(T, at + window)
    assert torch.equal(before[:, :at], after[:, :at])
    assert torch.equal(before[:, reach:], after[:, reach:])
    assert not torch.isclose(before[:, at:reach], after[:, at:reach]).all(-1).all(-1).any()
    (dk,) = torch.autograd.grad(before[:, :at].square().sum(), k, retain_graph=True)
    assert dk[:, at:].count_nonzero() == 0 and dk[:, :at].count_nonzero() > 0
    if reach < T:
        (dv,) = torch.autograd.grad(before[:, reach:].square().sum(), v)
        assert dv[:, : at + 1].count_nonzero() == 0


def test_rows_of_a_batch_do_not_meet() -> None:
    q, k, v = inputs(130, B=3)
    whole = attend(q, k, v, 64)
    alone = torch.cat([attend(q[b : b + 1], k[b : b + 1], v[b : b + 1], 64) for b in range(3)])
    assert (whole - alone).abs().max() <= 1e-6


def test_inputs_need_not_be_contiguous() -> None:
    q, k, v = inputs(33)
    a, b, c = (torch.stack([x, x], dim=-1)[..., 0] for x in (q, k, v))
    assert not a.is_contiguous()
    assert torch.equal(attend(a, b, c, 9), attend(q, k, v, 9))


@pytest.mark.parametrize("window", [0, 5, 200])
def test_the_operator_keeps_torchs_contract(window: int) -> None:
    """Schema, shapes under the compiler's fake tensors, and the registration of its gradient."""
    turned = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in inputs(300, E=4)]
    torch.library.opcheck(attend_blocked, (*turned, window, kept_elements(turned[0], window)))
