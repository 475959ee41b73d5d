"""The `gpt` architecture in JAX: parameters as dataclasses, everything else as functions.

The twin of quern/model/gpt.py, which explains each part. Weights are (outputs, inputs), as there. Shapes: B rows, T
tokens, D width, H heads, K kv-heads, E head dim, F feed-forward channels, V vocabulary. A layer gathers a parameter
over `data` (ZeRO-3) before use. Activations are sharded by rows, and inside a block by heads or channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from quern.grug.attention import AttentionMask, attention
from quern.grug.mesh import BATCH, AnyMesh, check_model_axis, fit, product
from quern.recipe import ResolvedModel

QK_SCALE = 1.2
GATE_CHANNELS = 12
GATE_RANGE = 3.0
SMEAR_CHANNELS = 24
BIGRAM_ROWS, BIGRAM_FACTORS = 5, (36_313, 27_191)

BTD = P(BATCH, None, None)
BTF = P(BATCH, None, "model")


Attend = Callable[[jax.Array, jax.Array, jax.Array, AttentionMask], jax.Array]
Leaf = Any
"""An array, or in a description of the same structure a shape with its sharding (`layout`) or a name."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class JaxBlock:
    """One layer. Alternating layers, the last one included, have a value embedding and its gate; others have None."""

    query: Leaf  # (H·E, D)
    key: Leaf  # (K·E, D)
    value: Leaf  # (K·E, D)
    out: Leaf  # (D, H·E)
    up: Leaf  # (F, D)
    down: Leaf  # (D, F)
    value_gate: Leaf  # (K, GATE_CHANNELS)
    value_embedding: Leaf  # (V, K·E)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Params:
    """The whole model."""

    embedding: Leaf  # (V, D)
    head: Leaf  # (V, D)
    blocks: tuple[JaxBlock, ...]
    residual_scales: Leaf  # (layers,)
    x0_scales: Leaf  # (layers,)
    smear_gate: Leaf  # (1, SMEAR_CHANNELS or D)
    smear_scale: Leaf  # (1,)
    backout_scale: Leaf  # (1,)
    bigrams: Leaf = None  # (BIGRAM_ROWS·V, D), with `model.bigrams`
    bigram_scales: Leaf = None  # (layers,)


def layout(cfg: ResolvedModel, mesh: AnyMesh) -> Params:
    """Returns Params of `jax.ShapeDtypeStruct`: each parameter's shape and its sharding at rest. What an axis does not
    divide is not sharded along it; ValueError for a model axis that does not divide heads or feed-forward channels."""
    check_model_axis(cfg, mesh)
    depth, D, V, K = cfg.depth, cfg.width, cfg.vocab_size, cfg.kv_heads
    HE, KE = cfg.heads * cfg.head_dim, K * cfg.head_dim
    rows = fit(D, "data", mesh)

    def leaf(shape: tuple[int, ...], *spec: str | tuple[str, ...] | None) -> Leaf:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    def block(layer: int) -> JaxBlock:
        has = layer % 2 == (depth - 1) % 2  # a value embedding: alternating layers, the last one included
        return JaxBlock(
            query=leaf((HE, D), "model", rows),
            key=leaf((KE, D), "model", rows),
            value=leaf((KE, D), "model", rows),
            out=leaf((D, HE), rows, "model"),
            up=leaf((4 * D, D), "model", rows),
            down=leaf((D, 4 * D), rows, "model"),
            value_gate=leaf((K, GATE_CHANNELS), "model", None) if has else None,
            value_embedding=leaf((V, KE), None, fit(KE, ("model", "data"), mesh) or "model") if has else None,
        )

    return Params(
        embedding=leaf((V, D), None, fit(D, ("model", "data"), mesh)),
        head=leaf((V, D), fit(V, "model", mesh), rows),
        blocks=tuple(block(layer) for layer in range(depth)),
        residual_scales=leaf((depth,), None),
        x0_scales=leaf((depth,), None),
        smear_gate=leaf((1, min(SMEAR_CHANNELS, D)), None, None),
        smear_scale=leaf((1,), None),
        backout_scale=leaf((1,), None),
        bigrams=leaf((BIGRAM_ROWS * V, D), None, fit(D, ("model", "data"), mesh)) if cfg.bigrams else None,
        bigram_scales=leaf((depth,), None) if cfg.bigrams else None,
    )


def init_parameters(cfg: ResolvedModel, *, key: jax.Array) -> Params:
    """Returns new fp32 parameters, sharded over the current mesh, which does not change their values. They
    have the distributions of the PyTorch model, not its values."""
    shapes = layout(cfg, jax.sharding.get_abstract_mesh())
    bound = math.sqrt(3.0 / cfg.width)
    keys = iter(jax.random.split(key, len(jax.tree.leaves(shapes))))
    share = np.arange(cfg.depth, dtype=np.float32) / max(1, cfg.depth - 1)

    def uniform(low: float, high: float) -> Callable[[Any], jax.Array]:
        return lambda shape: jax.random.uniform(next(keys), shape, minval=low, maxval=high)

    fresh: dict[str, Callable[[Any], jax.Array]] = {
        "embedding": lambda shape: 0.8 * jax.random.normal(next(keys), shape),
        "head": lambda shape: 0.001 * jax.random.normal(next(keys), shape),
        **dict.fromkeys(("query", "key", "value", "value_embedding"), uniform(-bound, bound)),
        "up": uniform(-0.4 * bound, 0.4 * bound),
        **dict.fromkeys(("out", "down", "smear_scale", "bigrams"), jnp.zeros),
        **dict.fromkeys(("value_gate", "smear_gate"), uniform(0.0, 0.02)),
        "residual_scales": lambda shape: jnp.asarray(1.15 - 0.10 * share),
        "x0_scales": lambda shape: jnp.asarray(0.20 - 0.15 * share),
        "backout_scale": lambda shape: jnp.full(shape, 0.2),
        "bigram_scales": lambda shape: jnp.full(shape, 0.1),
    }
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: jax.reshard(fresh[path[-1].name](leaf.shape), leaf.sharding.spec), shapes
    )


def forward(
    params: Params,
    tokens: jax.Array,
    cfg: ResolvedModel,
    *,
    mask: AttentionMask | None = None,
    attend: Attend = attention,
) -> jax.Array:
    """Computes normed hidden states; `logits` takes them further.

    Args:
        params: In the dtype to compute in.
        tokens: (B, T) int32.
        cfg: The model's shape, resolved.
        mask: Causal by default; each layer adds its own window. Training passes none: as in PyTorch, the `gpt` model
            attends across the documents of a row. A mask with segments is PyTorch's `CausalContext(documents_BT)`.
        attend: Computes attention.

    Returns:
        (B, T, D) in the parameters' dtype.
    """
    mask = AttentionMask() if mask is None else mask
    x = norm(look_up(params.embedding, tokens, None))
    gate = params.smear_gate
    smear = jax.nn.sigmoid(product("btc,oc->bto", x[..., : gate.shape[1]], gate, BTD))
    x = x0 = halfway = x + params.smear_scale * smear * previous(x)
    rotary, bigrams = rotary_table(tokens.shape[1], cfg), None
    if params.bigrams is not None:
        bigrams = look_up(params.bigrams, bigram_rows(tokens, params.bigrams.shape[0] - 1), None)
    for layer, (block, window) in enumerate(zip(params.blocks, cfg.window_sizes(), strict=True)):
        if layer == len(params.blocks) // 2:
            halfway = x
        if bigrams is not None:
            x = x + params.bigram_scales[layer] * bigrams
        x = params.residual_scales[layer] * x + params.x0_scales[layer] * x0
        windows = [size for size in (mask.window, window) if size is not None]
        narrow = replace(mask, window=min(windows, default=None))
        x = x + self_attention(block, norm(x), tokens, rotary, narrow, cfg, attend)
        x = x + feed_forward(block, norm(x))
    return norm(x - params.backout_scale * halfway)


def logits(params: Params, x: jax.Array, cfg: ResolvedModel) -> jax.Array:
    """Hidden states (B, T, D) → softcapped fp32 logits (B, T, V), sharded along V where the model axis divides it."""
    vocabulary = jax.typeof(params.head).sharding.spec[0]
    head = jax.reshard(params.head, P(vocabulary, None))
    z = product("btd,vd->btv", x, head, P(BATCH, None, vocabulary), jnp.float32)
    return cap(z, cfg)


def cap(z: jax.Array, cfg: ResolvedModel) -> jax.Array:
    """The softcap of logits of any shape, in their dtype."""
    return cfg.softcap * jnp.tanh(z / cfg.softcap)


def self_attention(
    block: JaxBlock,
    x: jax.Array,
    tokens: jax.Array,
    rotary: tuple[np.ndarray, np.ndarray],
    mask: AttentionMask,
    cfg: ResolvedModel,
    attend: Attend,
) -> jax.Array:
    """Grouped-query attention with QK norm and a gated value embedding: normed x (B, T, D) → (B, T, D) in its dtype.

    tokens: (B, T) int32, for the value embedding; rotary: from `rotary_table`; mask: with the layer's window.
    """
    q, k, v = (
        split_heads(product("btd,hd->bth", x, jax.reshard(w, P("model", None)), BTF), cfg.head_dim)
        for w in (block.query, block.key, block.value)
    )
    if block.value_gate is not None and block.value_embedding is not None:
        seen = x[..., :GATE_CHANNELS]
        gate = GATE_RANGE * jax.nn.sigmoid(product("btc,kc->btk", seen, block.value_gate, BTF))
        v = v + gate[..., None] * split_heads(look_up(block.value_embedding, tokens, "model"), cfg.head_dim)
    q, k = (norm(rotate(x, *rotary)) * QK_SCALE for x in (q, k))
    k = offset(k) if cfg.key_offset and mask.window is None else k
    y = jnp.reshape(attend(q, k, v, mask), (*x.shape[:2], -1), out_sharding=BTF)
    return product("bth,dh->btd", y, jax.reshard(block.out, P(None, "model")), BTD)


def feed_forward(block: JaxBlock, x: jax.Array) -> jax.Array:
    """(B, T, D) → F channels, ReLU² → (B, T, D), in x's dtype."""
    up, down = jax.reshard(block.up, P("model", None)), jax.reshard(block.down, P(None, "model"))
    hidden = jnp.square(jax.nn.relu(product("btd,fd->btf", x, up, BTF)))
    return product("btf,df->btd", hidden, down, BTD)


def split_heads(x: jax.Array, head_dim: int) -> jax.Array:
    """(B, T, H·E) → (B, T, H, E), sharded along H."""
    B, T, HE = x.shape
    return jnp.reshape(x, (B, T, HE // head_dim, head_dim), out_sharding=P(BATCH, None, "model", None))


def norm(x: jax.Array) -> jax.Array:
    """RMSNorm without parameters over the last dim; computed in fp32, returned in x's dtype."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)


def look_up(weight: jax.Array, tokens: jax.Array, columns: str | None) -> jax.Array:
    """Rows of an embedding (V, C): (B, T) int32 → (B, T, C) in its dtype, C sharded along `columns`."""
    return jax.reshard(weight, P(None, columns)).at[tokens].get(out_sharding=P(BATCH, None, columns))


def bigram_rows(tokens: jax.Array, last: int) -> jax.Array:
    """The row (B, T) of each token (B, T) with the one before it in a table of `last` + 1 rows; `last` for the first
    one."""
    before = jnp.pad(tokens[:, :-1], ((0, 0), (1, 0)))
    now, then = (factor * x.astype(jnp.uint32) for factor, x in zip(BIGRAM_FACTORS, (tokens, before), strict=True))
    rows = ((now ^ then) & 0x7FFFFFFF) % last
    return jnp.where(jnp.arange(tokens.shape[1]) == 0, last, rows.astype(jnp.int32))


def previous(x: jax.Array) -> jax.Array:
    """x (B, T, D) shifted right by one token; the first position is zero."""
    return jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))


def rotary_table(T: int, cfg: ResolvedModel) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines (T, 1, E / 2) of the rotary angles, in fp32. With `key_offset` half of the pairs have no
    angle."""
    E = cfg.head_dim
    exponents = np.arange(0, E, 2, dtype=np.float32) / np.float32(E)
    if cfg.key_offset:
        exponents = np.linspace(0, 1, E // 4, dtype=np.float32)
    frequencies = np.float32(cfg.rope_base) ** -exponents
    frequencies = np.pad(frequencies, (0, E // 2 - len(frequencies)))
    angles = np.arange(T, dtype=np.float32)[:, None, None] * frequencies
    return np.cos(angles), np.sin(angles)


def offset(k: jax.Array) -> jax.Array:
    """The keys (B, T, K, E) with the pairs that do not turn, (i, i + E/2) with i ≥ E/4, from the token before."""
    before = jnp.split(jnp.pad(k[:, :-1], ((0, 0), (1, 0), (0, 0), (0, 0))), 4, axis=-1)
    own = jnp.split(k, 4, axis=-1)
    return jnp.concatenate([own[0], before[1], own[2], before[3]], axis=-1)


def rotate(x: jax.Array, cos: np.ndarray, sin: np.ndarray) -> jax.Array:
    """Rotates the pairs (i, i + E/2) of each head of x (B, T, H, E) clockwise by its position's angles, in fp32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos + second * sin, second * cos - first * sin], axis=-1).astype(x.dtype)
