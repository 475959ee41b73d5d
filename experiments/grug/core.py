"""The unchanged core through the gauntlet: what an experiment's figures are compared with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax

from quern.grug import model
from quern.grug.attention import attention, reference_attention
from quern.grug.loss import Batch
from quern.grug.loss import loss_fn as core_loss
from quern.grug.recipe import RECIPE
from quern.grug.state import JaxTrainState, StepConfig, init_state, step_config
from quern.grug.state import train_step as core_step
from quern.optim.schedule import Multipliers
from quern.recipe import ModelRecipe, TrainRecipe
from quern.resolve import resolve

__all__ = ["attention", "reference_attention"]


@dataclass(frozen=True)
class Config:
    step: StepConfig
    vocab_size: int
    context: int
    batch_rows: int


def build_cfg(size: str) -> Config:
    """check: two tiny layers; speed: the reference size of `quern bench`, eight rows at a time."""
    if size == "check":
        depth, shape, rows = 2, ModelRecipe(width=32, heads=4, kv_heads=2, head_dim=8, vocab_size=62, context=16), 8
    else:
        depth, shape, rows = 4, ModelRecipe(width=256, heads=4, vocab_size=8192, context=512), 8
    assert shape.context and shape.vocab_size
    train = TrainRecipe(steps=1000, batch_tokens=rows * shape.context)
    recipe = resolve(replace(RECIPE, depth=depth, model=shape, train=train))
    dtype = "float32" if size == "check" or jax.default_backend() == "cpu" else "bfloat16"
    return Config(step_config(recipe, dtype), shape.vocab_size, shape.context, rows)


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
