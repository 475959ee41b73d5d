"""The memory of a rank: predicted without running, against the peak of fresh processes; and by hand."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from quern.estimate.layout import lay_out
from quern.estimate.memory import memory
from quern.machine import DTYPES
from quern.parallel import buckets
from quern.recipe import ModelRecipe, TrainRecipe
from quern.recipes import llama
from quern.resolve import resolve
from tests.estimate.measured import recipe
from tests.support.ranks import Ranks

Law = Callable[[str, float | int | str, str], None]


@dataclass(frozen=True)
class Case:
    architecture: str
    dp: int
    tp: int
    dtype: str
    rows: int
    micro_rows: int
    width: int = 256
    recomputed: int = 0
    zero: int = 2

    def __str__(self) -> str:
        again = f", {self.recomputed} of 4 blocks run again" if self.recomputed else ""
        shared = ", ZeRO-3" if self.zero == 3 else ""
        return f"{self.architecture}, dp {self.dp} x tp {self.tp}, {self.dtype}{again}{shared}"


CASES = (
    Case("llama", 1, 2, "fp32", 4, 2),
    Case("unet", 2, 1, "bf16", 2, 1, width=128),  # products in bf16 are slow on many CPUs
    Case("gpt", 1, 1, "fp32", 4, 4, recomputed=4),
    Case("gpt", 2, 1, "fp32", 4, 1, zero=3),
)
MORE_CASES = (
    Case("gpt", 1, 1, "fp32", 4, 4),
    Case("gpt", 2, 1, "fp32", 4, 1),
    Case("llama", 1, 1, "fp32", 4, 4, recomputed=2),
)


@pytest.mark.skipif(sys.platform != "linux", reason="the high-water mark is read from /proc")
@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(one, marks=pytest.mark.campaign) for one in MORE_CASES)], ids=str
)
def test_the_peak_is_as_predicted(case: Case, ranks: Ranks, law: Law) -> None:
    sizes = {name: getattr(case, name) for name in ("width", "rows", "micro_rows", "recomputed")}
    flags: dict[str, Any] = {"tp": case.tp, "zero": case.zero, "architecture": case.architecture, "dtype": case.dtype}
    found = ranks(case.dp * case.tp, "tests.estimate.measured:peak", **flags, **sizes)
    layout = lay_out(recipe(case.architecture, **sizes), DTYPES[case.dtype], case.dp, case.tp, case.zero)
    expected = memory(layout, "cpu", compiled=False)
    off = max(found) / expected.peak - 1
    law(f"peak memory of a rank = predicted: {case}", abs(off), "≤ 0.1")
    assert abs(off) <= 0.1, (found, expected.peak, expected)


def test_buffers_by_hand(monkeypatch: Any) -> None:
    """ZeRO's 2 + 2 + 12/N bytes per parameter for AdamW in bf16, Muon's 2 + 2 + 8/N and its row norms."""
    monkeypatch.setattr(buckets, "SMALL_ELEMENTS", 0)
    shape = ModelRecipe(width=64, head_dim=16, heads=4, mlp_width=128, context=8, vocab_size=400, windows="L")
    train = TrainRecipe(steps=1, batch_tokens=4 * 8)
    made = resolve(replace(llama.RECIPE, depth=4, model=shape, train=train))
    adamw, muon = 2 * 400 * 64 + 9 * 64, 4 * (4 * 64 * 64 + 2 * 128 * 64 + 128 * 64)
    for n in (1, 4):
        found = memory(lay_out(made, torch.bfloat16, n, 1), "cpu", compiled=True)
        second = 4 * (4 * 64 + 2 * 128 + 128)
        padding = 64 * 9 * 15 * 4 if n == 1 else 0  # of small ones; on one process norms are small
        assert abs(found.parameters - 2 * (adamw + muon)) <= padding and found.gradients == found.parameters
        assert abs(found.masters - 4 * (adamw + muon) / n) <= padding
        assert abs(found.moments - (8 * adamw + 4 * muon + 4 * second) / n) <= 2 * padding


def test_the_compiler_keeps_less_and_a_gpu_less_still() -> None:
    layout = lay_out(recipe("gpt", width=128, rows=4, micro_rows=4), torch.bfloat16, 1, 1)
    eager, compiled, gpu = (
        memory(layout, device, done).activations for device, done in (("cpu", False), ("cpu", True), ("cuda", True))
    )
    heads_keys = 4 * 4 * 2 * (256 * 256) * 2  # rows, layers, heads, probabilities in bf16
    assert gpu + heads_keys < compiled * 1.05 and compiled < 0.9 * eager
