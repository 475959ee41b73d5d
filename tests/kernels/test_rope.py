"""Rotary positions: the fused norm. Rotations: tests/laws/test_export_law.py, in Triton tests/laws/test_rope_law.py."""

import pytest
import torch

from quern.kernels.rope import rotate_plain
from quern.model.layers import norm, rotary_table


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_the_models(dtype: torch.dtype) -> None:
    """Bit for bit, so that a model's numbers do not depend on which of the two it calls."""
    x = torch.randn(2, 11, 3, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    cos, sin = rotary_table(torch.arange(5, 16)[None], 16, 100.0)
    assert torch.equal(rotate_plain(x, cos, sin, 1.2), norm(rotate_plain(x, cos, sin)) * 1.2)
