"""What ranks run to test the parts of tensor parallelism; the model as a whole is in sharded.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from quern import compiler
from quern.kernels.cross_entropy import CHUNK_TOKENS, cross_entropy, cross_entropy_plain
from quern.kernels.softcap import Cap, NoCap, SigmoidCap, TanhCap
from quern.mesh import Mesh, ProcessGroup
from quern.model.context import CausalContext
from quern.model.fp8 import Fp8Report, use_fp8
from quern.model.llama import Llama
from quern.parallel import tensor
from quern.parallel.plan import shard_model
from quern.parallel.vocabulary import VocabularyHead
from tests.parallel import sharded
from tests.support.deviation import deviation

CAPS = {"tanh": TanhCap(15.0), "sigmoid": SigmoidCap(30.0, 5.0), "no": NoCap()}


# Transposes -------------------------------------------------------------------------------------------------


def transposes(mesh: Mesh) -> dict[str, float]:
    """The deviation of ⟨A x, y⟩ from ⟨x, Aᵀ y⟩, for each function as a map of all ranks' inputs to all outputs.

    What each rank holds of a thing that all hold alike counts once: the input of `_Replicate`, the output of
    `collect`.
    """
    group, n = mesh.model, mesh.tp
    cases: dict[str, tuple[Callable[[Tensor], Tensor], int, str]] = {
        "gather": (lambda x: tensor.gather(x[None], group)[0], 4, ""),
        "reduce_scatter": (lambda x: tensor.reduce_scatter(x[None], group)[0], 4 * n, ""),
        "collect": (lambda x: tensor.collect(x, group), 4, "output"),
        "replicate": (lambda x: tensor._Replicate.apply(group, x)[0], 4, "input"),
        "previous": (lambda x: _previous(x, group), 4, ""),
    }
    found = {}
    for name, (function, rows, alike) in cases.items():
        x = _random(name, rows, 0 if alike == "input" else mesh.rank).requires_grad_()
        y = function(x)
        cotangent = _random(name + "'", y.size(0), 0 if alike == "output" else mesh.rank)
        (back,) = torch.autograd.grad(y, x, cotangent)
        ahead, behind = (y * cotangent).sum(), (x * back).sum()
        for value, is_alike in ((ahead, alike == "output"), (behind, alike == "input")):
            group.all_reduce(value.detach()).wait()
            value.detach().div_(n if is_alike else 1)
        found[name] = ((ahead - behind).abs() / ahead.abs()).item()
    return found


def _previous(x: Tensor, group: ProcessGroup) -> Tensor:
    rows = group.size * x.size(0)
    return tensor.StreamContext(CausalContext(), (1, rows), group).previous(x[None], "embedding")[0]


def _random(name: str, rows: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + sum(map(ord, name)))
    return torch.randn(rows, 3, generator=generator, dtype=torch.float64)


# The loss ---------------------------------------------------------------------------------------------------


def loss(mesh: Mesh, cap: str) -> dict[str, float]:
    """Deviations from the plain definition; bf16: errors over those of one process; calls: of all-reduce in a chunk."""
    compiler.set_eager(True)
    inputs, small = _loss_inputs(CHUNK_TOKENS + 77, 1001), _loss_inputs(100, 53)
    far = (3 * small[0], 20 * small[1], *small[2:])
    before = mesh.model.traffic.calls["all_reduce"]
    found = {"fp32": deviation(_ours(mesh, *small, CAPS[cap]), _plain(*small, CAPS[cap]))}
    found["calls"] = mesh.model.traffic.calls["all_reduce"] - before - 1  # one is ours, for the gradient by x
    found["fp32"] = max(found["fp32"], deviation(_ours(mesh, *inputs, CAPS[cap]), _plain(*inputs, CAPS[cap])))
    found["far apart"] = deviation(_ours(mesh, *far, CAPS[cap]), _plain(*far, CAPS[cap]))
    head, weight = _head(mesh, inputs[1])
    with torch.no_grad():
        _, losses = head.cross_entropy(inputs[0], weight, inputs[2], inputs[3], CAPS[cap])
    found["no gradient"] = deviation([losses], [_plain(*inputs, CAPS[cap])[0]])
    return found | _bf16(mesh, CAPS[cap])


def _bf16(mesh: Mesh, cap: Cap) -> dict[str, float]:
    """Root mean squares over shapes: of a handful of targets, one rounding can make the whole error."""
    squares = torch.zeros(2, 3)
    for N, V in itertools.product((8, 30, 100, 300), (53, 257)):
        x, weight, targets, scale = _loss_inputs(N, V)
        low = (x.bfloat16(), weight.bfloat16(), targets, scale)
        exact = _plain(low[0].double(), low[1].double(), targets, scale.double(), cap)
        squares += torch.tensor([_error(found, exact) for found in (_ours(mesh, *low, cap), _one(*low, cap))]) ** 2
    ours, own = squares.sqrt()
    return {f"bf16 {name}": ratio for name, ratio in zip(("losses", "dx", "dW"), (ours / own).tolist(), strict=True)}


def _loss_inputs(N: int, V: int, D: int = 24) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A third of the targets masked, the others weighted, some negatively; the first and last tokens are targets."""
    generator = torch.Generator().manual_seed(N)
    x = torch.randn(N, D, generator=generator)
    weight = 1.5 * torch.randn(V, D, generator=generator)
    targets = torch.randint(0, V, (N,), generator=generator)
    targets[:2] = torch.tensor([0, V - 1])
    scale = torch.randn(N, generator=generator) * (torch.rand(N, generator=generator) > 1 / 3) / N
    scale[:2] = 1 / N
    return x, weight, targets, scale


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


def _plain(x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor, cap: Cap) -> list[Tensor]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    if x.dtype == torch.float64:
        losses = -cap(x @ weight.T).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    else:
        losses = cross_entropy_plain(x, weight, targets, cap)
    (losses * scale).sum().backward()
    assert x.grad is not None and weight.grad is not None
    return [losses.detach(), x.grad, weight.grad]


def _one(x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor, cap: Cap) -> list[Tensor]:
    """By the kernels of one process."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    total, losses = cross_entropy(x, weight, targets, scale, cap)
    total.backward()
    assert x.grad is not None and weight.grad is not None
    return [losses, x.grad, weight.grad]


def _error(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]


# Whole models -----------------------------------------------------------------------------------------------


def _passed(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of rows that FP8 takes: a multiple of 16."""
    tokens, targets, scale = (part[:, :32] for part in sharded.batch(2))
    total, _ = sharded.passed(model, [(tokens, targets, scale)])
    return total, {name: p.grad for name, p in model.named_parameters()}


def dropped(mesh: Mesh) -> dict[str, float]:
    """Loss and gradients of two micro-batches, each rank seeded alike."""
    compiler.set_eager(True)
    sharded.ARCHITECTURES["llama"] = lambda: Llama(replace(sharded.SHAPE, mlp_width=84, dropout=0.2))
    results = []
    for model in (sharded.whole_model("llama"), shard_model(sharded.whole_model("llama"), mesh)):
        torch.manual_seed(3)
        results.append([_passed(model)[0], _passed(model)[0], model])
    one, ours = results
    without = _passed(one[2].eval())[0]
    expected = {name: p.grad for name, p in one[2].named_parameters()}
    _passed(ours[2].eval())  # its gradients too, which add up
    return {
        "deviation": max(deviation(ours[:2], one[:2]), sharded.gradients_apart(ours[2], expected, {})),
        "from the model without": (without - one[0]).abs().item(),
    }


def fp8(mesh: Mesh) -> dict[str, Any]:
    """Emulated: what sharding changes in FP8, next to what FP8 changes."""
    compiler.set_eager(True)
    sharded.SHAPE = replace(sharded.SHAPE, context=32, vocab_size=1024)
    exact_loss, exact = _passed(sharded.whole_model("gpt"))
    one = sharded.whole_model("gpt")
    reports: list[Fp8Report] = [use_fp8(one)]
    one_gradients = _passed(one)[1]
    model = shard_model(sharded.whole_model("gpt"), mesh)
    reports.append(use_fp8(model))
    total, gradients = _passed(model)
    return {
        "layers of one process": len(reports[0].dynamic + reports[0].static),
        "layers": len(reports[1].dynamic + reports[1].static),
        "loss from fp32": ((total - exact_loss).abs() / exact_loss).item(),
        "gradients of one process from fp32": _apart(one, one_gradients, exact),
        "gradients from fp32": _apart(model, gradients, exact),
    }


def _apart(model: Any, gradients: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Root mean square over parameters of the relative error."""
    errors = []
    for name, p in model.named_parameters():
        held, wanted = sharded.sharding_of(p), exact[name]
        if held is not None:
            wanted = wanted.narrow(held.dim, held.offset, held.size)
        found = gradients[name] if held is None else gradients[name].narrow(held.dim, 0, held.size)
        errors.append((found - wanted).norm() / wanted.norm())
    return torch.stack(errors).square().mean().sqrt().item()


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
