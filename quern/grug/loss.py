"""Cross-entropy: the sum of scale · nats over the targets, whole or a block of positions at a time.

The caller's `scale` holds mask, weight and normaliser at once, as on the PyTorch side. Blockwise, only one block's
logits exist at a time, in the backward pass too, where they are computed anew.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from einops import rearrange

from quern.grug.attention import AttentionMask, attention
from quern.grug.model import Attend, Params, cap, forward, logits, look_up
from quern.recipe import ModelRecipe

MAX_SOFTCAP = 60.0
BLOCK_TOKENS = 64
Batch = dict[str, jax.Array]
"""tokens, targets: (B, T) int32; scale: (B, T) fp32 = mask · weight / valid targets of the whole batch."""


def measured_block(platform: str, dtype: str, context: int) -> int | None:
    """What `loss_fn(block_tokens=…)` should be: blocks on CPUs that train in bf16, whose matrix units make computing
    logits twice cheaper than keeping them; whole rows elsewhere, and where blocks don't divide a row.

    docs/grug.md has the figures.
    """
    return BLOCK_TOKENS if platform == "cpu" and dtype == "bfloat16" and context % BLOCK_TOKENS == 0 else None


def loss_fn(
    params: Params,
    batch: Batch,
    cfg: ModelRecipe,
    *,
    block_tokens: int | None = None,
    mask: AttentionMask | None = None,
    attend: Attend = attention,
) -> jax.Array:
    """Sum of scale · nats over a batch, an fp32 scalar. block_tokens: positions of a row at a time; None: whole rows.

    Raises ValueError when blocks do not divide a row.
    """
    x = forward(params, batch["tokens"], cfg, mask=mask, attend=attend)
    if block_tokens is None or block_tokens >= x.shape[1]:
        return jnp.sum(token_losses(params, x, batch["targets"], cfg) * batch["scale"])
    return _blockwise(params, x, batch, cfg, block_tokens)


def token_losses(params: Params, x: jax.Array, targets: jax.Array, cfg: ModelRecipe) -> jax.Array:
    """Nats of each target (B, T), fp32, from hidden states.

    Capped logits need no maximum subtracted, and a target's own logit is taken anew from its row of the head, which
    spares two passes over the vocabulary. Raises ValueError for a cap over 60, whose exponentials fp32 could not sum.
    """
    if cfg.softcap > MAX_SOFTCAP:
        raise ValueError(f"model.softcap {cfg.softcap} is too large for this loss: use at most {MAX_SOFTCAP:g}")
    total = jnp.sum(jnp.exp(logits(params, x, cfg)), axis=-1)
    rows = look_up(params.head, targets, None)
    at_target = jnp.sum(x.astype(jnp.float32) * rows.astype(jnp.float32), axis=-1)
    return jnp.log(total) - cap(at_target, cfg)


def _blockwise(params: Params, x: jax.Array, batch: Batch, cfg: ModelRecipe, size: int) -> jax.Array:
    if x.shape[1] % size:
        raise ValueError(f"blocks of {size} positions do not divide rows of {x.shape[1]}")

    @jax.checkpoint
    def block_loss(x: jax.Array, targets: jax.Array, scale: jax.Array) -> jax.Array:
        return jnp.sum(token_losses(params, x, targets, cfg) * scale)

    blocks = (
        rearrange(x, "b (n t) d -> n b t d", t=size),
        rearrange(batch["targets"], "b (n t) -> n b t", t=size),
        rearrange(batch["scale"], "b (n t) -> n b t", t=size),
    )
    total, _ = jax.lax.scan(lambda sum, block: (sum + block_loss(*block), None), jnp.zeros(()), blocks)
    return total
