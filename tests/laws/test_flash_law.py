"""Law: flash attention's Triton kernels equal the plain twin, forward and backward; the check catches broken kernels.

The kernels run in Triton's interpreter, in fp32. The largest difference of y, dq, dk, dv, relative to the largest
entry. Inputs whose tokens lie outside heads go through descriptors, as on GPUs that have them, the others through
pointers. What only a GPU shows (bf16, tensor cores, the compiler) is `quern bench gpu`'s.
"""

import itertools
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from quern.kernels.attention.attend import MaskSpec, attend_plain
from quern.kernels.attention.flash import flash_attention
from tests.laws.table import Law
from tests.support.deviation import deviation, with_gradients
from tests.support.interpreter import Interpreted
from tests.support.mutant import with_mistake

FP32_BAR = 1e-5


class Case(NamedTuple):
    """documents: "none", "single" (each token is one) or "mixed"; window 0 is none; by_head: heads outside tokens."""

    T: int
    window: int = 0
    documents: str = "none"
    H: int = 2
    K: int = 2
    E: int = 32
    B: int = 1
    scale: float = 0.25
    by_head: bool = False


WINDOWS, HEADS = (0, 1, 64, 1000), ((1, 1), (2, 1), (4, 1))
LENGTHS_WINDOWS_GROUPS = [  # every length with every window, the heads in turn; all combinations are a campaign
    *(
        Case(T, window, H=H, K=K)
        for (T, window), (H, K) in zip(itertools.product((1, 17, 129), WINDOWS), itertools.cycle(HEADS))
    ),
    *(Case(127, window, H=4, K=2) for window in WINDOWS),
]
DOCUMENTS = [
    Case(T, window, documents, H=2, K=1, B=2)
    for T, window, documents in itertools.product((1, 17, 129), (0, 20), ("single", "mixed"))
]
WHOLE_GRID = [
    Case(T, min(window, 2 * T), documents, H=H, K=K, B=2)
    for T, window, (H, K), documents in itertools.product(
        (1, 17, 127, 129, 1000), (0, 1, 64, 2000), HEADS, ("none", "single", "mixed")
    )
]
BY_HEAD = [
    Case(T, window, documents, K=1, B=2, by_head=True)
    for T, window, documents in ((17, 1, "none"), (129, 0, "none"), (129, 20, "mixed"))
]


def document_ids(case: Case, generator: torch.Generator) -> Tensor | None:
    """Mixed: short and long ones, some of a single token, some that end where tiles do."""
    if case.documents == "none":
        return None
    starts = torch.ones(case.B, case.T) if case.documents == "single" else torch.zeros(case.B, case.T)
    if case.documents == "mixed":
        starts = (torch.rand(case.B, case.T, generator=generator) < 0.03).float()
        starts[:, 5:7] = 1
        starts[0, 64::64] = 1
    return starts.cumsum(1).int() + 3


def inputs(case: Case) -> tuple[list[Tensor], Tensor | None]:
    """q, k, v and a gradient of y, and document ids."""
    generator = torch.Generator().manual_seed(1000 * case.T + case.window)
    shapes = [(case.B, case.T, heads, case.E) for heads in (case.H, case.K, case.K, case.H)]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    if case.by_head:
        tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    return tensors, document_ids(case, generator)


def attended(path: Callable[..., Tensor], case: Case, window: int | None) -> list[Tensor]:
    (*qkv, grad), documents = inputs(case)
    mask = MaskSpec(window, documents)
    return with_gradients(lambda q, k, v: path(q, k, v, mask, case.scale), qkv, grad)


def worst_deviation(cases: list[Case]) -> float:
    """The largest deviation of y, dq, dk and dv over cases."""
    ours = (attended(flash_attention, case, case.window) for case in cases)
    plain = (attended(attend_plain, case, case.window or None) for case in cases)
    return max(map(deviation, ours, plain))


@pytest.mark.timeout(900)  # seconds of interpreting, minutes where others compute too
@pytest.mark.parametrize(
    ("name", "cases"),
    [
        ("lengths, windows, groups", LENGTHS_WINDOWS_GROUPS),
        ("packed documents", DOCUMENTS),
        ("head dims 2 to 256", [Case(129, 66, "mixed", 1, 1, E, scale=E**-0.5) for E in (2, 16, 64, 100, 128, 256)]),
        ("scales", [Case(130, H=1, K=1, scale=scale) for scale in (0.01, 0.12, 1.0)]),
        ("length 1000", [Case(1000, 64, "mixed", H=1, K=1)]),  # without a window: a campaign, it takes seconds
        ("heads outside tokens", BY_HEAD),
        pytest.param("every combination", WHOLE_GRID, marks=[pytest.mark.campaign, pytest.mark.timeout(3600)]),
    ],
)
def test_flash_attention_is_the_plain_twin(interpreted: Interpreted, law: Law, name: str, cases: list[Case]) -> None:
    worst = interpreted(worst_deviation, cases)
    law(f"flash attention = plain twin, y and gradients: {name}", worst, FP32_BAR, "relative, fp32")


MISTAKES = {  # what stands in the device code, what is planted
    "window one too wide, queries": ("rows - window + 1", "rows - window"),
    "a document's start not masked": ("tl.cdiv(tl.max(low, 0), BLOCK_N)", "tl.cdiv(begin, BLOCK_N)"),
    "the last query left out": ("tl.cdiv(tl.max(high, 0) + 1,", "tl.cdiv(tl.max(high, 0),"),
    "one head of the group left out": ("range(GROUPS)", "range(GROUPS - 1)"),
}
TELLING = [Case(129, 40, H=1, K=1), Case(33, H=4, K=2), Case(129, 20, "mixed", H=2, K=1)]


def telling_deviation() -> float:
    """The first deviation that shows a mistake."""
    importer = "quern.kernels.attention.flash_launch"
    kept = {importer: sys.modules.pop(importer)} if importer in sys.modules else {}
    try:
        found = (worst_deviation([case]) for case in TELLING)
        return next((apart for apart in found if apart > 100 * FP32_BAR), 0.0)
    finally:
        sys.modules.update(kept)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_check_catches(interpreted: Interpreted, mistake: str) -> None:
    kernels = "quern.kernels.attention.flash_triton"
    assert interpreted(with_mistake, kernels, *MISTAKES[mistake], telling_deviation) > 100 * FP32_BAR
