"""Causal attention with a small mask spec: the reference, a blocked path for any device, and the fast kernels.

q: (B, T, H, E); k, v: (B, T, K, E) with K dividing H; the scale is 1/sqrt(E). `attention` picks by the platform of
the devices: on a GPU cuDNN's kernel, on a TPU splash attention, elsewhere the blocked path. All of them equal
`reference_attention`, which builds the whole score matrix in fp32 and is never picked.

The blocked path computes, for each block of queries, the keys that the block can see and no others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.sharding import PartitionSpec as P

from quern.grug.mesh import BATCH
from quern.grug.product import product

BY_HEAD = P(BATCH, "model", None, None)
GROUPED = P(BATCH, None, "model", None, None)
BLOCK_QUERIES = 256
SPLASH_BLOCK = 128


@partial(jax.tree_util.register_dataclass, data_fields=["segment_ids"], meta_fields=["causal", "window"])
@dataclass(frozen=True)
class AttentionMask:
    """What a query may see. There is no dense form.

    causal: nothing after itself. window: only the last `window` tokens, itself included (causal masks only).
    segment_ids: (B, T) integers, a query sees keys of its own segment.
    """

    causal: bool = True
    window: int | None = None
    segment_ids: jax.Array | None = field(default=None)

    def __post_init__(self) -> None:
        if self.window is not None and (self.window < 1 or not self.causal):
            raise ValueError("a window needs a causal mask and at least 1 token")


def attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> jax.Array:
    """(B, T, H, E) by the path that suits the devices. Raises TypeError for anything but an AttentionMask."""
    if not isinstance(mask, AttentionMask):
        raise TypeError(
            f"attention takes an AttentionMask (causal, window, segment_ids), not a {type(mask).__name__}: "
            "dense masks are not supported, say what is visible with its fields"
        )
    return _pick(jax.default_backend())(q, k, v, _simplest(mask, q.shape[1]))


def _pick(platform: str) -> Callable[..., jax.Array]:
    return {"gpu": cudnn_attention, "tpu": splash_attention}.get(platform, blocked_attention)


def _simplest(mask: AttentionMask, T: int) -> AttentionMask:
    """A window that reaches over the whole row is none."""
    return replace(mask, window=None) if mask.window is not None and mask.window >= T else mask


def reference_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> jax.Array:
    """The definition, in fp32, returned in q's dtype."""
    T = q.shape[1]
    q_BTKGE = _by_kv_head(q, k.shape[2]).astype(jnp.float32)
    scores = jnp.einsum("bqkge,bske->bkgqs", q_BTKGE, k.astype(jnp.float32)) * q.shape[-1] ** -0.5
    allowed = visible(mask, 0, T, 0, T)
    weights = jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf), axis=-1)
    y = jnp.einsum("bkgqs,bske->bqkge", weights, v.astype(jnp.float32))
    return _by_head(y).astype(q.dtype)


def visible(mask: AttentionMask, first: int, last: int, low: int, high: int) -> jax.Array:
    """(B or 1, 1, 1, queries, keys) booleans: may query first … last - 1 see key low … high - 1."""
    distance = jnp.arange(first, last)[:, None] - jnp.arange(low, high)
    allowed = distance >= 0 if mask.causal else jnp.ones(distance.shape, bool)
    if mask.window is not None:
        allowed = allowed & (distance < mask.window)
    allowed = allowed[None, None, None]
    if mask.segment_ids is not None:
        ids = mask.segment_ids
        allowed = allowed & (ids[:, first:last, None] == ids[:, None, low:high])[:, None, None]
    return allowed


def blocked_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> jax.Array:
    """Block by block of queries, on any device; scores and their softmax in fp32.

    Heads come first and the queries of a group stand one below the other, so that each product is a plain batch of
    matrix products: on a CPU nearly twice as fast as with the tokens first.
    """
    (B, T, H, E), K = q.shape, k.shape[2]
    G = H // K
    q = jnp.transpose(_by_kv_head(q, K), (0, 2, 3, 1, 4))
    k, v = (jnp.transpose(x, (0, 2, 1, 3)) for x in (k, v))
    size = BLOCK_QUERIES if mask.window is None else min(BLOCK_QUERIES, max(64, mask.window // 2))
    parts = []
    for first in range(0, T, size):
        last = min(T, first + size)
        low = 0 if mask.window is None else max(0, first - mask.window + 1)
        high = last if mask.causal else T
        queries = jnp.reshape(q[:, :, :, first:last], (B, K, G * (last - first), E), out_sharding=BY_HEAD)
        scores = product("bkme,bkse->bkms", queries, k[:, :, low:high], BY_HEAD, jnp.float32) * E**-0.5
        allowed = jnp.tile(visible(mask, first, last, low, high)[:, 0], (1, 1, G, 1))
        weights = jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf), axis=-1).astype(v.dtype)
        y = product("bkms,bkse->bkme", weights, v[:, :, low:high], BY_HEAD)
        parts.append(jnp.reshape(y, (B, K, G, last - first, E), out_sharding=P(BATCH, "model", None, None, None)))
    return _by_head(jnp.transpose(jnp.concatenate(parts, axis=3), (0, 3, 1, 2, 4)))


def _by_kv_head(q: jax.Array, K: int) -> jax.Array:
    """(B, T, H, E) → (B, T, K, G, E): each kv-head with the G query heads that share it, cut along K."""
    B, T, H, E = q.shape
    return jnp.reshape(q, (B, T, K, H // K, E), out_sharding=GROUPED)


def _by_head(y: jax.Array) -> jax.Array:
    """(B, T, K, G, E) → (B, T, H, E), cut along H."""
    B, T, K, G, E = y.shape
    return jnp.reshape(y, (B, T, K * G, E), out_sharding=P(BATCH, None, "model", None))


def cudnn_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask, implementation: Literal["cudnn", "xla"] = "cudnn"
) -> jax.Array:
    """cuDNN's fused kernel, in half precision; in fp32, and with segments, which it has no argument for, blocked."""
    if q.dtype == jnp.float32 and implementation == "cudnn" or mask.segment_ids is not None:
        return blocked_attention(q, k, v, mask)
    window = None if mask.window is None else (mask.window - 1, 0)

    def local(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=mask.causal, local_window_size=window, implementation=implementation
        )

    return _each_device(local, q, k, v)


def splash_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask, interpret: bool = False
) -> jax.Array:
    """Splash attention (Pallas) on TPUs; rows that its blocks of 128 do not divide take the blocked path."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    T, E = q.shape[1], q.shape[-1]
    if T % SPLASH_BLOCK or E % SPLASH_BLOCK or not mask.causal:
        return blocked_attention(q, k, v, mask)
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
    """Runs a single-device kernel on every device's own rows and heads, which attention never mixes."""
    heads, rows = P(BATCH, None, "model", None), P(BATCH, None)
    arguments = (q, k, v) if ids is None else (q, k, v, ids)
    specs = (heads,) * 3 if ids is None else (heads, heads, heads, rows)
    return jax.shard_map(local, in_specs=specs, out_specs=heads, check_vma=False)(*arguments)
