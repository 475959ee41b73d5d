"""The embedding's backward pass against a sum in float64, at tokens that occur as unevenly as words do."""

import pytest
import torch

from quern.model.layers import embed


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 2.0**-24), (torch.bfloat16, 2.0**-8)])
def test_gradients_are_summed_in_fp32(dtype: torch.dtype, rounding: float) -> None:
    """Within the rounding of the result, and a millionth of what was added up."""
    generator = torch.Generator().manual_seed(0)
    share = 1 / torch.arange(1, 102, dtype=torch.float32)
    tokens = torch.multinomial(share, 4096, replacement=True, generator=generator).view(8, 512)
    grad = torch.randn(8, 512, 16, generator=generator).to(dtype)
    weight = torch.randn(101, 16, generator=generator).to(dtype).requires_grad_()
    embed(tokens, weight).backward(grad)
    expected = torch.zeros(101, 16, dtype=torch.float64).index_add_(0, tokens.flatten(), grad.flatten(0, 1).double())
    assert weight.grad is not None and weight.grad.dtype == dtype
    scale = torch.zeros_like(expected).index_add_(0, tokens.flatten(), grad.flatten(0, 1).double().abs())
    apart = (weight.grad.double() - expected).abs()
    assert (apart <= rounding * expected.abs() + 1e-6 * scale).all(), apart.max()
