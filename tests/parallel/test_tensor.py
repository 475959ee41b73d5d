"""Refusals and single parts of tensor parallelism: the loss over a cut vocabulary, FP8, compilation.

tests/laws/test_tensor_law.py compares the shards with the whole model."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quern import compiler
from quern.kernels.cross_entropy import CHUNK_TOKENS
from quern.kernels.softcap import Cap
from quern.mesh import Mesh, ProcessGroup, alone
from quern.model.fp8 import use_fp8
from quern.model.gpt import GPT
from quern.model.llama import Llama
from quern.parallel.plan import ShardingPlan, shard_model
from quern.parallel.tensor import VocabularyHead, part_rows
from tests.laws.test_cross_entropy_law import CAPS, loss_inputs, loss_with_gradients, plain
from tests.parallel import sharded
from tests.support.deviation import deviation
from tests.support.ranks import Ranks


def shard_of(tp: int, rank: int = 0) -> Mesh:
    """A mesh whose groups send nothing: enough to cut a model, or to refuse it."""
    world, model = (ProcessGroup(name, tp, rank) for name in ("world", "model"))
    return replace(alone(), tp=tp, rank=rank, world=world, model=model)


# Refusals ---------------------------------------------------------------------------------------------------


class Extended(GPT):
    def __init__(self) -> None:
        super().__init__(sharded.SHAPE)
        self.temperature = nn.Parameter(torch.ones(1))


def test_what_cannot_be_cut_is_refused_and_unchanged() -> None:
    dropping = sharded.whole_model("llama")
    dropping.blocks[0].mlp.dropout = nn.Dropout(0.1)
    odd = Llama(replace(sharded.SHAPE, mlp_width=86))
    tied = sharded.whole_model("gpt")
    tied.head.weight = tied.embedding.weight
    for model, shards, message in (
        (sharded.whole_model("gpt"), 8, r"8 shards cannot share 4 key-value heads evenly: .*one of \[1, 2, 4\]"),
        # 2 and 4 divide the heads, but not the ranks
        (sharded.whole_model("gpt"), 3, r"evenly: use --tp of one of \[1\]$"),
        (odd, 4, r"86 indices of blocks.0.mlp.gate_up along dim 1 evenly: .*one of \[1, 2\]"),
        (dropping, 2, "'blocks.0.mlp.dropout' drops some of a shard's channels"),
        (Extended(), 2, "places 'temperature' 0 times"),
        (tied, 2, "embedding.weight and head.weight are one parameter, which cannot be cut: use --tp 1$"),
        (nn.Linear(2, 2), 2, r"no plan says how to cut Linear \(GPT, Llama, UNet have one\): use --tp 1$"),
    ):
        shapes = [p.shape for p in model.parameters()]
        with pytest.raises(ValueError, match=message):
            shard_model(model, shard_of(shards))
        assert [p.shape for p in model.parameters()] == shapes
    with pytest.raises(ValueError, match="places 'head.weight' 2 times"):
        ShardingPlan({"head.*": 0}, ()).dim_of("head.weight")


def test_parts_of_the_vocabulary() -> None:
    """Multiples of 16, unless the last shard would have none."""
    sizes = (1001, 2, 512), (1001, 4, 256), (1024, 4, 256), (300, 18, 17), (50257, 8, 6288)
    for vocabulary, shards, rows in sizes:
        assert part_rows(vocabulary, shards) == rows
        assert 0 < vocabulary - rows * (shards - 1) <= rows
    with pytest.raises(ValueError, match="4 shards cannot share a vocabulary of 5"):
        part_rows(5, 4)


# On ranks ---------------------------------------------------------------------------------------------------


def loss(mesh: Mesh, cap: str) -> dict[str, float]:
    """Deviations from the plain definition."""
    compiler.set_eager(True)
    small, large = loss_inputs(100, 53), loss_inputs(CHUNK_TOKENS + 77, 1001)
    large[2][0] = 1000
    far = (3 * small[0], 20 * small[1], *small[2:])
    named = {"a chunk": small, "two chunks": large, "far apart": far}
    return {
        name: deviation(_ours(mesh, *one, CAPS[cap]), loss_with_gradients(plain, one, CAPS[cap]))
        for name, one in named.items()
    }


def _ours(mesh: Mesh, x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor, cap: Cap) -> list[Tensor]:
    """Losses and the gradients of x and of the whole weight."""
    linear = nn.Linear(weight.size(1), weight.size(0), bias=False, dtype=weight.dtype)
    linear.weight = nn.Parameter(weight.clone())
    head, x = VocabularyHead.of(linear, mesh.model), x.clone().requires_grad_()
    part = linear.weight  # of this shard
    total, losses = head.cross_entropy(x, part, targets, scale, cap)
    total.backward()
    assert x.grad is not None and part.grad is not None
    dx = x.grad.float()
    mesh.model.all_reduce(dx).wait()
    whole = part.grad.new_empty(mesh.tp * part.size(0), part.size(1))
    mesh.model.all_gather(whole, part.grad).wait()
    return [losses, dx, whole[: len(weight)]]


@pytest.mark.parametrize("cap", ["tanh", "sigmoid", "no"])
def test_loss_over_parts_of_a_vocabulary(cap: str, ranks: Ranks) -> None:
    """One chunk or two, padding, weights of both signs, distant logits."""
    for found in ranks(3, "tests.parallel.test_tensor:loss", tp=3, cap=cap):
        assert max(found.values()) <= 1e-5, found


def _passed(model: Any) -> Tensor:
    """The loss of rows that FP8 takes: a multiple of 16."""
    return sharded.passed(model, [tuple(part[:, :32] for part in sharded.batch(2))])[0]


def dropped(mesh: Mesh, name: str) -> dict[str, float]:
    """Loss and gradients of two micro-batches, each rank seeded alike."""
    compiler.set_eager(True)
    sharded.ARCHITECTURES["llama"] = lambda: Llama(replace(sharded.SHAPE, mlp_width=84, dropout=0.2))
    sharded.ARCHITECTURES["gpt"] = lambda: GPT(replace(sharded.SHAPE, bigrams=True, bigram_dropout=0.9))
    results = []
    for model in (sharded.whole_model(name), shard_model(sharded.whole_model(name), mesh)):
        torch.manual_seed(3)
        results.append([_passed(model), _passed(model), model])
    one, ours = results
    without = _passed(one[2].eval())
    expected = {name: p.grad for name, p in one[2].named_parameters()}
    _passed(ours[2].eval())  # its gradients too, which add up
    return {
        "deviation": max(deviation(ours[:2], one[:2]), sharded.gradients_apart(ours[2], expected, {})),
        "from the model without": (without - one[0]).abs().item(),
    }


@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_what_is_dropped_does_not_depend_on_shards(ranks: Ranks, name: str) -> None:
    for found in ranks(4, "tests.parallel.test_tensor:dropped", tp=4, name=name):
        assert found["deviation"] <= 1e-5
        assert found["from the model without"] > 1e-4


def fp8(mesh: Mesh) -> dict[str, Any]:
    """Emulated: how many layers are in FP8, and how far the loss is from fp32. Three shards hold two tokens more."""
    compiler.set_eager(True)
    sharded.SHAPE = replace(sharded.SHAPE, context=32, vocab_size=1024)
    if mesh.tp == 3:
        sharded.SHAPE = replace(sharded.SHAPE, width=48, head_dim=16, heads=6, kv_heads=3)
    exact = _passed(sharded.whole_model("gpt"))
    model = shard_model(sharded.whole_model("gpt"), mesh)
    reports = use_fp8(sharded.whole_model("gpt")), use_fp8(model)
    return {
        "layers": [len(one.dynamic + one.static) for one in reports],
        "loss from fp32": ((_passed(model) - exact).abs() / exact).item(),
    }


@pytest.mark.parametrize("shards", [2, 3])
def test_fp8_shards(shards: int, ranks: Ranks) -> None:
    """Dynamic scales depend on the part, so the loss differs by FP8's rounding."""
    for found in ranks(shards, "tests.parallel.test_tensor:fp8", tp=shards):
        assert found["layers"][0] == found["layers"][1] and 0 < found["loss from fp32"] < 1e-2


def compiled(mesh: Mesh, architecture: str, depth: int) -> dict[str, float]:
    """Traced and split as for the compiler's own code, run as it stands: three steps, with windows that grow."""
    from torch._dynamo.utils import counters

    sharded.SHAPE = replace(sharded.SHAPE, depth=depth)
    tokens, targets, scale = sharded.batch(sharded.B)
    results = []
    for eager in (True, False):
        model = shard_model(sharded.whole_model(architecture), mesh)
        model.compile(backend="eager")
        for window in (0.3, 0.6, 0.9):
            compiler.set_eager(eager)
            x_BTD = model(tokens, model.context(tokens, window))
            compiler.set_eager(True)  # the loss is compiled elsewhere
            total, _ = model.criterion(
                x_BTD.flatten(0, 1), model.head.weight, targets.flatten(), scale.flatten(), model.cap
            )
            total.backward()
        results.append([p.grad for p in model.parameters()])
    return {"deviation": deviation(*results), "graphs": counters["stats"]["unique_graphs"]}


def test_compiled_shards(ranks: Ranks) -> None:
    for found in ranks(2, "tests.parallel.test_tensor:compiled", tp=2, architecture="unet", depth=2):
        assert found["deviation"] <= 1e-6
        assert found["graphs"] > 0
