"""Attention sinks: each query head may attend to nothing, by a learned logit in the softmax's denominator.

Hypothesis: heads with nothing to look for put their weight on the first token; a sink spares them that.
Source: gpt-oss's sinks, after Xiao et al. 2023 (arXiv 2309.17453).
Expected effect: none on speed; a slightly lower loss at equal steps, more so with short windows.
Verdict: no difference on rung 0 (-0.0003 bits per byte, 5 pairs). Study ladder-jax.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from quern.grug import model
from quern.grug.attention import AttentionMask, blocked_with_totals, by_head, by_kv_head, visible
from quern.grug.optim import group_of
from quern.grug.state import Grug
from quern.recipe import ResolvedModel
from quern.recipes.gpt import RECIPE as GPT_RECIPE


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SinkBlock(model.JaxBlock):
    sinks: model.Leaf  # (H,) logits


def init_parameters(cfg: ResolvedModel, *, key: jax.Array) -> model.Params:
    params = model.init_parameters(cfg, key=key)
    sinks = jax.reshard(jnp.zeros(cfg.heads or 0), P("model"))
    return replace(params, blocks=tuple(SinkBlock(**vars(block), sinks=sinks) for block in params.blocks))


def attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask, sinks: jax.Array) -> jax.Array:
    """The softmax's denominator grows from e^total to e^total + e^sink."""
    y, totals_BTH = blocked_with_totals(q, k, v, mask)
    return (y * jax.nn.sigmoid(totals_BTH - sinks)[..., None]).astype(y.dtype)


def reference_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask, sinks: jax.Array) -> jax.Array:
    """The definition: a sink is one more key, whose score is the sink's logit and whose value is zero."""
    T, K = k.shape[1:3]
    q_BTKGE = by_kv_head(q, K).astype(jnp.float32)
    scores = jnp.einsum("bqkge,bske->bkgqs", q_BTKGE, k.astype(jnp.float32)) * q.shape[-1] ** -0.5
    scores = jnp.where(visible(mask, 0, T, 0, T), scores, -jnp.inf)
    logits = jnp.reshape(sinks.astype(jnp.float32), (K, -1, 1, 1), out_sharding=P("model", None, None, None))
    column = jnp.broadcast_to(logits, (*scores.shape[:-1], 1), out_sharding=jax.typeof(scores).sharding)
    weights = jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)[..., :-1]
    return by_head(jnp.einsum("bkgqs,bske->bqkge", weights, v.astype(jnp.float32))).astype(q.dtype)


def forward(
    params: Any, tokens: jax.Array, cfg: ResolvedModel, *, attend: Callable[..., jax.Array] = attention
) -> jax.Array:
    sinks = iter([block.sinks for block in params.blocks])  # the core calls `attend` once in each layer, in order
    return model.forward(params, tokens, cfg, attend=lambda q, k, v, mask: attend(q, k, v, mask, next(sinks)))


def groups(params: model.Params) -> Any:
    """The core's groups of parameters; the sinks learn as the gates do."""
    return jax.tree.map(lambda group: "gates" if group == "sinks" else group, group_of(params))


class Sinks(Grug):
    init_parameters = init_parameters
    attention = attention
    reference_attention = reference_attention
    forward = forward
    group_of = groups


RECIPE = replace(GPT_RECIPE, name="attention_sink", make_model=Sinks)
