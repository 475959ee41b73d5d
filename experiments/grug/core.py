"""The unchanged core, for the gauntlet: the baseline of every experiment's figures."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from quern.grug import model
from quern.grug.attention import attention, reference_attention
from quern.grug.loss import Batch, measured_block
from quern.grug.loss import loss_fn as core_loss
from quern.grug.state import JaxTrainState, StepConfig, init_state
from quern.grug.state import train_step as core_step
from quern.optim.schedule import Multipliers
from quern.recipe import ModelRecipe, OptimRecipe

__all__ = ["attention", "reference_attention"]


@dataclass(frozen=True)
class Config:
    step: StepConfig
    vocab_size: int
    context: int
    batch_rows: int


def build_cfg(size: str) -> Config:
    """check: two tiny layers; speed: the reference size of `quern bench`; both with eight rows."""
    if size == "check":
        shape = ModelRecipe(depth=2, width=32, heads=4, kv_heads=2, head_dim=8, vocab_size=62, context=16)
    else:
        shape = ModelRecipe(depth=4, width=256, heads=4, kv_heads=4, head_dim=64, vocab_size=8192, context=512)
    assert shape.context and shape.vocab_size
    dtype = "float32" if size == "check" or jax.default_backend() == "cpu" else "bfloat16"
    block = measured_block(jax.default_backend(), dtype, shape.context)
    step = StepConfig(shape, OptimRecipe(lr_scale=0.1, decay_scale=0.1), dtype, None, block)
    return Config(step, shape.vocab_size, shape.context, 8)


def init_fn(cfg: Config, key: jax.Array) -> JaxTrainState:
    return init_state(int(jax.random.bits(key) >> 1), cfg.step)


def fwd_fn(params: model.Params, tokens: jax.Array, cfg: Config, attend: model.Attend) -> jax.Array:
    return model.logits(params, model.forward(params, tokens, cfg.step.model, attend=attend), cfg.step.model)


def loss_fn(params: model.Params, batch: Batch, cfg: Config, attend: model.Attend) -> jax.Array:
    return core_loss(params, batch, cfg.step.model, attend=attend)


@partial(jax.jit, static_argnames="cfg", donate_argnames="state")
def train_step(state: JaxTrainState, batch: Batch, cfg: Config) -> tuple[JaxTrainState, dict[str, Any]]:
    micro = jax.tree.map(lambda x: x[None], batch)
    return core_step(state, micro, Multipliers(), cfg.step)
