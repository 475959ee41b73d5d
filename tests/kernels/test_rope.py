"""Rotary positions: the plain twins against complex numbers, and what the law (tests/laws/test_rope_law.py) assumes."""

import numpy as np
import pytest
import torch

from quern.kernels.rope import rotate, rotate_plain
from quern.model.layers import norm, rotary_table


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(2, 11, 3, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    return x, *rotary_table(torch.arange(5, 16)[None], 16, 100.0)


def in_complex(x: np.ndarray, base: float) -> np.ndarray:
    """Each pair is a complex number, turned by e^(-i · position · frequency)."""
    half = x.shape[-1] // 2
    angles = np.arange(5, 16)[:, None, None] * base ** -(np.arange(half) / half)
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(-1j * angles)
    return np.concatenate([z.real, z.imag], -1)


def test_a_rotation_is_a_product_with_a_complex_number() -> None:
    x, cos, sin = inputs()
    expected = in_complex(x.double().numpy(), 100.0)
    assert np.abs(rotate(x, cos, sin).numpy() - expected).max() <= 2e-6
    assert np.abs(rotate(rotate(x, cos, sin), cos, -sin).numpy() - x.numpy()).max() <= 2e-6
    normed = 1.2 * expected / np.sqrt((expected**2).mean(-1, keepdims=True) + 1e-6)
    assert np.abs(rotate(x, cos, sin, 1.2).numpy() - normed).max() <= 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_the_models(dtype: torch.dtype) -> None:
    """Bit for bit, so that a model's numbers do not depend on which of the two it calls."""
    x, cos, sin = inputs(dtype)
    assert torch.equal(rotate_plain(x, cos, sin, 1.2), norm(rotate_plain(x, cos, sin)) * 1.2)
