"""What a recipe's model costs: parameters in three conventions, FLOPs per token, bytes of key-value cache per token.

The model itself is counted, built without memory; it says what its groups of parameters are (`interface.KINDS`), which
layers attend and how far they see. Recipes are resolved ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quern.model.interface import KINDS, LanguageModel
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


def parameters(recipe: Recipe) -> Parameters:
    """Parameters of the recipe's model. Raises ValueError for a group of parameters that the model gives no kind."""
    return _counted(_weightless(recipe))


def flops_per_token(recipe: Recipe) -> int:
    """Training FLOPs of one token: 6 per matmul parameter, and 12 · heads · head_dim · span for each attending layer.

    span is min(window, context); causality is not subtracted, the usual convention (PaLM, arXiv 2204.02311, app. B).
    Recomputation never counts.
    """
    model, shape = _weightless(recipe), recipe.model
    assert shape.heads and shape.head_dim and shape.context
    windows = [model.windows[layer] for layer in model.attention_layers]
    spans = [min(window or shape.context, shape.context) for window in windows]
    return 6 * _counted(model).kaplan + 12 * shape.heads * shape.head_dim * sum(spans)


def kv_bytes_per_token(recipe: Recipe, dtype: torch.dtype) -> int:
    """Bytes of keys and values that one token adds to a cache, before any window limits it."""
    shape = recipe.model
    assert shape.kv_heads and shape.head_dim
    return 2 * len(_weightless(recipe).attention_layers) * shape.kv_heads * shape.head_dim * dtype.itemsize


def _weightless(recipe: Recipe) -> LanguageModel:
    with torch.device("meta"):
        return recipe.make_model(recipe.model)


def _counted(model: LanguageModel) -> Parameters:
    sizes = dict.fromkeys(KINDS, 0)
    for group, members in model.parameter_groups().items():
        kind = model.group_kinds.get(group)
        if kind not in sizes:
            raise ValueError(
                f"{type(model).__name__} counts its parameters '{group}' as {kind}: "
                f"give them one of {', '.join(KINDS)} in its group_kinds"
            )
        sizes[kind] += sum(p.numel() for _, p in members)
    return Parameters(
        total=sum(sizes.values()),
        kaplan=sizes["matrices"] + sizes["head"],
        transformer=sizes["matrices"],
        embedding=sizes["embedding"],
        value_embeddings=sizes["value_embeddings"],
        head=sizes["head"],
        scalars=sizes["scalars"],
    )
