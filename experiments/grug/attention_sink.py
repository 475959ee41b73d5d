"""Attention sinks: each query head may attend to nothing, by a learned logit in the softmax's denominator.

Hypothesis: heads with nothing to look for put their weight on the first token; a sink spares them that.
Source: gpt-oss's sinks, after Xiao et al. 2023 (arXiv 2309.17453).
Expected effect: none on speed; a slightly lower loss at equal steps, more so with short windows.
Verdict: not measured yet. With every sink at minus infinity it is the core, which a test asserts.

The core in one file, edited in one place: look for EDIT. What else one would edit, and where:
    sinks     `attention` and `reference_attention`, their parameter in `Block`, its start in `init`
    masking   `visible`, and the windows in `forward`
    sharding  the PartitionSpecs in `init`, and each `out_sharding=`
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from quern.grug.mesh import BATCH, fit
from quern.grug.optim import rules
from quern.optim.schedule import Multipliers
from quern.recipe import OptimRecipe

Attend = Callable[..., jax.Array]
BTD, BTF, BTHE = P(BATCH, None, None), P(BATCH, None, "model"), P(BATCH, None, "model", None)


@dataclass(frozen=True)
class Config:
    depth: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context: int
    batch_rows: int
    dtype: str
    rope_base: float = 100_000.0
    softcap: float = 15.0

    def windows(self) -> list[int | None]:
        """Three short layers, one long, and so on; the last is long."""
        short = max(1, self.context // 4)
        return [None if layer % 4 == 3 or layer == self.depth - 1 else short for layer in range(self.depth)]


def build_cfg(size: str) -> Config:
    if size == "check":
        return Config(2, 32, 4, 2, 8, 62, 16, 8, "float32")
    return Config(4, 256, 4, 4, 64, 8192, 512, 8, "float32" if jax.default_backend() == "cpu" else "bfloat16")


# === GRUG CORE (COPY-PASTE) =================================================================================


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["query", "key", "value", "out", "up", "down", "value_gate", "value_embedding", "sinks"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Block:
    query: Any
    key: Any
    value: Any
    out: Any
    up: Any
    down: Any
    value_gate: Any
    value_embedding: Any
    sinks: Any  # EDIT: (H,) logits


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "embedding", "head", "blocks", "residual_scales", "x0_scales", "smear_gate", "smear_scale", "backout_scale",
    ],
    meta_fields=[],
)  # fmt: skip
@dataclass(frozen=True)
class Params:
    embedding: Any
    head: Any
    blocks: tuple[Block, ...]
    residual_scales: Any
    x0_scales: Any
    smear_gate: Any
    smear_scale: Any
    backout_scale: Any


def init(cfg: Config, key: jax.Array) -> Params:
    mesh = jax.sharding.get_abstract_mesh()
    D, HE, KE, V = cfg.width, cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim, cfg.vocab_size
    bound, rows, columns = math.sqrt(3.0 / D), fit(D, "data", mesh), fit(D, ("model", "data"), mesh)
    keys = iter(jax.random.split(key, 3 + 7 * cfg.depth))
    share = np.arange(cfg.depth, dtype=np.float32) / max(1, cfg.depth - 1)

    def uniform(shape: tuple[int, ...], low: float, high: float, *spec: Any) -> jax.Array:
        return jax.reshard(jax.random.uniform(next(keys), shape, minval=low, maxval=high), P(*spec))

    def block(layer: int) -> Block:
        has = layer % 2 == (cfg.depth - 1) % 2
        return Block(
            query=uniform((HE, D), -bound, bound, "model", rows),
            key=uniform((KE, D), -bound, bound, "model", rows),
            value=uniform((KE, D), -bound, bound, "model", rows),
            out=jax.reshard(jnp.zeros((D, HE)), P(rows, "model")),
            up=uniform((4 * D, D), -0.4 * bound, 0.4 * bound, "model", rows),
            down=jax.reshard(jnp.zeros((D, 4 * D)), P(rows, "model")),
            value_gate=uniform((cfg.kv_heads, 12), 0.0, 0.02, "model", None) if has else None,
            value_embedding=uniform((V, KE), -bound, bound, None, fit(KE, ("model", "data"), mesh)) if has else None,
            sinks=jax.reshard(jnp.zeros(cfg.heads), P("model")),  # EDIT
        )

    return Params(
        embedding=jax.reshard(0.8 * jax.random.normal(next(keys), (V, D)), P(None, columns)),
        head=jax.reshard(0.001 * jax.random.normal(next(keys), (V, D)), P(fit(V, "model", mesh), rows)),
        blocks=tuple(block(layer) for layer in range(cfg.depth)),
        residual_scales=jnp.asarray(1.15 - 0.10 * share),
        x0_scales=jnp.asarray(0.20 - 0.15 * share),
        smear_gate=uniform((1, min(24, D)), 0.0, 0.02, None, None),
        smear_scale=jnp.zeros(1),
        backout_scale=jnp.full(1, 0.2),
    )


def forward(params: Params, tokens: jax.Array, cfg: Config, attend: Attend) -> jax.Array:
    x = norm(look_up(params.embedding, tokens, None))
    gate = jax.nn.sigmoid(
        jnp.einsum("btc,oc->bto", x[..., : params.smear_gate.shape[1]], params.smear_gate, out_sharding=BTD)
    )
    x = x + params.smear_scale * gate * jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))
    x0 = halfway = x
    rotary = rotary_table(tokens.shape[1], cfg.head_dim, cfg.rope_base)
    for layer, (block, window) in enumerate(zip(params.blocks, cfg.windows(), strict=True)):
        halfway = x if layer == cfg.depth // 2 else halfway
        x = params.residual_scales[layer] * x + params.x0_scales[layer] * x0
        x = x + self_attention(block, norm(x), tokens, rotary, window, cfg, attend)
        up, down = jax.reshard(block.up, P("model", None)), jax.reshard(block.down, P(None, "model"))
        hidden = jnp.square(jax.nn.relu(jnp.einsum("btd,fd->btf", norm(x), up, out_sharding=BTF)))
        x = x + jnp.einsum("btf,df->btd", hidden, down, out_sharding=BTD)
    return norm(x - params.backout_scale * halfway)


def self_attention(
    block: Block, x: jax.Array, tokens: jax.Array, rotary: Any, window: int | None, cfg: Config, attend: Attend
) -> jax.Array:
    q, k, v = (
        split_heads(jnp.einsum("btd,hd->bth", x, jax.reshard(w, P("model", None)), out_sharding=BTF), cfg.head_dim)
        for w in (block.query, block.key, block.value)
    )
    if block.value_gate is not None:
        gate = 3.0 * jax.nn.sigmoid(jnp.einsum("btc,kc->btk", x[..., :12], block.value_gate, out_sharding=BTF))
        v = v + gate[..., None] * split_heads(look_up(block.value_embedding, tokens, "model"), cfg.head_dim)
    q, k = (norm(rotate(a, *rotary)) * 1.2 for a in (q, k))
    y = attend(q, k, v, window, block.sinks)  # EDIT: the sinks go along
    y = jnp.reshape(y, (*y.shape[:2], -1), out_sharding=BTF)
    return jnp.einsum("bth,dh->btd", y, jax.reshard(block.out, P(None, "model")), out_sharding=BTD)


def attention(q: jax.Array, k: jax.Array, v: jax.Array, window: int | None, sinks: jax.Array) -> jax.Array:
    """Block by block of queries, each with the keys that it can see and no others."""
    T, q = q.shape[1], by_kv_head(q, k.shape[2])
    size = 256 if window is None else min(256, max(64, window // 2))
    parts = []
    for first in range(0, T, size):
        last = min(T, first + size)
        low = 0 if window is None else max(0, first - window + 1)
        scores = jnp.einsum("bqkge,bske->bkgqs", q[:, first:last], k[:, low:last], preferred_element_type=jnp.float32)
        scores = jnp.where(visible(first, last, low, window), scores * q.shape[-1] ** -0.5, -jnp.inf)
        weights = with_sinks(scores, sinks).astype(v.dtype)  # EDIT: was jax.nn.softmax(scores)
        parts.append(jnp.einsum("bkgqs,bske->bqkge", weights, v[:, low:last]))
    y = jnp.concatenate(parts, axis=1)
    return jnp.reshape(y, (*y.shape[:2], -1, y.shape[-1]), out_sharding=BTHE)


def reference_attention(q: jax.Array, k: jax.Array, v: jax.Array, window: int | None, sinks: jax.Array) -> jax.Array:
    """The definition: a sink is one more key, whose score is the sink's logit and whose value is zero."""
    T, q = q.shape[1], by_kv_head(q, k.shape[2]).astype(jnp.float32)
    scores = jnp.einsum("bqkge,bske->bkgqs", q, k.astype(jnp.float32)) * q.shape[-1] ** -0.5
    scores = jnp.where(visible(0, T, 0, window), scores, -jnp.inf)
    column = jnp.broadcast_to(sink_logits(sinks, scores), (*scores.shape[:-1], 1), out_sharding=jax.typeof(scores).sharding)  # EDIT  # fmt: skip  # noqa: E501
    weights = jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)[..., :-1]  # EDIT
    y = jnp.einsum("bkgqs,bske->bqkge", weights, v.astype(jnp.float32))
    return jnp.reshape(y, (*y.shape[:2], -1, y.shape[-1]), out_sharding=BTHE).astype(v.dtype)


def with_sinks(scores: jax.Array, sinks: jax.Array) -> jax.Array:
    """EDIT: softmax over the keys and the sink, without the sink's share. scores: (B, K, G, queries, keys) fp32."""
    logit = sink_logits(sinks, scores)
    highest = jax.lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), logit))
    raised = jnp.exp(scores - highest)
    return raised / (jnp.sum(raised, axis=-1, keepdims=True) + jnp.exp(logit - highest))


def sink_logits(sinks: jax.Array, scores: jax.Array) -> jax.Array:
    """EDIT: (H,) → (K, G, 1, 1), beside the scores."""
    K, G = scores.shape[1:3]
    return jnp.reshape(sinks, (K, G, 1, 1), out_sharding=P("model", None, None, None))


def visible(first: int, last: int, low: int, window: int | None) -> jax.Array:
    distance = jnp.arange(first, last)[:, None] - jnp.arange(low, last)
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def norm(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)


def look_up(weight: jax.Array, tokens: jax.Array, columns: str | None) -> jax.Array:
    return jax.reshard(weight, P(None, columns)).at[tokens].get(out_sharding=P(BATCH, None, columns))


def split_heads(x: jax.Array, head_dim: int) -> jax.Array:
    return jnp.reshape(x, (*x.shape[:2], -1, head_dim), out_sharding=BTHE)


def by_kv_head(q: jax.Array, K: int) -> jax.Array:
    B, T, H, E = q.shape
    return jnp.reshape(q, (B, T, K, H // K, E), out_sharding=P(BATCH, None, "model", None, None))


def rotary_table(T: int, head_dim: int, base: float) -> tuple[np.ndarray, np.ndarray]:
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    angles = np.arange(T, dtype=np.float32)[:, None, None] * np.float32(base) ** -exponents
    return np.cos(angles), np.sin(angles)


def rotate(x: jax.Array, cos: np.ndarray, sin: np.ndarray) -> jax.Array:
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos + second * sin, second * cos - first * sin], axis=-1).astype(x.dtype)


# === GAUNTLET ===============================================================================================


@partial(jax.tree_util.register_dataclass, data_fields=["params", "opt_state"], meta_fields=[])
@dataclass(frozen=True)
class State:
    params: Params
    opt_state: Any


def groups(params: Params) -> Params:
    """The core's groups of parameters; the sinks learn as the gates do."""
    names = dict.fromkeys(("query", "key", "value", "out", "up", "down"), "matrices")
    names |= {"value_gate": "gates", "value_embedding": "value_embeddings", "sinks": "gates"}  # EDIT: the sinks
    names |= dict.fromkeys(("smear_gate", "smear_scale", "backout_scale"), "smear")
    return jax.tree_util.tree_map_with_path(lambda path, _: names.get(path[-1].name, path[-1].name), params)


def optimizer(cfg: Config) -> Any:
    scale = math.sqrt(cfg.batch_rows * cfg.context / 2**19)
    recipe = OptimRecipe(lr_scale=scale, decay_scale=scale, width_scale=math.sqrt(768 / cfg.width))
    return optax.partition({**rules(recipe, jnp.dtype(cfg.dtype))}, groups)


@partial(jax.jit, static_argnums=0)
def init_fn(cfg: Config, key: jax.Array) -> State:
    params = init(cfg, key)
    return State(params, optimizer(cfg).init(params))


def fwd_fn(params: Params, tokens: jax.Array, cfg: Config, attend: Attend) -> jax.Array:
    x = forward(params, tokens, cfg, attend)
    vocabulary = jax.typeof(params.head).sharding.spec[0]
    head = jax.reshard(params.head, P(vocabulary, None))
    z = jnp.einsum("btd,vd->btv", x, head, out_sharding=P(BATCH, None, vocabulary)).astype(jnp.float32)
    return cfg.softcap * jnp.tanh(z / cfg.softcap)


def loss_fn(params: Params, batch: dict[str, jax.Array], cfg: Config, attend: Attend) -> jax.Array:
    z = fwd_fn(jax.tree.map(lambda p: p.astype(cfg.dtype), params), batch["tokens"], cfg, attend)
    ids = jax.lax.broadcasted_iota(jnp.int32, z.shape, 2, out_sharding=jax.typeof(z).sharding)
    at_target = jnp.sum(jnp.where(ids == batch["targets"][..., None], z, 0.0), axis=-1)
    return jnp.sum((jax.nn.logsumexp(z, axis=-1) - at_target) * batch["scale"])


@partial(jax.jit, static_argnames="cfg", donate_argnames="state")
def train_step(state: State, batch: dict[str, jax.Array], cfg: Config) -> tuple[State, dict[str, jax.Array]]:
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch, cfg, attention)
    changes, opt_state = optimizer(cfg).update(grads, state.opt_state, state.params, multipliers=Multipliers())
    return State(jax.tree.map(jnp.add, state.params, changes), opt_state), {"loss": loss}
