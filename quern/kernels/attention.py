"""Causal attention with a sliding window and grouped queries: the plain twin, the blocked CPU path, and the pick.

q: (B, T, H, E); k, v: (B, T, K, E) with K dividing H; scale 1/sqrt(E); a query at position p sees the keys
p - window + 1 … p (window None: all of 0 … p). The plain twin builds the whole score matrix in fp32; every other path
must equal it.

The blocked path computes, for each block of queries, only the keys that block can see, as batched matmuls around the
library's own vectorised softmax. It keeps the probabilities for the backward pass: on a CPU, at the lengths that are
trained there, reading them back is far cheaper than exponentiating again. It is a custom operator, so that
torch.compile passes around it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def attend(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, window: int | None = None) -> Tensor:
    """Causal attention → (B, T, H, E), by the path that suits the device."""
    if window is not None and window >= q_BTHE.size(1):
        window = None
    if q_BTHE.device.type != "cpu":
        return _attend_sdpa(q_BTHE, k_BTKE, v_BTKE, window)
    q_BHTE, k_BKTE, v_BKTE = (x.transpose(1, 2).contiguous() for x in (q_BTHE, k_BTKE, v_BTKE))
    return attend_blocked(q_BHTE, k_BKTE, v_BKTE, window or 0, kept_elements(q_BHTE, window or 0))[0].transpose(1, 2)


def attend_plain(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, window: int | None = None) -> Tensor:
    """The definition, in fp32, returned in q's dtype."""
    groups = q_BTHE.size(2) // k_BTKE.size(2)
    k_BTHE, v_BTHE = k_BTKE.repeat_interleave(groups, dim=2), v_BTKE.repeat_interleave(groups, dim=2)
    scores = torch.einsum("bqhe,bkhe->bhqk", q_BTHE.float(), k_BTHE.float()) / math.sqrt(q_BTHE.size(-1))
    hidden = ~visible(q_BTHE.size(1), window, q_BTHE.device)
    probabilities = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("bhqk,bkhe->bqhe", probabilities, v_BTHE.float()).to(q_BTHE.dtype)


def visible(T: int, window: int | None, device: torch.device) -> Tensor:
    """(T, T) booleans: may query row see key column."""
    distance = torch.arange(T, device=device)[:, None] - torch.arange(T, device=device)
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def _attend_sdpa(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, window: int | None) -> Tensor:
    mask = None if window is None else visible(q_BTHE.size(1), window, q_BTHE.device)
    y_BHTE = F.scaled_dot_product_attention(
        q_BTHE.transpose(1, 2),
        k_BTKE.transpose(1, 2),
        v_BTKE.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=q_BTHE.size(2) != k_BTKE.size(2),
    )
    return y_BHTE.transpose(1, 2)


def _blocks(T: int, window: int) -> list[tuple[int, int, int]]:
    """(first query, past the last query, first key read) of each block of queries; window 0 is no window.

    Measured on CPUs with matrix units: small blocks skip more of what is masked, large ones run closer to the peak,
    and keys are read from a multiple of 64 on, since unaligned operands halve the speed of a product. The last block
    comes first, because without a window it sees every key (`_Sum`).
    """
    size = min(256, max(128, window // 2)) if window else 256
    starts = reversed(range(0, T, size))
    return [(i, min(T, i + size), max(0, i - window + 1) // 64 * 64 if window else 0) for i in starts]


def _hide(scores_NTT: Tensor, first: int, last: int, low: int, window: int) -> None:
    """Writes -inf over the scores of one block that its queries may not see."""
    start = low if window else first  # without a window only the keys beside the queries can be hidden
    distance = torch.arange(first, last)[:, None] - torch.arange(start, last)
    hidden = (distance < 0) | (distance >= window) if window else distance < 0
    bias = torch.zeros(hidden.shape, dtype=scores_NTT.dtype).masked_fill_(hidden, float("-inf"))
    scores_NTT[:, :, start - low :] += bias


def _heads(x_BKTE: Tensor, groups: int) -> Tensor:
    """(B, K, T, E) → (B · K · groups, T, E), each head repeated `groups` times in a row."""
    return (x_BKTE.repeat_interleave(groups, dim=1) if groups > 1 else x_BKTE).flatten(0, 1)


def kept_elements(q_BHTE: Tensor, window: int) -> int:
    """How many probabilities the blocked path keeps."""
    B, H, T, _ = q_BHTE.shape
    return B * H * sum((last - first) * (last - low) for first, last, low in _blocks(T, window))


@torch.library.custom_op("quern::attend_blocked", mutates_args=())
def attend_blocked(
    q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, window: int, kept_elements: int
) -> tuple[Tensor, Tensor]:
    """The blocked path on contiguous (B, H, T, E); window 0 is no window. Returns y and the probabilities, flat.

    kept_elements: `kept_elements(q, window)`. It is handed in so that it stands in the compiled graph: the compiler's
    cache on disk knows a graph by its arguments, and would otherwise outlive a change of the blocks.
    """
    B, H, T, E = q_BHTE.shape
    groups = H // k_BKTE.size(1)
    q, k, v = q_BHTE.flatten(0, 1), _heads(k_BKTE, groups), _heads(v_BKTE, groups)
    kept = q.new_empty(kept_elements)
    y, offset = torch.empty_like(q), 0
    for first, last, low in _blocks(T, window):
        # The scale stands in the product, whose accumulation is fp32, so that no rounding is added.
        empty = q.new_empty(B * H, last - first, last - low)
        scores = torch.baddbmm(empty, q[:, first:last], k[:, low:last].transpose(1, 2), beta=0, alpha=E**-0.5)
        _hide(scores, first, last, low, window)
        p = kept[offset : offset + scores.numel()].view(scores.shape)
        offset += scores.numel()
        torch.softmax(scores, -1, out=p)
        y[:, first:last] = torch.bmm(p, v[:, low:last])
    return y.view(q_BHTE.shape), kept


@attend_blocked.register_fake
def _(q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, window: int, kept_elements: int) -> tuple[Tensor, Tensor]:
    return q_BHTE.new_empty(q_BHTE.shape), q_BHTE.new_empty(kept_elements)


@torch.library.custom_op("quern::attend_blocked_backward", mutates_args=())
def attend_blocked_backward(
    grad_BHTE: Tensor, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, kept: Tensor, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v from the kept probabilities: dS = P ∘ (dP - rowsum(P ∘ dP))."""
    B, H, T, E = q_BHTE.shape
    groups = H // k_BKTE.size(1)
    q, k, v = q_BHTE.flatten(0, 1), _heads(k_BKTE, groups), _heads(v_BKTE, groups)
    grad = grad_BHTE.contiguous().flatten(0, 1)
    blocks = _blocks(T, window)
    dq, dk, dv = torch.empty_like(q), _Sum(k, len(blocks)), _Sum(v, len(blocks))
    offset = 0
    for first, last, low in blocks:
        shape = (B * H, last - first, last - low)
        p = kept[offset : offset + math.prod(shape)].view(shape)
        offset += math.prod(shape)
        dp = torch.bmm(grad[:, first:last], v[:, low:last].transpose(1, 2))
        ds = torch.ops.aten._softmax_backward_data(dp, p, -1, p.dtype)
        empty = q.new_empty(B * H, last - first, E)
        dq[:, first:last] = torch.baddbmm(empty, ds, k[:, low:last], beta=0, alpha=E**-0.5)
        empty = q.new_empty(B * H, last - low, E)
        scaled = torch.baddbmm(empty, ds.transpose(1, 2), q[:, first:last], beta=0, alpha=E**-0.5)
        dk.add(low, last, scaled)
        dv.add(low, last, torch.bmm(p.transpose(1, 2), grad[:, first:last]))
    shape = (B, k_BKTE.size(1), groups, T, E)
    return dq.view(q_BHTE.shape), dk.result(shape), dv.result(shape)


class _Sum:
    """Sums pieces along the tokens, in fp32 if there are more than two; a first one that covers all is taken as is."""

    def __init__(self, like_NTE: Tensor, pieces: int) -> None:
        self.like, self.total = like_NTE, None
        self.dtype = torch.float32 if pieces > 2 else like_NTE.dtype

    def add(self, low: int, last: int, piece: Tensor) -> None:
        if self.total is None and piece.shape == self.like.shape:
            self.total = piece.to(self.dtype)
            return
        if self.total is None:
            self.total = torch.zeros(self.like.shape, dtype=self.dtype)
        self.total[:, low:last] += piece

    def result(self, shape: tuple[int, ...]) -> Tensor:
        """(B · K · groups, T, E), viewed as (B, K, groups, T, E) → (B, K, T, E) in the inputs' dtype."""
        assert self.total is not None
        total = self.total.view(shape)
        return (total.sum(2) if shape[2] > 1 else total.squeeze(2)).to(self.like.dtype)


@attend_blocked_backward.register_fake
def _(
    grad_BHTE: Tensor, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, kept: Tensor, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    return q_BHTE.new_empty(q_BHTE.shape), k_BKTE.new_empty(k_BKTE.shape), v_BKTE.new_empty(v_BKTE.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int, int], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.window, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, output[1])


def _backward(ctx: Any, grad_y: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, kept = ctx.saved_tensors
    return *attend_blocked_backward(grad_y, q, k, v, kept, ctx.window), None, None


attend_blocked.register_autograd(_backward, setup_context=_save)
