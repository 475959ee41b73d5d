"""Ranks run this for the laws of tensor parallelism: a model cut into shards, and how far it lies from a whole one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quern import compiler
from quern.estimate.predict import bytes_sent
from quern.generate.cache import KVCache, decode, take_token
from quern.mesh import Mesh
from quern.model.base import loss_sum, recompute
from quern.model.gpt import GPT
from quern.model.llama import Llama
from quern.model.unet import UNet
from quern.parallel import tensor
from quern.parallel.plan import shard_model
from quern.parallel.sharding import sharding_of
from quern.recipe import ResolvedModel
from tests.support.deviation import deviation

B, T, VOCABULARY, BOS = 3, 37, 1001, 0
"""111 tokens: neither rows nor their tokens nor the vocabulary can be shared evenly."""
SHAPE = ResolvedModel(
    depth=4, width=64, head_dim=8, heads=8, kv_heads=4, context=T, vocab_size=VOCABULARY, bos=BOS, windows="SL",
    rope_base=1024.0,
)  # fmt: skip


class SmallWindows(UNet):
    """So that windows end inside of the rows."""

    window_block = 8
    long_window = 24


ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "gpt": lambda: GPT(replace(SHAPE, key_offset=True, bigrams=True)),
    "unet": lambda: SmallWindows(replace(SHAPE, kv_heads=8)),
    "llama": lambda: Llama(replace(SHAPE, mlp_width=84)),
}


def reset_traffic(mesh: Mesh) -> None:
    for group in (mesh.data, mesh.model, mesh.world):
        group.sent_bytes.clear()


def whole_model(architecture: str) -> Any:
    """Every weight away from where it starts: zeros would hide gradients, and ones mistakes."""
    model = ARCHITECTURES[architecture]()
    generator = torch.Generator().manual_seed(1)
    model.initialize(1)
    with torch.no_grad():
        for p in model.parameters():
            scale = 0.1 if p.ndim == 1 else 0.3 * p.size(-1) ** -0.5
            p.add_(scale * torch.randn(p.shape, generator=generator))
    return model


def batch(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens in documents, targets, and uneven scales: masked, weighted, one row nearly empty."""
    generator = torch.Generator().manual_seed(2)
    tokens, targets = torch.randint(1, VOCABULARY, (2, rows, T), generator=generator).unbind(0)
    tokens[torch.rand(tokens.shape, generator=generator) < 0.1] = BOS
    tokens[:, 0] = BOS
    targets[0, :3] = torch.tensor([0, VOCABULARY - 1, VOCABULARY // 2])
    scale = torch.rand(targets.shape, generator=generator) + 0.5
    scale[torch.rand(targets.shape, generator=generator) < 1 / 3] = 0
    scale[-1, 3:] = 0
    return tokens, targets, scale / (scale > 0).sum()


def passed(model: Any, parts: Iterable[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor]:
    """Loss and losses of micro-batches, whose gradients add up in the parameters."""
    totals, losses = zip(*[loss_sum(model, *part, progress=0.7) for part in parts], strict=True)
    torch.stack(totals).sum().backward()
    return torch.stack([total.detach() for total in totals]).sum(), torch.cat(losses)


def on_one_rank(mesh: Mesh, make: Callable[[], Any]) -> Any:
    """Returns on every rank what rank 0 makes."""
    found = [make() if mesh.world.rank == 0 else None]
    if mesh.world.size > 1:
        torch.distributed.broadcast_object_list(found)
    return found[0]


def whole_pass(architecture: str, whole: tuple[Tensor, ...]) -> dict[str, Any]:
    """Everything that `compared` compares, of one process with the whole model."""
    model = whole_model(architecture)
    loss, losses = passed(model, [whole])
    return {
        "loss": loss,
        "losses": losses.detach(),
        "gradients": {name: p.grad for name, p in model.named_parameters()},
        "terms": terms_of_scales(architecture, whole),
        "evaluated": evaluated(model, whole[0], whole[1]),
    }


def compared(
    mesh: Mesh, architecture: str, accumulated: bool = False, recomputed: int = 0, broken: bool = False
) -> dict[str, float]:
    """Deviations of this rank's part from the same on one process. broken: ranks do not sum, which must show."""
    compiler.set_eager(True)
    rows = B * mesh.dp
    whole = batch(rows)
    expected = on_one_rank(mesh, lambda: whole_pass(architecture, whole))
    own = [part[mesh.data.rank * B : (mesh.data.rank + 1) * B] for part in whole]
    if broken:
        tensor._reduce_scatter = lambda whole, group: whole.chunk(group.size)[group.rank].clone()
    model = shard_model(whole_model(architecture), mesh)
    recompute(model, recomputed)
    cuts = (slice(0, 1), slice(1, None)) if accumulated else (slice(None),)
    reset_traffic(mesh)
    loss, losses = passed(model, [tuple(part[at] for part in own) for at in cuts])
    sent = {kind: mesh.traffic().get(f"model/{kind}", 0) for kind in ("all_gather", "reduce_scatter", "all_reduce")}
    uncut = whole_model(architecture)
    formula = [bytes_sent(uncut, len(own[0][at]) * T, mesh.tp, recomputed=recomputed) for at in cuts]
    mesh.data.all_reduce(loss).wait()
    for p in model.parameters():
        mesh.data.all_reduce(p.grad).wait()
    return {
        "loss": deviation([loss], [expected["loss"]]),
        "losses": deviation([losses], [expected["losses"][mesh.data.rank * B : (mesh.data.rank + 1) * B]]),
        "gradients": gradients_apart(model, expected["gradients"], expected["terms"]),
        "evaluation": deviation(evaluated(model, whole[0], whole[1]), expected["evaluated"]),
        "bytes": float(sum(abs(sent[kind] - sum(one[kind] for one in formula)) for kind in sent)),
    }


def generated(mesh: Mesh, architecture: str) -> float:
    """Rows of unequal lengths, read in two parts, then five tokens each: how far the cut model's logits deviate."""
    compiler.set_eager(True)
    whole = logits_of(whole_model(architecture))
    return deviation(logits_of(shard_model(whole_model(architecture), mesh)), whole)


@torch.inference_mode()
def logits_of(model: Any) -> list[Tensor]:
    tokens_BT, lengths = batch(5)[0], torch.tensor([[9, 1, 4, 7, 2], [3, 8, 0, 9, 5]])
    cache, found = KVCache(model, 5, T), []
    for part, own in zip(tokens_BT.split(9, dim=1), lengths, strict=False):
        found.append(model.logits(take_token(cache.prefill(model, part, own), own - 1)[own > 0]))
    return [*found, *(decode(model, cache, tokens_B, torch.arange(32)) for tokens_B in tokens_BT[:, -5:].T)]


def evaluated(model: Any, tokens_BT: Tensor, targets_BT: Tensor) -> list[Tensor]:
    """Losses of all rows, and all logits of the last one, without gradients."""
    with torch.no_grad():
        losses = loss_sum(model, tokens_BT, targets_BT, torch.zeros(targets_BT.shape))[1]
        return [losses, model.logits(model(tokens_BT, model.context(tokens_BT, 1.0))[-1])]


def terms_of_scales(architecture: str, whole: tuple[Tensor, ...]) -> dict[str, float]:
    """For each parameter of single numbers, the largest sum of what the rows add to a gradient, without their signs.

    Such a gradient is one sum over all tokens and channels, in which rows can cancel to a thousandth of themselves:
    fp32 then holds as many digits fewer, in whatever order it is summed. It is compared relative to what was added.
    """
    model, sums = whole_model(architecture), {}
    for row in range(len(whole[0])):
        model.zero_grad()
        passed(model, [tuple(part[row : row + 1] for part in whole)])
        for name, p in model.named_parameters():
            if p.ndim <= 1:
                sums[name] = sums.get(name, 0) + p.grad.abs()
    return {name: total.max().item() for name, total in sums.items()}


def gradients_apart(model: Any, expected: dict[str, Tensor], terms: dict[str, float]) -> float:
    """The largest deviation in this rank's shards; infinite where padding has a gradient. terms: `terms_of_scales`."""
    worst = 0.0
    for name, p in model.named_parameters():
        held, wanted, found = sharding_of(p), expected[name], p.grad
        assert found is not None
        if held is not None:
            wanted = wanted.narrow(held.dim, held.offset, held.size)
            if found.narrow(held.dim, held.size, found.size(held.dim) - held.size).any():
                return float("inf")
            found = found.narrow(held.dim, 0, held.size)
        if name in terms:
            apart = (found - wanted).abs().max().item() / terms[name]
            worst = max(worst, apart if math.isfinite(apart) else math.inf)
        else:
            worst = max(worst, deviation([found], [wanted]))
    return worst
