"""Law: attention equals its plain twin, forward and backward, over odd shapes, windows and packed documents.

fp32: the largest difference, relative to the largest entry. bf16: the error against float64, as a multiple of the
error that the same formula makes when each of its operations is rounded to bf16.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quern.kernels.attention.attend import MaskSpec, attend, attend_plain, visible
from tests.laws.table import Law
from tests.support.deviation import deviation, with_gradients

FP32_BAR = 1e-5
BF16_BAR = 1.1
LENGTHS = (1, 17, 127, 129, 512, 1000)
WINDOWS = (None, 1, 64, 66, 2000)  # 66 reaches just past a multiple of 64, where blocks begin
GROUPS = (1, 2, 4)

Attend = Callable[..., Tensor]


def attention_inputs(T: int, groups: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * T + groups)
    sizes = [(2, T, 4, 8), (2, T, 4 // groups, 8), (2, T, 4 // groups, 8), (2, T, 4, 8)]
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def documents(T: int, kind: str) -> Tensor | None:
    """int32 ids (2, T): "one" document a row is None; "some" differ from row to row; "singles" are one token each."""
    if kind == "one":
        return None
    ids_T = torch.arange(T, dtype=torch.int32)
    if kind == "singles":
        return ids_T.expand(2, T)
    generator = torch.Generator().manual_seed(T)
    begins_BT = torch.rand(2, T, generator=generator) < 5 / (T + 5)
    begins_BT[1, 3 * T // 10 :] = False  # one row ends in a long document
    return begins_BT.cumsum(1).int()


Shape = tuple[int, int, MaskSpec, float | None]
"""Length, groups, mask, scale."""


def shapes() -> Iterator[Shape]:
    """Everything without documents, and documents with the other scale."""
    for T, window, groups in itertools.product(LENGTHS, WINDOWS, GROUPS):
        yield T, groups, MaskSpec(window), None
    for T, window, kind in itertools.product(LENGTHS, WINDOWS, ("some", "singles")):
        yield T, 2, MaskSpec(window, documents(T, kind)), 0.12


def attended(path: Attend, inputs: list[Tensor], mask: MaskSpec, scale: float | None = None) -> list[Tensor]:
    """y and the gradients of q, k, v for a random gradient of y."""
    return with_gradients(lambda q, k, v: path(q, k, v, mask, scale), inputs[:3], inputs[3])


def attention_deviation(path: Attend, shapes: Iterable[Shape]) -> float:
    given = ((attention_inputs(T, groups, torch.float32), mask, scale) for T, groups, mask, scale in shapes)
    return max(deviation(attended(path, *one), attended(attend_plain, *one)) for one in given)


def in_one_dtype(q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, scale: float | None = None) -> Tensor:
    """The definition once more, in the inputs' dtype throughout: with float64 the reference, with bf16 the
    error that bf16 makes by itself."""
    groups = q.size(2) // k.size(2)
    k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
    scores = torch.einsum("bqhe,bkhe->bhqk", q, k) * (scale or q.size(-1) ** -0.5)
    hidden = ~visible(q.size(1), mask, q.device)
    return torch.einsum("bhqk,bkhe->bqhe", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


def bf16_error_ratio(path: Attend, T: int, groups: int, mask: MaskSpec, scale: float | None) -> float:
    """Largest over y, dq, dk, dv: our error over bf16's own, both in 2-norm against float64."""
    inputs = attention_inputs(T, groups, torch.bfloat16)
    exact = attended(in_one_dtype, [x.double() for x in inputs], mask, scale)
    ours, rounded = (attended(p, inputs, mask, scale) for p in (path, in_one_dtype))
    worst = 0.0
    for a, b, reference in zip(ours, rounded, exact, strict=True):
        ours_off, bf16_off = ((x.double() - reference).norm().item() for x in (a, b))
        # Where bf16 is exact (one visible key), ours may be off by a rounding of what is stored.
        ratio = ours_off / max(bf16_off, reference.norm().item() * 2**-9 + 1e-12)
        worst = max(worst, ratio if math.isfinite(ratio) else math.inf)
    return worst


def test_attention_is_its_plain_twin_in_fp32(law: Law) -> None:
    worst = attention_deviation(attend, shapes())
    law("blocked attention = plain twin, y and gradients, 150 shapes", worst, FP32_BAR, "relative, fp32")


def test_attention_in_bf16_is_as_good_as_bf16(law: Law) -> None:
    worst = max(bf16_error_ratio(attend, *shape) for shape in shapes() if shape[0] < 1000)
    law("blocked attention in bf16: its error over bf16's own", worst, BF16_BAR)


@pytest.mark.parametrize(("wider", "scaled"), [(1, 1), (0, 1.001)])  # mistakes that have been made
def test_the_attention_check_can_fail(wider: int, scaled: float) -> None:
    def mistaken(q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, scale: float | None) -> Tensor:
        return attend(q * scaled, k, v, replace(mask, window=mask.window and mask.window + wider), scale)

    telling = (shape for shape in shapes() if shape[0] == 129)
    assert any(attention_deviation(mistaken, [shape]) > 10 * FP32_BAR for shape in telling)
