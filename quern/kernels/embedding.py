"""Embedding lookup whose backward pass on a CPU is the library's scatter.

The compiler turns the backward pass of an embedding into atomic additions per element, which on a CPU is several times
slower than the library's kernel. A custom operator prevents this. The gradients of a token that occurs often are summed
in fp32, whatever dtype they have. On other devices nothing changes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quern.compiler import in_eager_inference


def embed(tokens_BT: Tensor, weight_VD: Tensor) -> Tensor:
    """Returns rows of the weight: (B, T) integers → (B, T, D)."""
    one_token = tokens_BT.size(-1) == 1 and not torch.is_grad_enabled()  # the call would cost more than the rows
    if weight_VD.device.type != "cpu" or one_token or in_eager_inference():
        return F.embedding(tokens_BT, weight_VD)
    return _embed(tokens_BT, weight_VD)


@torch.library.custom_op("quern::embed", mutates_args=())
def _embed(tokens: Tensor, weight: Tensor) -> Tensor:
    return F.embedding(tokens, weight)


@_embed.register_fake
def _(tokens: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty(*tokens.shape, weight.size(1))


@torch.library.custom_op("quern::embed_backward", mutates_args=())
def _embed_backward(grad: Tensor, tokens: Tensor, rows: int) -> Tensor:
    if grad.dtype == torch.float32:
        return torch.ops.aten.embedding_dense_backward(grad, tokens, rows, -1, False)
    # In bf16 the library's sum of 256 equal gradients stops growing; this sums in fp32, for the rows that occur.
    used, places = torch.unique(tokens, return_inverse=True)
    sums = torch.zeros(len(used), grad.size(-1), device=grad.device)
    sums.index_add_(0, places.flatten(), grad.flatten(0, -2).float())
    whole = grad.new_zeros(rows, grad.size(-1))
    whole[used] = sums.to(grad.dtype)
    return whole


@_embed_backward.register_fake
def _(grad: Tensor, tokens: Tensor, rows: int) -> Tensor:
    return grad.new_empty(rows, grad.size(-1))


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    tokens, weight = inputs
    ctx.save_for_backward(tokens)
    ctx.rows = weight.size(0)


def _backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
    (tokens,) = ctx.saved_tensors
    return None, _embed_backward(grad.contiguous(), tokens, ctx.rows)


_embed.register_autograd(_backward, setup_context=_save)
