"""Causal attention with a window, packed documents and grouped queries: its definition, and PyTorch's own kernels.

q: (B, T, H, E); k, v: (B, T, K, E) with K dividing H. A `MaskSpec` says what a query sees; no dense mask is stored.
The plain twin builds the whole score matrix in fp32, and every other path must equal it. blocked.py has the path of
CPUs, flash.py that of GPUs; autotune.py lists all paths and finds the fastest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, eq=False)
class MaskSpec:
    """The keys that a query at position p sees: p - window + 1 … p (window None: 0 … p) of its own document.

    Args:
        window: An int, or, where it changes between calls, a 0-dim integer tensor on the CPU. A compiled model takes
            the tensor as data; the buffers for the backward pass then have room for every key.
        documents_BT: (B, T) int32 document ids, non-decreasing along T; None is one document per row.
    """

    window: int | Tensor | None = None
    documents_BT: Tensor | None = None


def attend_plain(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, mask: MaskSpec, scale: float | None = None) -> Tensor:
    """The definition, computed in fp32 and returned in q's dtype."""
    scale = scale_or_default(scale, q_BTHE.size(-1))
    groups = q_BTHE.size(2) // k_BTKE.size(2)
    k_BTHE, v_BTHE = k_BTKE.repeat_interleave(groups, dim=2), v_BTKE.repeat_interleave(groups, dim=2)
    scores = torch.einsum("bqhe,bkhe->bhqk", q_BTHE.float(), k_BTHE.float()) * scale
    hidden = ~visible(q_BTHE.size(1), mask, q_BTHE.device)
    probabilities = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("bhqk,bkhe->bqhe", probabilities, v_BTHE.float()).to(q_BTHE.dtype)


def visible(T: int, mask: MaskSpec, device: torch.device) -> Tensor:
    """Whether query row sees key column: booleans (T, T), or (B, 1, T, T) where there are documents."""
    distance = torch.arange(T, device=device)[:, None] - torch.arange(T, device=device)
    seen = distance >= 0 if mask.window is None else (distance >= 0) & (distance < mask.window)
    if mask.documents_BT is None:
        return seen
    return seen & (mask.documents_BT[:, None, :, None] == mask.documents_BT[:, None, None, :])


def scale_or_default(scale: float | None, head_dim: int) -> float:
    return float(head_dim**-0.5) if scale is None else scale


def split_window(window: int | Tensor | None, T: int) -> tuple[int, Tensor | None]:
    """Returns the window as a constant, 0 for none, and the tensor that holds it instead, if there is one."""
    if isinstance(window, Tensor):
        return 0, window
    return (0, None) if window is None or window >= T else (window, None)


def attend_sdpa(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, mask: MaskSpec, scale: float | None = None) -> Tensor:
    """torch's own kernels (cuDNN, flash). For a window or documents it builds a dense mask, which is slow."""
    dense = not (split_window(mask.window, q_BTHE.size(1)) == (0, None) and mask.documents_BT is None)
    y_BHTE = F.scaled_dot_product_attention(
        q_BTHE.transpose(1, 2),
        k_BTKE.transpose(1, 2),
        v_BTKE.transpose(1, 2),
        attn_mask=visible(q_BTHE.size(1), mask, q_BTHE.device) if dense else None,
        is_causal=not dense,
        scale=scale,
        enable_gqa=q_BTHE.size(2) != k_BTKE.size(2),
    )
    return y_BHTE.transpose(1, 2)
