"""What a shape costs: parameters in the three conventions, FLOPs per token, bytes of key-value cache per token.

Counts read the resolved shape of the `gpt` architecture, not a model; a test compares them with one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quern.model.gpt import GPT
from quern.recipe import ModelRecipe


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


def parameters(shape: ModelRecipe) -> Parameters:
    """Parameters of the `gpt` model of this shape. No memory is allocated."""
    with torch.device("meta"):
        groups = GPT(shape).parameter_groups()
    sizes = {name: sum(p.numel() for _, p in members) for name, members in groups.items()}
    small = sum(sizes[name] for name in ("residual_scales", "x0_scales", "smear", "gates"))
    return Parameters(
        total=sum(sizes.values()),
        kaplan=sizes["matrices"] + sizes["head"],
        transformer=sizes["matrices"],
        embedding=sizes["embedding"],
        value_embeddings=sizes["value_embeddings"],
        head=sizes["head"],
        scalars=small,
    )


def flops_per_token(shape: ModelRecipe) -> int:
    """Training FLOPs of one token: 6 per matmul parameter, and 12 · heads · head_dim · span for each layer's attention.

    span is min(window, context); causality is not subtracted, the usual convention (PaLM, arXiv 2204.02311, app. B).
    Recomputation never counts.
    """
    assert shape.heads and shape.head_dim and shape.context
    spans = [min(window or shape.context, shape.context) for window in shape.window_sizes()]
    attention = sum(12 * shape.heads * shape.head_dim * span for span in spans)
    return 6 * parameters(shape).kaplan + attention


def kv_bytes_per_token(shape: ModelRecipe, dtype: torch.dtype) -> int:
    """Bytes of keys and values that one token adds to a cache, before any window limits it."""
    assert shape.depth and shape.kv_heads and shape.head_dim
    return 2 * shape.depth * shape.kv_heads * shape.head_dim * dtype.itemsize
