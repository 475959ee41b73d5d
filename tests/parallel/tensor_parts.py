"""What ranks run to test the parts of tensor parallelism; the model as a whole is in sharded.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from quern import compiler
from quern.kernels.cross_entropy import CHUNK_TOKENS
from quern.kernels.softcap import Cap
from quern.mesh import Mesh
from quern.model.fp8 import use_fp8
from quern.model.llama import Llama
from quern.parallel.plan import shard_model
from quern.parallel.vocabulary import VocabularyHead
from tests.laws.test_cross_entropy_law import CAPS, loss_inputs, loss_with_gradients, plain
from tests.parallel import sharded
from tests.support.deviation import deviation

# The loss ---------------------------------------------------------------------------------------------------


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


def _head(mesh: Mesh, weight: Tensor) -> tuple[VocabularyHead, Tensor]:
    linear = nn.Linear(weight.size(1), weight.size(0), bias=False, dtype=weight.dtype)
    linear.weight = nn.Parameter(weight.clone())
    head = VocabularyHead.of(linear, mesh.model)
    return head, linear.weight


def _ours(mesh: Mesh, x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor, cap: Cap) -> list[Tensor]:
    """Losses and the gradients of x and of the whole weight."""
    head, part = _head(mesh, weight)
    x = x.clone().requires_grad_()
    total, losses = head.cross_entropy(x, part, targets, scale, cap)
    total.backward()
    assert x.grad is not None and part.grad is not None
    dx = x.grad.float()
    mesh.model.all_reduce(dx).wait()
    whole = part.grad.new_empty(mesh.tp * part.size(0), part.size(1))
    mesh.model.all_gather(whole, part.grad).wait()
    return [losses, dx, whole[: len(weight)]]


# Whole models -----------------------------------------------------------------------------------------------


def _passed(model: Any) -> Tensor:
    """The loss of rows that FP8 takes: a multiple of 16."""
    return sharded.passed(model, [tuple(part[:, :32] for part in sharded.batch(2))])[0]


def dropped(mesh: Mesh) -> dict[str, float]:
    """Loss and gradients of two micro-batches, each rank seeded alike."""
    compiler.set_eager(True)
    sharded.ARCHITECTURES["llama"] = lambda: Llama(replace(sharded.SHAPE, mlp_width=84, dropout=0.2))
    results = []
    for model in (sharded.whole_model("llama"), shard_model(sharded.whole_model("llama"), mesh)):
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
            with compiler.eager(eager):
                x_BTD = model(tokens, model.context(tokens, window))
            with compiler.eager():  # the loss is compiled elsewhere
                total, _ = model.criterion(
                    x_BTD.flatten(0, 1), model.head.weight, targets.flatten(), scale.flatten(), model.cap
                )
            total.backward()
        results.append([p.grad for p in model.parameters()])
    return {"deviation": deviation(*results), "graphs": counters["stats"]["unique_graphs"]}
