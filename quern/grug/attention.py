"""Causal attention with a mask of few fields: a reference, a blocked path for any device, and the fast kernels.

q: (B, T, H, E); k, v: (B, T, K, E) with K dividing H; the scale is 1/sqrt(E). `attention` calls the function that
`choose` selects. The gauntlet and the tests compare all of them with `reference_attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.sharding import PartitionSpec as P

from quern.grug.mesh import BATCH, product

BY_HEAD = P(BATCH, "model", None, None)
GROUPED = P(BATCH, None, "model", None, None)
BLOCK_QUERIES = 128
ONES = 16
SPLASH_BLOCK = 128


@partial(jax.tree_util.register_dataclass, data_fields=["segment_ids"], meta_fields=["window"])
@dataclass(frozen=True)
class AttentionMask:
    """The keys that a query may see: its own and earlier ones. There is no dense form. window: only the last so many
    tokens, the query's own included; segment_ids: (B, T) integers; only keys of the query's own segment."""

    window: int | None = None
    segment_ids: jax.Array | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError("a window needs at least 1 token")


def attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> jax.Array:
    """Computes attention (B, T, H, E) by the path that `choose` selects. Raises TypeError for a dense mask."""
    if not isinstance(mask, AttentionMask):
        raise TypeError(f"attention takes an AttentionMask (window, segment_ids), not a dense {type(mask).__name__}")
    if mask.window is not None and mask.window >= q.shape[1]:  # it covers the whole row
        mask = replace(mask, window=None)
    return choose(jax.default_backend(), q, mask)(q, k, v, mask)


def choose(platform: str, q: jax.Array | jax.ShapeDtypeStruct, mask: AttentionMask) -> Callable[..., jax.Array]:
    """Returns the function for a platform ("cpu", "gpu", "tpu") and inputs of this shape and dtype (docs/grug.md)."""
    T, E = q.shape[1], q.shape[-1]
    if platform == "gpu" and q.dtype != jnp.float32 and E % 8 == 0 and E <= 128 and mask.segment_ids is None:
        return cudnn_attention
    if platform == "tpu" and T % SPLASH_BLOCK == 0 and E % SPLASH_BLOCK == 0:
        return splash_attention
    return blocked_attention


def reference_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> jax.Array:
    """The definition of attention: computed in fp32, returned in q's dtype."""
    T = q.shape[1]
    q_BTKGE = by_kv_head(q, k.shape[2]).astype(jnp.float32)
    scores = jnp.einsum("bqkge,bske->bkgqs", q_BTKGE, k.astype(jnp.float32)) * q.shape[-1] ** -0.5
    allowed = visible(mask, 0, T, 0, T)
    weights = jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf), axis=-1)
    y = jnp.einsum("bkgqs,bske->bqkge", weights, v.astype(jnp.float32))
    return by_head(y).astype(q.dtype)


def visible(mask: AttentionMask, first: int, last: int, low: int, high: int) -> jax.Array:
    """Returns whether queries first … last - 1 see keys low … high - 1: booleans (B or 1, 1, 1, queries, keys)."""
    distance = jnp.arange(first, last)[:, None] - jnp.arange(low, high)
    allowed = distance >= 0
    if mask.window is not None:
        allowed = allowed & (distance < mask.window)
    allowed = allowed[None, None, None]
    if mask.segment_ids is not None:
        ids = mask.segment_ids
        allowed = allowed & (ids[:, first:last, None] == ids[:, None, low:high])[:, None, None]
    return allowed


def blocked_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> jax.Array:
    """Attention one block of queries at a time, on any device; scores and their softmax in fp32."""
    return blocked_with_totals(q, k, v, mask)[0]


def blocked_with_totals(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> tuple[jax.Array, jax.Array]:
    """`blocked_attention`, and the log of each query's sum of exp(score): (B, T, H) fp32. Heads are the leading dims
    and a group's queries are stacked along T, so each product is a plain batch of matrix products."""
    G = q.shape[2] // k.shape[2]
    q, k, v = (jnp.transpose(x, (0, 2, 1, 3)) for x in (_below(q, G), k, v))
    # Without the barrier XLA fuses the transposition into the products, which then run in fp32.
    q, k, v = jax.lax.optimization_barrier((q, k, v))
    y, totals = (_beside(jnp.transpose(x, (0, 2, 1, 3)), G) for x in _blocked(q, k, v, mask))
    return y, totals[..., 0]


@jax.custom_vjp
def _blocked(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> tuple[jax.Array, jax.Array]:
    """q (B, K, T · G, E), k and v (B, K, T, E) → (B, K, T · G, E), and the log totals (B, K, T · G, 1) in fp32."""
    # Autodiff's gradient stores fp32 scores and reads them more often: more than twice as long on a CPU. This one's
    # forward pass stores each block's exp(score - maximum) in the inputs' dtype and its inverse row sums.
    return _blocked_forward(q, k, v, mask)[0]


def _blocked_forward(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> tuple[Any, Any]:
    E, G = q.shape[-1], q.shape[2] // k.shape[2]
    # Columns of ones make the product with the values return the row sums too, which saves a pass.
    v_and_ones = jnp.concatenate([v, jnp.ones_like(v[..., :ONES])], axis=-1)
    parts, totals, kept = [], [], []
    for first, last, low, high in _blocks(k.shape[2], mask):
        queries = q[:, :, G * first : G * last]
        scores = product("bkme,bkse->bkms", queries, k[:, :, low:high], BY_HEAD, jnp.float32)
        allowed = jnp.repeat(visible(mask, first, last, low, high)[:, 0], G, axis=2)
        scores = jnp.where(allowed, scores * E**-0.5, -jnp.inf)
        highest = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - highest).astype(v.dtype)
        summed = product("bkms,bkse->bkme", weights, v_and_ones[:, :, low:high], BY_HEAD, jnp.float32)
        inverse = 1 / summed[..., E : E + 1]
        parts.append((summed[..., :E] * inverse).astype(v.dtype))
        totals.append(highest - jnp.log(inverse))
        kept.append((weights, inverse))
    y = jnp.concatenate(parts, axis=2)
    return (y, jnp.concatenate(totals, axis=2)), (q, k, v, y, mask, kept)


def _blocked_backward(saved: Any, cotangents: Any) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    """Computes, with P = weights · inverse and dP = g · vᵀ, dscores = P ∘ (dP - rowsum(g ∘ y)), as in FlashAttention's
    paper (Dao et al. 2022, arXiv:2205.14135, appendix B.2); the log totals add their cotangent to the bracket. g is
    multiplied by the inverse, so P itself is never stored."""
    (q, k, v, y, mask, kept), (g, g_totals) = saved, cotangents
    T, E, G = k.shape[2], q.shape[-1], q.shape[2] // k.shape[2]
    inner = jnp.sum(g.astype(jnp.float32) * y.astype(jnp.float32), axis=-1, keepdims=True) - g_totals
    dq, dk, dv = [], 0.0, 0.0
    for (first, last, low, high), (weights, inverse) in reversed(list(zip(_blocks(T, mask), kept, strict=True))):
        rows = slice(G * first, G * last)
        scaled = (g[:, :, rows].astype(jnp.float32) * inverse).astype(g.dtype)
        dweights = product("bkme,bkse->bkms", scaled, v[:, :, low:high], BY_HEAD, jnp.float32)
        dscores = weights.astype(jnp.float32) * (dweights - inner[:, :, rows] * inverse)
        dscores = (dscores * E**-0.5).astype(q.dtype)
        dq.append(product("bkms,bkse->bkme", dscores, k[:, :, low:high], BY_HEAD))
        beside = ((0, 0), (0, 0), (0, 0), (low, T - high))
        dk = dk + jnp.pad(_over_queries(q[:, :, rows], dscores), beside)
        dv = dv + jnp.pad(_over_queries(scaled, weights), beside)
    dk, dv = (jnp.swapaxes(x.astype(k.dtype), 2, 3) for x in (dk, dv))
    return jax.lax.optimization_barrier((jnp.concatenate(dq[::-1], axis=2), dk, dv)) + (None,)


_blocked.defvjp(_blocked_forward, _blocked_backward)


def _blocks(T: int, mask: AttentionMask) -> list[tuple[int, int, int, int]]:
    """(first query, last + 1, first key, last + 1) of each block. Small blocks skip more masked keys."""
    size = BLOCK_QUERIES if mask.window is None else min(BLOCK_QUERIES, max(64, mask.window // 2))
    window = mask.window or T
    spans = [(first, min(T, first + size)) for first in range(0, T, size)]
    return [(i, j, max(0, i - window + 1), j) for i, j in spans]


def _over_queries(x: jax.Array, weights: jax.Array) -> jax.Array:
    """(B, K, M, E), (B, K, M, S) → fp32 (B, K, E, S), summed over the M queries, which are split into two dims so that
    XLA's CPU backend uses the matrix units (docs/grug.md). x is the smaller operand."""
    halves = [
        jnp.reshape(
            z, (*z.shape[:2], 2 - z.shape[2] % 2, -1, z.shape[3]), out_sharding=P(BATCH, "model", None, None, None)
        )
        for z in (x, weights)
    ]
    return product("bkhme,bkhms->bkes", halves[0], halves[1], BY_HEAD, jnp.float32)


def _below(q: jax.Array, G: int) -> jax.Array:
    """(B, T, K · G, E) → (B, T · G, K, E): stacks the query heads that share a kv-head along T."""
    B, T, H, E = q.shape
    if G == 1:
        return q
    q = jnp.transpose(by_kv_head(q, H // G), (0, 1, 3, 2, 4))
    return jnp.reshape(q, (B, T * G, H // G, E), out_sharding=P(BATCH, None, "model", None))


def _beside(y: jax.Array, G: int) -> jax.Array:
    """(B, T · G, K, E) → (B, T, K · G, E)."""
    B, M, K, E = y.shape
    if G == 1:
        return y
    y = jnp.reshape(y, (B, M // G, G, K, E), out_sharding=P(BATCH, None, None, "model", None))
    return by_head(jnp.transpose(y, (0, 1, 3, 2, 4)))


def by_kv_head(q: jax.Array, K: int) -> jax.Array:
    """(B, T, H, E) → (B, T, K, G, E): groups the query heads by their kv-head; sharded along K."""
    B, T, H, E = q.shape
    return jnp.reshape(q, (B, T, K, H // K, E), out_sharding=GROUPED)


def by_head(y: jax.Array) -> jax.Array:
    """(B, T, K, G, E) → (B, T, H, E), sharded along H."""
    B, T, K, G, E = y.shape
    return jnp.reshape(y, (B, T, K * G, E), out_sharding=P(BATCH, None, "model", None))


def cudnn_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask, implementation: Literal["cudnn", "xla"] = "cudnn"
) -> jax.Array:
    """cuDNN's fused kernel; implementation="xla" makes the same call without the kernel."""
    window = None if mask.window is None else (mask.window - 1, 0)

    def local(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=True, local_window_size=window, implementation=implementation
        )

    return _each_device(local, q, k, v)


def splash_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask, interpret: bool = False
) -> jax.Array:
    """Splash attention (Pallas), a kernel for TPUs; interpret=True runs it on any device."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    T, E = q.shape[1], q.shape[-1]
    window = T if mask.window is None else mask.window
    groups = q.shape[2] // k.shape[2]
    one = masks.LocalMask((T, T), (window - 1, 0), 0)

    def local(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array | None = None) -> jax.Array:
        q = rearrange(q, "b t (k g) e -> b k g t e", g=groups) * E**-0.5
        k, v = (rearrange(x, "b t k e -> b k t e") for x in (k, v))
        call: Any = kernel.make_splash_mqa_single_device(masks.MultiHeadMask([one] * groups), interpret=interpret)
        segments = None if ids is None else kernel.SegmentIds(ids, ids)
        by_head = jax.vmap(call, in_axes=(0, 0, 0, None))
        y = jax.vmap(by_head, in_axes=(0, 0, 0, None if ids is None else 0))(q, k, v, segments)
        return rearrange(y, "b k g t e -> b t (k g) e").astype(q.dtype)

    return _each_device(local, q, k, v, mask.segment_ids)


def _each_device(
    local: Callable[..., jax.Array], q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array | None = None
) -> jax.Array:
    """Runs a single-device kernel on each device's rows and heads: attention is independent across both."""
    heads, rows = P(BATCH, None, "model", None), P(BATCH, None)
    arguments = (q, k, v) if ids is None else (q, k, v, ids)
    specs = (heads,) * 3 if ids is None else (heads, heads, heads, rows)
    return jax.shard_map(local, in_specs=specs, out_specs=heads, check_vma=False)(*arguments)
