"""The memory of a rank: predicted without running, against the peak of fresh processes, and by hand; and the refusal of
what cannot fit: it says what to set instead, and then it fits; nothing is written before."""

import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quern.cli import main
from quern.estimate import memory_check as memory_check_module
from quern.estimate.layout import lay_out, unconnected
from quern.estimate.memory import memory
from quern.estimate.memory_check import memory_check
from quern.machine import DTYPES, Machine
from quern.mesh import Mesh, alone
from quern.model.gpt import GPT
from quern.parallel import buckets
from quern.recipe import ModelRecipe, Recipe, TrainRecipe
from quern.recipes import gpt, llama, unet
from quern.resolve import resolve
from tests.estimate import measured
from tests.laws.table import Law
from tests.support.ranks import Ranks
from tests.support.toy_training import CPU


@dataclass(frozen=True)
class Case:
    architecture: str
    dp: int
    tp: int
    dtype: str
    rows: int
    micro_rows: int
    recomputed: int = 0
    zero: int = 2

    def __str__(self) -> str:
        again = f", {self.recomputed} of 4 blocks run again" if self.recomputed else ""
        shared = ", ZeRO-3" if self.zero == 3 else ""
        return f"{self.architecture}, dp {self.dp} x tp {self.tp}, {self.dtype}{again}{shared}"


CASES = (
    Case("llama", 1, 2, "fp32", 4, 2),
    Case("unet", 2, 1, "bf16", 2, 1),
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
    sizes = {name: getattr(case, name) for name in ("rows", "micro_rows", "recomputed")}
    flags: dict[str, Any] = {"tp": case.tp, "zero": case.zero, "architecture": case.architecture, "dtype": case.dtype}
    found = ranks(case.dp * case.tp, "tests.estimate.measured:peak", **flags, **sizes)
    layout = lay_out(measured.recipe(case.architecture, **sizes), DTYPES[case.dtype], case.dp, case.tp, case.zero)
    expected = memory(layout, "cpu", compiled=False)
    off = max(found) / expected.peak - 1
    law(f"peak memory of a rank = predicted: {case}", abs(off), bar="≤ 0.1")
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
    layout = lay_out(measured.recipe("gpt", rows=4, micro_rows=4), torch.bfloat16, 1, 1)
    eager, compiled, gpu = (
        memory(layout, device, done).activations for device, done in (("cpu", False), ("cpu", True), ("cuda", True))
    )
    heads_keys = 4 * 4 * 2 * (256 * 256) * 2  # rows, layers, heads, probabilities in bf16
    assert gpu + heads_keys < compiled * 1.05 and compiled < 0.9 * eager


# What cannot fit --------------------------------------------------------------------------------------------


CUDA = Machine(torch.device("cuda"), torch.bfloat16, compile=True, threads=1)


def recipe(**train: Any) -> Recipe:
    shape = ModelRecipe(width=128, context=64, vocab_size=500)
    return replace(gpt.RECIPE, depth=4, model=shape, train=TrainRecipe(**{"steps": 4, "batch_tokens": 4096, **train}))


MICRO = recipe(micro_batch_tokens=64)
AWAY = recipe(micro_batch_tokens=64, optimizer_memory="cpu")


def advice(made: Recipe, machine: Machine, mesh: Mesh, room: float) -> dict[str, str]:
    """The flags that the refusal tells to set."""
    with pytest.raises(ValueError, match="cannot fit: .* activations") as caught:
        memory_check(made, machine, mesh, print, room)
    return dict(re.findall(r"--(\S+) (\w+)", str(caught.value)))


@pytest.mark.parametrize(
    ("asked", "machine", "room", "ranks", "advised"),
    [
        (recipe(micro_batch_tokens=4096), CPU, 60e6, 1, {"train.micro-batch-tokens"}),
        (MICRO, CUDA, 13e6, 1, {"train.optimizer-memory", "train.micro-batch-tokens", "train.recompute"}),
        (AWAY, CUDA, 8e6, 1, {"ranks", "train.micro-batch-tokens"}),
        (MICRO, CUDA, 5e6, 8, {"zero", "train.micro-batch-tokens", "train.recompute"}),
        (MICRO, CPU, 17e6, 1, {"depth", "train.micro-batch-tokens"}),  # ranks on a CPU would share the same memory
    ],
)
def test_what_the_refusal_advises_fits(
    asked: Recipe, machine: Machine, room: float, ranks: int, advised: set[str]
) -> None:
    given = advice(asked, machine, unconnected(ranks, 1), room)
    assert given.keys() == advised
    values: dict[str, Any] = {name: int(value) if value.isdecimal() else value for name, value in given.items()}
    train = {name[6:].replace("-", "_"): value for name, value in values.items() if name.startswith("train.")}
    changed = replace(asked, depth=values.get("depth", asked.depth), train=replace(asked.train, **train))
    memory_check(changed, machine, unconnected(values.get("ranks", ranks), 1, values.get("zero", 2)), print, room)


def test_the_depth_that_is_advised_can_be_cut() -> None:
    """Heads are half of the depth: four shards cannot share those of 10, 12 and 14 layers."""
    asked = replace(gpt.RECIPE, depth=16, model=ModelRecipe(context=64, vocab_size=500))
    small = replace(asked, train=TrainRecipe(steps=4, batch_tokens=256, micro_batch_tokens=64, recompute=16))
    assert advice(small, CPU, unconnected(1, 4), 250e6)["depth"] == "8"


def test_models_that_are_far_too_large_are_not_counted_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []

    def lay_out_counted(made: Any, *layout: Any) -> Any:
        counted.append(made.depth)
        return lay_out(made, *layout)

    monkeypatch.setattr(memory_check_module, "lay_out", lay_out_counted)
    asked, room = replace(recipe(micro_batch_tokens=4096), depth=64), 60e6
    depth = int(advice(asked, CPU, alone(), room)["depth"])
    fitting = replace(asked, depth=depth, train=replace(asked.train, micro_batch_tokens=64))
    memory_check(fitting, CPU, alone(), print, room)
    assert counted[0] == 64 and max(counted[1:]) < 40, "the first count is for the message"


def test_a_model_that_needs_numbers_is_not_held_up() -> None:
    class Curious(GPT):
        def forward(self, tokens_BT: torch.Tensor, context: object) -> torch.Tensor:
            assert float(self.backout_scale.detach()) == 0.2
            return super().forward(tokens_BT, context)  # type: ignore[arg-type]

    said: list[str] = []
    memory_check(replace(recipe(), make_model=Curious), CPU, alone(), said.append, 1e3)
    assert len(said) == 1 and said[0].startswith("memory is not checked beforehand")


def test_the_command_refuses_before_it_prepares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--depth 4 --model.width 65536 --device cpu --no-compile --dtype fp32".split()
    assert main.main(["pretrain", "gpt", *flags, "--out", str(tmp_path / "out")]) == 1
    assert "cannot fit" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_model_that_cannot_be_cut_is_refused_where_there_is_plenty_of_room() -> None:
    with pytest.raises(ValueError, match=r"2 shards cannot share 3 heads, .* evenly: use --tp of one of \[1\]"):
        memory_check(replace(gpt.RECIPE, depth=2, model=ModelRecipe(heads=3)), CPU, unconnected(2, 2), print)


@pytest.mark.parametrize("made", [gpt.RECIPE, llama.RECIPE, unet.RECIPE], ids=["gpt", "llama", "unet"])
def test_every_recipe_is_measured_before_its_vocabulary_is_known(made: Recipe) -> None:
    small = replace(made, depth=4, model=replace(made.model, width=128, context=128, bos=None))
    said: list[str] = []
    for one in (small, replace(small, depth=8, train=TrainRecipe(micro_batch_tokens=4096, batch_tokens=4096))):
        exact = memory(lay_out(resolve(one), CPU.dtype, 1, 1, 2), "cpu", False).peak
        assert memory_check(one, CPU, alone(), said.append, 1.2 * exact) == (exact, 1.2 * exact)
        most = memory_check(one, CPU, alone(), said.append, 1e12)
        assert most and exact < most[0] < 12 * exact
    assert said == []
