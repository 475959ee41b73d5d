"""The costs of a model: parameters in three conventions, FLOPs per token, size of the key-value cache.

The model itself is counted, on any device: it says what its groups of parameters are (`base.KINDS`), which layers
attend and how far they see. `weightless` builds a recipe's model without memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from quern.model.base import KINDS, LanguageModel
from quern.recipe import Recipe


@dataclass(frozen=True)
class Parameters:
    """total: every parameter (Chinchilla's convention, arXiv 2203.15556); kaplan: matrices and head, no embeddings
    (arXiv 2001.08361); transformer: the matrices inside the blocks alone."""

    total: int
    kaplan: int
    transformer: int
    embedding: int
    value_embeddings: int
    head: int
    scalars: int


@dataclass(frozen=True)
class Counts:
    """flops_per_token: training FLOPs of one token; kv_elements_per_token: keys and values that one token adds to a
    cache, before any window limits it."""

    parameters: Parameters
    flops_per_token: int
    kv_elements_per_token: int


def count(model: LanguageModel) -> Counts:
    """Counts a whole model, before it is cut for several ranks.

    FLOPs are 6 per matmul parameter, and 12 · heads · head_dim · span for each attending layer, where span is
    min(window, context); causality is not subtracted, the usual convention (PaLM, arXiv 2204.02311, app. B).
    Recomputation never counts.

    Raises:
        ValueError: The model gives a group of parameters no kind.
    """
    shape, parameters = model.shape, _parameters(model)
    assert shape.heads and shape.kv_heads and shape.head_dim and shape.context
    spans = [min(model.windows[layer] or shape.context, shape.context) for layer in model.attention_layers]
    return Counts(
        parameters,
        flops_per_token=6 * parameters.kaplan + 12 * shape.heads * shape.head_dim * sum(spans),
        kv_elements_per_token=2 * len(spans) * shape.kv_heads * shape.head_dim,
    )


def weightless(recipe: Recipe) -> LanguageModel:
    """The model of a resolved recipe on the meta device."""
    with torch.device("meta"):
        return recipe.make_model(recipe.model)


def parameters(recipe: Recipe) -> Parameters:
    """Parameters of a resolved recipe's model."""
    return count(weightless(recipe)).parameters


def flops_per_token(recipe: Recipe) -> int:
    """Training FLOPs of one token of a resolved recipe's model."""
    return count(weightless(recipe)).flops_per_token


def kv_bytes_per_token(recipe: Recipe, dtype: torch.dtype) -> int:
    """Bytes of keys and values that one token adds to a cache, before any window limits it."""
    return count(weightless(recipe)).kv_elements_per_token * dtype.itemsize


def _parameters(model: LanguageModel) -> Parameters:
    sizes: dict[str, int] = dict.fromkeys(KINDS, 0)
    for group, members in model.parameter_groups().items():
        kind = model.group_kinds.get(group)
        if kind not in sizes:
            raise ValueError(
                f"{type(model).__name__} counts its parameters '{group}' as {kind}: "
                f"give them one of {', '.join(KINDS)} in its group_kinds"
            )
        sizes[kind] += sum(p.numel() for _, p in members)
    return of_kinds(sizes)


def of_kinds(sizes: Mapping[str, int]) -> Parameters:
    """The counts from the number of parameters of each of `KINDS`."""
    return Parameters(
        total=sum(sizes.values()),
        kaplan=sizes["matrices"] + sizes["head"],
        transformer=sizes["matrices"],
        embedding=sizes["embedding"],
        value_embeddings=sizes["value_embeddings"],
        head=sizes["head"],
        scalars=sizes["scalars"],
    )
