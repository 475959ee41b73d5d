"""Tables of which parameter is cut along which dim, and the model that they cut.

`shard_model` turns a whole single-device model into this process's shard of it, in place: the same class with the same
parameter names, attributes and calls. The table holds everything that parallelism needs, so an architecture does not
know of it. tensor.py runs the shards. The optimizer and checkpoints read the parameters' `.sharding`.
What this costs is counted in estimate/predict.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

from torch import nn

from quern.mesh import Mesh
from quern.model.gpt import GPT, KEYS
from quern.model.llama import Llama
from quern.model.unet import UNet
from quern.parallel.tensor import Region, Stream, StreamDropout, VocabularyEmbedding, VocabularyHead, cut, part_rows

VOCABULARY = ("embedding.weight", "head.weight", "bigrams.weight")
"""These are cut by rows in every architecture."""
REGIONS = ("blocks.*.attention", "blocks.*.mlp")
"""Modules that run on all tokens with a part of their weights."""


@dataclass(frozen=True)
class ShardingPlan:
    """The cuts of an architecture. Names are patterns (`*`), and each parameter is named exactly once.

    Attributes:
        cuts: Parameters of the regions, and embeddings that are passed to them, each with the dim that is cut: heads
            or hidden channels.
        replicated: Parameters that are held whole and used on the stream, or on some heads.
        shifts: How often the model reads the previous token on the stream, outside the regions.
    """

    cuts: Mapping[str, int]
    replicated: tuple[str, ...]
    shifts: int = 0

    def dim_of(self, name: str) -> int | None:
        """Returns the dim along which a parameter is cut; None if replicated. Raises ValueError if it is not named."""
        dims = [dim for pattern, dim in self.cuts.items() if fnmatchcase(name, pattern)]
        dims += [0 for known in VOCABULARY if name == known]
        replicated = any(fnmatchcase(name, pattern) for pattern in self.replicated)
        if len(dims) + replicated != 1:
            raise ValueError(
                f"the plan for tensor parallelism places '{name}' {len(dims) + replicated} times: name it once, among "
                "the cuts with its dim of heads or channels, or among the replicated; or use --tp 1"
            )
        return None if replicated else dims[0]


ATTENTION = {f"blocks.*.attention.{name}.weight": int(name == "out") for name in ("query", "key", "value", "out")}
MLP = {"blocks.*.mlp.up.weight": 0, "blocks.*.mlp.down.weight": 1}
VALUES = {"value_embeddings.*.weight": 1}
PLANS: Mapping[type, ShardingPlan] = MappingProxyType(
    {
        GPT: ShardingPlan(
            cuts=ATTENTION | {"blocks.*.attention.value_gate.weight": 0} | MLP | VALUES,
            replicated=(
                "residual_scales",
                "x0_scales",
                "smear_gate.weight",
                "smear_scale",
                "backout_scale",
                "bigram_scales",
            ),
            shifts=1,
        ),
        UNet: ShardingPlan(
            cuts={"blocks.*.attention.qkv": 1, "blocks.*.attention.out.weight": 1} | MLP | VALUES,
            replicated=("blocks.*.attention.value_scales", "blocks.*.residual_scales", "skip_scales"),
        ),
        Llama: ShardingPlan(
            cuts=ATTENTION | {"blocks.*.mlp.gate_up": 1, "blocks.*.mlp.down.weight": 1},
            replicated=("blocks.*.attention_norm.weight", "blocks.*.mlp_norm.weight", "norm.weight"),
        ),
    }
)


def plan_of(model: Any) -> ShardingPlan:
    """Returns the plan of the model's class, or of its nearest base class. Raises ValueError if there is none."""
    for kind in type(model).__mro__:
        if kind in PLANS:
            return PLANS[kind]
    known = ", ".join(sorted(kind.__name__ for kind in PLANS))
    raise ValueError(f"no plan says how to cut {type(model).__name__} ({known} have one): use --tp 1")


def shard_model(model: Any, mesh: Mesh) -> Any:
    """Cuts a whole model, whose weights are equal on every rank, into this process's shard, in place, and returns it.

    Call this before FP8, compilation and the optimizer. The interface does not change: whole rows of tokens in, hidden
    states of all tokens and `logits` over the whole vocabulary out; the loss is `model.criterion`. Raises ValueError,
    with nothing changed, when the plan misses a parameter or the sizes do not divide.
    """
    group = mesh.model
    if group.size == 1:
        return model
    refuse_tied(model, "--tp 1")
    plan = plan_of(model)
    dims = {name: plan.dim_of(name) for name, _ in model.named_parameters()}
    _check_sizes(model, dims, group.size, mesh.world.size)
    part_rows(model.embedding.num_embeddings, group.size)
    dropouts = _dropouts(model)
    for name, dim in dims.items():
        if dim is not None and name not in VOCABULARY:
            cut(*_owner(model, name), dim, group)
    model.embedding = VocabularyEmbedding.of(model.embedding, group)
    if hasattr(model, "bigrams"):
        model.bigrams = VocabularyEmbedding.of(model.bigrams, group)
    head = VocabularyHead.of(model.head, group)
    model.criterion, model.shards = head.cross_entropy, group.size
    model.remembered = {name: n // group.size if name.startswith(KEYS) else n for name, n in model.remembered.items()}
    logits_of_part = model.logits
    model.logits = lambda x_BTD: head.whole_logits(logits_of_part(x_BTD))
    for name, dropout in dropouts.items():
        model.set_submodule(name, StreamDropout.of(dropout, group))
    for region in regions_of(model):
        Region(group).wrap(region)
    Stream(group, tuple(_owner(model, name) for name, dim in dims.items() if dim is None)).wrap(model)
    return model


def refuse_tied(model: nn.Module, advice: str) -> None:
    """Raises ValueError, with the advice, for a model of which two modules share a parameter."""
    names: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (other := names.setdefault(parameter, name)) != name:
            raise ValueError(f"{other} and {name} are one parameter, which cannot be cut: use {advice}")


def regions_of(model: nn.Module) -> list[nn.Module]:
    return [m for name, m in model.named_modules() if any(fnmatchcase(name, pattern) for pattern in REGIONS)]


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute


def _dropouts(model: nn.Module) -> dict[str, nn.Dropout]:
    """Returns the dropouts on the stream. Raises ValueError for one inside a region, where channels are cut."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, nn.Dropout)}
    for name, module in found.items():
        if module.p > 0 and any(fnmatchcase(name, f"{region}.*") for region in REGIONS):
            raise ValueError(f"'{name}' drops some of a shard's channels: no two layouts would agree; use --tp 1")
    return found


def _check_sizes(model: Any, dims: Mapping[str, int | None], shards: int, ranks: int) -> None:
    sizes = {"heads": model.shape.heads, "key-value heads": model.shape.kv_heads}
    for name, p in model.named_parameters():
        dim = dims[name]
        if dim is not None and name not in VOCABULARY and p.size(dim) not in sizes.values():
            sizes[f"indices of {name} along dim {dim}"] = p.size(dim)
    common = math.gcd(*sizes.values())
    if common % shards:
        valid = [size for size in range(1, common + 1) if common % size == 0 and ranks % size == 0]
        counts = ", ".join(f"{size} {what}" for what, size in sizes.items() if size % shards)
        raise ValueError(f"{shards} shards cannot share {counts} evenly: use --tp of one of {valid}")
