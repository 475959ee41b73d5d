"""Flash attention: exact causal attention without the score matrix, as a custom operator around Triton kernels.

q: (B, T, H, E); k, v: (B, T, K, E) with K dividing H; bf16, fp16 or fp32, accumulated in fp32. Any length; head dims
up to 256, of which the kernels take powers of two from 16 on, and others are filled up with zeros. A query sees the
keys up to itself, at most `window` of them, of its own document.

This file has the checks, the operators, and their shapes and gradients for torch.compile. The device code is in
`flash_triton.py`. `flash_launch.py` runs it, and is imported late, since Triton is not installed everywhere.

Source: Dao 2023, FlashAttention-2 (arXiv 2307.08691).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quern.kernels.attention.attend import MaskSpec, scale_or_default, split_window, window_now

HEAD_DIMS = (16, 32, 64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def flash_attention(
    q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, mask: MaskSpec, scale: float | None = None
) -> Tensor:
    """Causal attention → (B, T, H, E) in q's dtype. Slices of one merged projection need no copy.

    Args:
        mask: The keys that a query sees. A window of 0, like None, is no limit.
        scale: The factor of the scores; None is 1 / sqrt(E).

    Raises:
        ValueError: The head dim is above 256.
    """
    E, documents_BT = q_BTHE.size(-1), mask.documents_BT
    scale = scale_or_default(scale, E)
    _check(q_BTHE, k_BTKE, v_BTKE, documents_BT, scale)
    first_BT, last_BT = (None, None) if documents_BT is None else document_bounds(documents_BT)
    fixed, varying = split_window(mask.window, q_BTHE.size(1))
    if more := min(dim for dim in HEAD_DIMS if dim >= E) - E:
        q_BTHE, k_BTKE, v_BTKE = (F.pad(x, (0, more)) for x in (q_BTHE, k_BTKE, v_BTKE))
    return forward_operator(q_BTHE, k_BTKE, v_BTKE, first_BT, last_BT, fixed, varying, scale)[0][..., :E]


def document_bounds(documents_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the first and the last position of each token's document: two (B, T) int32."""
    documents_BT = documents_BT.contiguous()
    first = torch.searchsorted(documents_BT, documents_BT, out_int32=True)
    past = torch.searchsorted(documents_BT, documents_BT, out_int32=True, right=True)
    return first, past - 1


def _check(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, scale: float) -> None:
    B, T, H, E = q.shape
    assert k.shape == v.shape == (B, T, k.size(2), E) and H % k.size(2) == 0, (q.shape, k.shape, v.shape)
    assert q.dtype == k.dtype == v.dtype and q.dtype in DTYPES and scale > 0, (q.dtype, k.dtype, v.dtype, scale)
    assert documents is None or documents.shape == (B, T), (documents.shape, q.shape)
    if max(HEAD_DIMS) < E:
        raise ValueError(f"flash attention has no tiles for head dim {E}: use at most {max(HEAD_DIMS)}")


def _readable(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@torch.library.custom_op("quern::flash_attention", mutates_args=())
def forward_operator(
    q_BTHE: Tensor,
    k_BTKE: Tensor,
    v_BTKE: Tensor,
    first_BT: Tensor | None,
    last_BT: Tensor | None,
    window: int,
    varying: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Returns y and the log-sum-exp (B, H, T) fp32. first_BT, last_BT: from `document_bounds`."""
    from quern.kernels.attention.flash_launch import forward  # imports Triton

    with torch.cuda.device_of(q_BTHE):
        q, k, v = (_readable(x) for x in (q_BTHE, k_BTKE, v_BTKE))
        return forward(q, k, v, first_BT, window_now(window, varying, q.size(1)), scale)


@forward_operator.register_fake
def _(q_BTHE: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    B, T, H, _ = q_BTHE.shape
    return q_BTHE.new_empty(q_BTHE.shape), q_BTHE.new_empty((B, H, T), dtype=torch.float32)


@torch.library.custom_op("quern::flash_attention_backward", mutates_args=())
def backward_operator(
    grad_BTHE: Tensor,
    q_BTHE: Tensor,
    k_BTKE: Tensor,
    v_BTKE: Tensor,
    y_BTHE: Tensor,
    lse_BHT: Tensor,
    first_BT: Tensor | None,
    last_BT: Tensor | None,
    window: int,
    varying: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, contiguous; the same bits at every call."""
    from quern.kernels.attention.flash_launch import backward  # imports Triton

    with torch.cuda.device_of(q_BTHE):
        grad, q, k, v, y = (_readable(x) for x in (grad_BTHE, q_BTHE, k_BTKE, v_BTKE, y_BTHE))
        return backward(grad, q, k, v, y, lse_BHT, first_BT, last_BT, window_now(window, varying, q.size(1)), scale)


@backward_operator.register_fake
def _(grad_BTHE: Tensor, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, *others: Any) -> tuple[Tensor, ...]:
    return q_BTHE.new_empty(q_BTHE.shape), k_BTKE.new_empty(k_BTKE.shape), v_BTKE.new_empty(v_BTKE.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, first, last, ctx.window, varying, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, first, last, varying)


def _backward(ctx: Any, grad_y: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, y, lse, first, last, varying = ctx.saved_tensors
    gradients = backward_operator(grad_y, q, k, v, y, lse, first, last, ctx.window, varying, ctx.scale)
    return *gradients, None, None, None, None, None


forward_operator.register_autograd(_backward, setup_context=_save)
