"""Cross-entropy: the sum of scale · nats over the targets, for whole rows or a block of positions at a time.

The caller's `scale` combines mask, weight and normaliser, as in PyTorch. The blockwise loss holds the logits of one
block at a time and computes their gradients along with them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.sharding import PartitionSpec as P

from quern.grug.mesh import BATCH, product
from quern.grug.model import Params, cap, forward, logits, look_up
from quern.recipe import ResolvedModel

BLOCK_TOKENS = 64
Batch = dict[str, jax.Array]
"""tokens, targets: (B, T) int32; scale: (B, T) fp32 = mask · weight / valid targets of the whole batch."""


def measured_block(platform: str, dtype: str, context: int) -> int | None:
    """Returns the faster `block_tokens` of `loss_fn`: blocks that divide a row on CPUs in bf16, where their logits stay
    in the cache, else None for whole rows."""
    return BLOCK_TOKENS if platform == "cpu" and dtype == "bfloat16" and context % BLOCK_TOKENS == 0 else None


def loss_fn(
    params: Params,
    batch: Batch,
    cfg: ResolvedModel,
    *,
    block_tokens: int | None = None,
    forward: Callable[..., jax.Array] = forward,
) -> jax.Array:
    """Computes the sum of scale · nats over a batch.

    params: in the dtype to compute in; block_tokens: positions of a row at a time, None takes whole rows; forward:
    takes (params, tokens, cfg). Returns an fp32 scalar. Raises ValueError when blocks do not divide a row.
    """
    x = forward(params, batch["tokens"], cfg)
    if block_tokens is None or block_tokens >= x.shape[1]:
        return jnp.sum(token_losses(params, x, batch["targets"], cfg) * batch["scale"])
    if x.shape[1] % block_tokens:
        raise ValueError(f"blocks of {block_tokens} positions do not divide rows of {x.shape[1]}")
    head = jax.reshard(params.head, P(jax.typeof(params.head).sharding.spec[0], None))
    at_target = _at_target(params, x, batch["targets"], cfg)
    totals = cast(jax.Array, _log_totals(x, head, batch["scale"], cfg, block_tokens))
    return totals - jnp.sum(at_target * batch["scale"])


def token_losses(params: Params, x: jax.Array, targets: jax.Array, cfg: ResolvedModel) -> jax.Array:
    """Computes the nats of each target (B, T), fp32, from hidden states (B, T, D). Capped logits need no maximum
    subtracted, which saves a pass: the range of `model.softcap` ends where fp32 cannot sum such exponentials."""
    total = jnp.sum(jnp.exp(logits(params, x, cfg)), axis=-1)
    return jnp.log(total) - _at_target(params, x, targets, cfg)


def _at_target(params: Params, x: jax.Array, targets: jax.Array, cfg: ResolvedModel) -> jax.Array:
    """The logits of the targets (B, T), fp32."""
    rows = look_up(params.head, targets, None)
    return cap(jnp.sum(x.astype(jnp.float32) * rows.astype(jnp.float32), axis=-1), cfg)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _log_totals(x: jax.Array, head: jax.Array, scale: jax.Array, cfg: ResolvedModel, size: int) -> jax.Array:
    """Sum of scale · log(sum of exp(logits)), a block at a time. The cotangent of a sum is one number, so the forward
    pass computes each block's gradients from the logits it holds; autodiff would compute these again."""
    return jnp.sum(jax.lax.map(lambda block: _totals(block[0], head, cfg, block[1])[0], _cut(x, scale, size)))


def _totals(x: jax.Array, head: jax.Array, cfg: ResolvedModel, scale: jax.Array) -> tuple[jax.Array, Any]:
    """A block's term of the sum; for its gradients log(total), exp(logits), their weights and the cap's vjp."""
    z = product("btd,vd->btv", x, head, P(BATCH, None, jax.typeof(head).sharding.spec[0]), jnp.float32)
    capped, pull = jax.vjp(lambda z: cap(z, cfg), z)
    exps = jnp.exp(capped)
    total = jnp.sum(exps, axis=-1)
    log = jnp.log(total)
    return jnp.sum(log * scale), (log, exps, scale / total, pull)


def _log_totals_forward(
    x: jax.Array, head: jax.Array, scale: jax.Array, cfg: ResolvedModel, size: int
) -> tuple[jax.Array, Any]:
    vocabulary = jax.typeof(head).sharding.spec[0]

    def one(carry: tuple[jax.Array, jax.Array], block: tuple[jax.Array, jax.Array]) -> Any:
        x, scale = block
        part, (log, exps, weight, pull) = _totals(x, head, cfg, scale)
        dz = pull(exps * weight[..., None])[0].astype(x.dtype)
        dx = product("btv,vd->btd", dz, head, P(BATCH, None, None))
        # The vocabulary is the last dim, so XLA transposes the smaller operand.
        dhead = product("btd,btv->dv", x, dz, P(None, vocabulary), jnp.float32)
        return (carry[0] + part, carry[1] + dhead), (dx, log)

    start = jnp.zeros(()), jnp.zeros_like(head.T, jnp.float32)
    (total, dhead), (dx, logs) = jax.lax.scan(one, start, _cut(x, scale, size))
    return total, (
        rearrange(dx, "n b t d -> b (n t) d"),
        dhead.T.astype(head.dtype),
        rearrange(logs, "n b t -> b (n t)"),
    )


def _log_totals_backward(cfg: ResolvedModel, size: int, kept: Any, g: jax.Array) -> tuple[jax.Array, ...]:
    return tuple((g * part.astype(jnp.float32)).astype(part.dtype) for part in kept)


_log_totals.defvjp(_log_totals_forward, _log_totals_backward)


def _cut(x: jax.Array, scale: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """(B, T, D) and (B, T) → blocks of positions first, for a scan."""
    return rearrange(x, "b (n t) d -> n b t d", t=size), rearrange(scale, "b (n t) -> n b t", t=size)
