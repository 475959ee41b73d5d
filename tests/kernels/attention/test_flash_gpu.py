"""Flash attention on a GPU, where there is one: precision in bf16 and fp16, and the same bits at every call.

The law in fp32 is `tests/laws/test_flash_law.py`, in Triton's interpreter. Here tensor cores compute, and tiles are
chosen by timing. Rounding to bf16 is measured, not assumed: the error against float64 may not exceed that
of the same formula whose every operation is rounded to the dtype.
"""

import itertools

import pytest
import torch
from torch import Tensor

from quern.kernels.attention.attend import MaskSpec
from quern.kernels.attention.flash import flash_attention
from tests.laws.test_attention_law import Attend, attended, in_one_dtype

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="runs on a GPU")

DEVICE = torch.device("cuda")
RATIO_BAR = 1.1
SHAPES = list(itertools.product((1, 17, 127, 129, 1000, 2500), (None, 1, 64, 1000), (False, True)))


def inputs(T: int, E: int, dtype: torch.dtype, packed: bool) -> tuple[list[Tensor], Tensor | None]:
    """q, k, v as slices of one projection, two heads to a key-value head, a gradient of y; and document ids."""
    generator = torch.Generator().manual_seed(T + E)
    merged = torch.randn(2, T, 8, E, generator=generator).to(DEVICE, dtype)
    grad = torch.randn(2, T, 4, E, generator=generator).to(DEVICE, dtype)
    starts = torch.rand(2, T, generator=generator) < 0.01
    documents = starts.cumsum(1).int().to(DEVICE) if packed else None
    return [*merged.split([4, 2, 2], dim=2), grad], documents


def with_gradients(attend: Attend, tensors: list[Tensor], mask: MaskSpec) -> list[Tensor]:
    return attended(attend, tensors, mask, tensors[0].size(-1) ** -0.5)


def flash(q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, scale: float) -> Tensor:
    return flash_attention(q, k, v, mask.window or 0, mask.documents_BT, scale)


def error_ratio(attend: Attend, T: int, window: int | None, packed: bool, E: int, dtype: torch.dtype) -> float:
    """Largest over y, dq, dk, dv: the error against float64 over the dtype's own, both in 2-norm."""
    tensors, documents = inputs(T, E, dtype, packed)
    mask = MaskSpec(window, documents)
    exact = with_gradients(in_one_dtype, [x.double() for x in tensors], mask)
    found, rounded = (with_gradients(path, tensors, mask) for path in (attend, in_one_dtype))
    ratios = []
    for a, b, reference in zip(found, rounded, exact, strict=True):
        off, own = ((x.double() - reference).norm().item() for x in (a, b))
        # Where the dtype's own error is none: over one key the gradient is zero, ours a difference.
        size = max(reference.norm().item(), 0.01 * reference.numel() ** 0.5)
        floor = size * torch.finfo(dtype).eps / 4
        ratios.append(off / max(own, floor))
    return max(ratio if ratio == ratio else float("inf") for ratio in ratios)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("E", [64, 128])
def test_it_is_as_exact_as_the_dtype(E: int, dtype: torch.dtype) -> None:
    ratios = {shape: error_ratio(flash, *shape, E, dtype) for shape in SHAPES}
    assert max(ratios.values()) <= RATIO_BAR, {shape: ratio for shape, ratio in ratios.items() if ratio > RATIO_BAR}


@pytest.mark.parametrize("E", [16, 32, 256])
def test_the_other_head_dims(E: int) -> None:
    assert error_ratio(flash, 300, 100, True, E, torch.bfloat16) <= RATIO_BAR


def test_the_check_can_fail() -> None:
    def wide(q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, scale: float) -> Tensor:
        return flash_attention(q, k, v, (mask.window or 0) + 1, mask.documents_BT, scale)

    assert error_ratio(wide, 1000, 64, False, 64, torch.bfloat16) > 2 * RATIO_BAR


def test_every_call_gives_the_same_bits() -> None:
    """Also the first, during which tiles are chosen."""
    tensors, documents = inputs(1500, 128, torch.bfloat16, packed=True)
    calls = [with_gradients(flash, tensors, MaskSpec(200, documents)) for _ in range(3)]
    for later in calls[1:]:
        assert all(torch.equal(a, b) for a, b in zip(calls[0], later, strict=True))
