"""Refusals and single parts of tensor parallelism: the loss over a cut vocabulary, FP8, compilation.

tests/laws/test_tensor_law.py compares the shards with the whole model."""

from dataclasses import replace

import pytest
import torch

from quern.mesh import Mesh, ProcessGroup, alone
from quern.model.gpt import GPT
from quern.model.llama import Llama
from quern.parallel.plan import ShardingPlan, shard_model
from quern.parallel.vocabulary import part_rows
from tests.parallel.sharded import SHAPE, whole_model
from tests.support.ranks import Ranks


def shard_of(tp: int, rank: int = 0) -> Mesh:
    """A mesh whose groups send nothing: enough to cut a model, or to refuse it."""
    return replace(
        alone(), tp=tp, rank=rank, world=ProcessGroup("world", tp, rank), model=ProcessGroup("model", tp, rank)
    )


# Refusals ---------------------------------------------------------------------------------------------------


class Extended(GPT):
    def __init__(self) -> None:
        super().__init__(SHAPE)
        self.temperature = torch.nn.Parameter(torch.ones(1))


def test_what_cannot_be_cut_is_refused_and_unchanged() -> None:
    dropping = whole_model("llama")
    dropping.blocks[0].mlp.dropout = torch.nn.Dropout(0.1)
    odd = Llama(replace(SHAPE, mlp_width=86))
    for model, shards, message in (
        (
            whole_model("gpt"),
            8,
            r"8 shards cannot share 8 heads, 4 key-value heads evenly: .*one of \[1, 2, 4\]",
        ),
        (whole_model("gpt"), 3, r"evenly: use --tp of one of \[1\]$"),  # 2 and 4 divide the heads, but not the ranks
        (odd, 4, r"86 indices of blocks.0.mlp.gate_up along dim 1 evenly: .*one of \[1, 2\]"),
        (dropping, 2, "'blocks.0.mlp.dropout' drops some of a shard's channels"),
        (Extended(), 2, "places 'temperature' 0 times"),
        (torch.nn.Linear(2, 2), 2, r"no plan says how to cut Linear \(GPT, Llama, UNet have one\): use --tp 1$"),
    ):
        shapes = [p.shape for p in model.parameters()]
        with pytest.raises(ValueError, match=message):
            shard_model(model, shard_of(shards))
        assert [p.shape for p in model.parameters()] == shapes
    with pytest.raises(ValueError, match="places 'head.weight' 2 times"):
        ShardingPlan({"head.*": 0}, ()).dim_of("head.weight")


def test_parts_of_the_vocabulary() -> None:
    """Multiples of 16, unless the last shard would have none."""
    for vocabulary, shards, rows in (
        (1001, 2, 512), (1001, 4, 256), (1024, 4, 256), (300, 18, 17), (50257, 8, 6288),
    ):  # fmt: skip
        assert part_rows(vocabulary, shards) == rows
        assert 0 < vocabulary - rows * (shards - 1) <= rows
    with pytest.raises(ValueError, match="4 shards cannot share a vocabulary of 5"):
        part_rows(5, 4)


# On ranks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cap", ["tanh", "sigmoid", "no"])
def test_loss_over_parts_of_a_vocabulary(cap: str, ranks: Ranks) -> None:
    """One chunk or two, padding, weights of both signs, distant logits."""
    for found in ranks(3, "tests.parallel.tensor_parts:loss", tp=3, cap=cap):
        assert max(found.values()) <= 1e-5, found


def test_what_is_dropped_does_not_depend_on_shards(ranks: Ranks) -> None:
    for found in ranks(4, "tests.parallel.tensor_parts:dropped", tp=4):
        assert found["deviation"] <= 1e-5
        assert found["from the model without"] > 1e-2


@pytest.mark.parametrize("shards", [2, 3])
def test_fp8_shards(shards: int, ranks: Ranks) -> None:
    """Dynamic scales depend on the part, so the loss differs by FP8's rounding."""
    for found in ranks(shards, "tests.parallel.tensor_parts:fp8", tp=shards):
        assert found["layers"][0] == found["layers"][1] and 0 < found["loss from fp32"] < 1e-2


def test_compiled_shards(ranks: Ranks) -> None:
    for found in ranks(2, "tests.parallel.tensor_parts:compiled", tp=2, architecture="unet", depth=2):
        assert found["deviation"] <= 1e-6
        assert found["graphs"] > 0
