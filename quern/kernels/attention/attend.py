"""Causal attention with a window, packed documents, grouped queries: its definition, and the paths that run anywhere.

q: (B, T, H, E); k, v: (B, T, K, E) with K dividing H. A `MaskSpec` says what a query sees; no dense mask is stored.
The plain twin builds the whole score matrix in fp32, and every other path must equal it. flash.py has the path of GPUs;
autotune.py lists all paths and finds the fastest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quern.compiler import in_eager_inference


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
    """torch's own kernels. For a window or documents it builds a dense mask, which is slow."""
    fixed, varying = split_window(mask.window, q_BTHE.size(1))
    dense = fixed > 0 or varying is not None or mask.documents_BT is not None
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


# The blocked path -------------------------------------------------------------------------------------------
#
# For each block of queries only the keys that some of them sees are multiplied, with the library's vectorised softmax.
# The probabilities are kept for the backward pass: on a CPU, at the lengths that are trained there, reading them is far
# cheaper than exponentiating again. The path is a custom operator, so that torch.compile does not trace it; its
# arguments determine the shapes of its results.


@dataclass(frozen=True)
class _Block:
    """Queries first … last - 1 and keys low … last - 1. Keys below `apart` may belong to another document."""

    first: int
    last: int
    low: int
    apart: int = 0

    def scores(self, heads: int) -> tuple[int, int, int]:
        """The shape of its scores."""
        return heads, self.last - self.first, self.last - self.low


def _blocks(T: int, window: int, documents_BT: Tensor | None) -> list[_Block]:
    """The blocks of a row; window 0 is no window.

    Measured on CPUs with matrix units: small blocks skip more masked keys, large blocks run closer to the peak. Keys
    begin at a multiple of 64, since unaligned operands halve the speed of a product. The last block comes first,
    because without a window or documents it sees every key (`_Sum`).
    """
    size = min(256, max(128, 3 * window // 8 // 64 * 64)) if window else 256
    spans = [
        (first, min(T, first + size), max(0, first - window + 1) // 64 * 64 if window else 0)
        for first in reversed(range(0, T, size))
    ]
    if documents_BT is None:
        return [_Block(*span) for span in spans]
    # The first positions of the documents of each block's first and last query.
    ends_BN = documents_BT[:, [first for first, _, _ in spans] + [last - 1 for _, last, _ in spans]]
    begins_BN = torch.searchsorted(documents_BT.contiguous(), ends_BN)
    earliest = begins_BN[:, : len(spans)].amin(0).tolist()
    latest = begins_BN[:, len(spans) :].amax(0).tolist()
    return [
        _Block(first, last, max(low, begin // 64 * 64), apart=end)
        for (first, last, low), begin, end in zip(spans, earliest, latest, strict=True)
    ]


def _hide(scores_NTT: Tensor, block: _Block, window: int, documents_BT: Tensor | None) -> None:
    """Adds -inf to the scores of hidden keys."""
    queries, beside = block.last - block.first, block.first - block.low
    scores_NTT[:, :, beside:] += scores_NTT.new_full((queries, queries), -math.inf).triu_(1)
    behind = block.last - window - block.low  # the number of keys that the last query does not see
    if window and behind > 0:
        scores_NTT[:, :, :behind] += scores_NTT.new_full((queries, behind), -math.inf).tril_(beside - window)
    if documents_BT is not None and block.apart > block.low:
        own_BT = documents_BT[:, block.first : block.last]
        seen_BT = documents_BT[:, block.low : block.apart]
        other_B1TT = (own_BT[:, :, None] != seen_BT[:, None, :])[:, None]
        bias_B1TT = scores_NTT.new_zeros(other_B1TT.shape).masked_fill_(other_B1TT, -math.inf)
        scores_NTT.unflatten(0, (len(own_BT), -1))[..., : block.apart - block.low] += bias_B1TT


def _heads(x_BKTE: Tensor, groups: int) -> Tensor:
    """(B, K, T, E) → (B · K · groups, T, E), each head repeated `groups` times in a row."""
    return (x_BKTE.repeat_interleave(groups, dim=1) if groups > 1 else x_BKTE).flatten(0, 1)


def kept_elements(q_BHTE: Tensor, window: int) -> int:
    """The most probabilities that the window needs room for; documents and narrower windows need fewer."""
    B, H, T, _ = q_BHTE.shape
    return sum(math.prod(block.scores(B * H)) for block in _blocks(T, window, None))


def window_now(window: int, varying: Tensor | None, T: int) -> int:
    """The window of this call; 0 is no window."""
    if varying is None:
        return window
    value = int(varying)
    return value if value < T else 0


def attend_blocks(
    q_BHTE: Tensor,
    k_BKTE: Tensor,
    v_BKTE: Tensor,
    documents_BT: Tensor | None,
    window: int,
    varying: Tensor | None,
    scale: float,
    kept_elements: int,
) -> tuple[Tensor, Tensor]:
    """The blocked path on contiguous (B, H, T, E) → y and the probabilities, flat. window 0 is none; varying: holds the
    window instead. kept_elements: `kept_elements(q, window)`. As an argument it is part of the compiled graph;
    otherwise the compiler's cache on disk would not notice a change of the blocks."""
    B, H, T, E = q_BHTE.shape
    groups, window = H // k_BKTE.size(1), window_now(window, varying, T)
    q, k, v = q_BHTE.flatten(0, 1), _heads(k_BKTE, groups), _heads(v_BKTE, groups)
    kept = q.new_empty(kept_elements)
    y, offset = torch.empty_like(q), 0
    for block in _blocks(T, window, documents_BT):
        queries, keys = slice(block.first, block.last), slice(block.low, block.last)
        p = _part(kept, offset, block.scores(B * H))
        offset += p.numel()
        # The product accumulates in fp32, so scaling inside it adds no rounding.
        turned = k[:, keys].contiguous().transpose(1, 2)
        torch.baddbmm(p, q[:, queries].contiguous(), turned, beta=0, alpha=scale, out=p)
        _hide(p, block, window, documents_BT)
        torch.softmax(p, -1, out=p)
        y[:, queries] = torch.bmm(p, v[:, keys].contiguous())
    return y.view(q_BHTE.shape), kept


attend_blocked = torch.library.custom_op("quern::attend_blocked", mutates_args=())(attend_blocks)


@attend_blocked.register_fake
def _(q_BHTE: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return q_BHTE.new_empty(q_BHTE.shape), q_BHTE.new_empty(others[-1])


@torch.library.custom_op("quern::attend_blocked_backward", mutates_args=())
def attend_blocked_backward(
    grad_BHTE: Tensor,
    q_BHTE: Tensor,
    k_BKTE: Tensor,
    v_BKTE: Tensor,
    kept: Tensor,
    documents_BT: Tensor | None,
    window: int,
    varying: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v from the kept probabilities: dS = P ∘ (dP - rowsum(P ∘ dP))."""
    B, H, T, E = q_BHTE.shape
    groups, window = H // k_BKTE.size(1), window_now(window, varying, T)
    q, k, v = q_BHTE.flatten(0, 1), _heads(k_BKTE, groups), _heads(v_BKTE, groups)
    grad = grad_BHTE.contiguous().flatten(0, 1)
    blocks = _blocks(T, window, documents_BT)
    dq, dk, dv = torch.empty_like(q), _Sum(k, len(blocks)), _Sum(v, len(blocks))
    room, offset = q.new_empty(max(math.prod(block.scores(B * H)) for block in blocks)), 0
    for block in blocks:
        shape = block.scores(B * H)
        p, ds = _part(kept, offset, shape), _part(room, 0, shape)
        offset += p.numel()
        queries, keys = slice(block.first, block.last), slice(block.low, block.last)
        grad_block, k_block = grad[:, queries].contiguous(), k[:, keys].contiguous()
        torch.bmm(grad_block, v[:, keys].contiguous().transpose(1, 2), out=ds)
        torch.ops.aten._softmax_backward_data(ds, p, -1, p.dtype, grad_input=ds)
        empty = q.new_empty(B * H, shape[1], E)
        dq[:, queries] = torch.baddbmm(empty, ds, k_block, beta=0, alpha=scale)
        empty = q.new_empty(B * H, shape[2], E)
        q_block = q[:, queries].contiguous()
        dk.add(block.low, block.last, torch.baddbmm(empty, ds.transpose(1, 2), q_block, beta=0, alpha=scale))
        dv.add(block.low, block.last, torch.bmm(p.transpose(1, 2), grad_block))
    shape = (B, k_BKTE.size(1), groups, T, E)
    return dq.view(q_BHTE.shape), dk.result(shape), dv.result(shape)


def _part(flat: Tensor, offset: int, shape: tuple[int, int, int]) -> Tensor:
    return flat[offset : offset + math.prod(shape)].view(shape)


class _Sum:
    """Sums pieces along the tokens, in fp32 if there are more than two. A first piece that covers all begins it."""

    def __init__(self, like_NTE: Tensor, pieces: int) -> None:
        self.like, self.total = like_NTE, None
        self.dtype = torch.float32 if pieces > 2 else like_NTE.dtype

    def add(self, low: int, last: int, piece: Tensor) -> None:
        if self.total is None and piece.shape == self.like.shape:
            self.total = piece.to(self.dtype)
            return
        if self.total is None:
            self.total = self.like.new_zeros(self.like.shape, dtype=self.dtype)
        self.total[:, low:last] += piece

    def result(self, shape: tuple[int, ...]) -> Tensor:
        """(B · K · groups, T, E), viewed as (B, K, groups, T, E) → (B, K, T, E) in the inputs' dtype."""
        assert self.total is not None
        total = self.total.view(shape)
        return (total.sum(2) if shape[2] > 1 else total.squeeze(2)).to(self.like.dtype)


@attend_blocked_backward.register_fake
def _(grad_BHTE: Tensor, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, *others: Any) -> tuple[Tensor, ...]:
    return q_BHTE.new_empty(q_BHTE.shape), k_BKTE.new_empty(k_BKTE.shape), v_BKTE.new_empty(v_BKTE.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, documents_BT, ctx.window, varying, ctx.scale, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # the probabilities have no gradient, and zeros would be as large as they are
    ctx.save_for_backward(q, k, v, output[1], documents_BT, varying)


def _backward(ctx: Any, grad_y: Tensor, _: None) -> tuple[Tensor | None, ...]:
    q, k, v, kept, documents_BT, varying = ctx.saved_tensors
    grads = attend_blocked_backward(grad_y, q, k, v, kept, documents_BT, ctx.window, varying, ctx.scale)
    return *grads, None, None, None, None, None


attend_blocked.register_autograd(_backward, setup_context=_save)


def attend(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, mask: MaskSpec, scale: float | None = None) -> Tensor:
    """Causal attention → (B, T, H, E), by the path for the device. scale None is 1/sqrt(E)."""
    path = attend_in_blocks if q_BTHE.device.type == "cpu" else attend_sdpa
    return path(q_BTHE, k_BTKE, v_BTKE, mask, scale)


def attend_in_blocks(
    q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, mask: MaskSpec, scale: float | None = None
) -> Tensor:
    """Products over blocks of queries and the keys they see, for CPUs. Without a window, half of all
    probabilities are kept for the backward pass."""
    scale = scale_or_default(scale, q_BTHE.size(-1))
    q_BHTE, k_BKTE, v_BKTE = (x.transpose(1, 2).contiguous() for x in (q_BTHE, k_BTKE, v_BTKE))
    fixed, varying = split_window(mask.window, q_BTHE.size(1))
    kept = kept_elements(q_BHTE, fixed)
    path = attend_blocks if in_eager_inference() and not q_BHTE.is_meta else attend_blocked
    y_BHTE, _ = path(q_BHTE, k_BKTE, v_BKTE, mask.documents_BT, fixed, varying, scale, kept)
    return y_BHTE.transpose(1, 2)
