"""The training state and one jitted optimizer step: gradients over micro-batches, a check that they are finite, update.

As in PyTorch, the loss is a sum over valid targets divided by their number in the whole batch, so micro-batches do not
change it: the caller's `scale` combines mask, weight and normaliser. A step whose loss or gradient norm is not finite
changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from einops import rearrange
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from quern.data.batch import Batch as HostBatch
from quern.grug import attention as paths
from quern.grug import model, optim
from quern.grug.mesh import BATCH, place, product
from quern.grug.model import Params, cap, forward, logits, look_up
from quern.optim.schedule import Multipliers
from quern.recipe import Resolved, ResolvedModel, ResolvedOptim

BLOCK_TOKENS = 64
Batch = dict[str, jax.Array]
"""tokens, targets: (B, T) int32; scale: (B, T) fp32 = mask · weight / valid targets of the whole batch."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class JaxTrainState:
    """Everything that a step changes. params: fp32."""

    params: Params
    opt_state: Any


class Grug:
    """The functions that training, evaluation and the gauntlet call. The class of an experiment replaces some of them,
    and is the `make_model` of its recipe (docs/grug.md). It only holds functions: nothing makes an instance."""

    init_parameters: ClassVar[Callable[..., Any]] = model.init_parameters
    forward: ClassVar[Callable[..., jax.Array]] = model.forward
    attention: ClassVar[Callable[..., jax.Array]] = paths.attention
    reference_attention: ClassVar[Callable[..., jax.Array]] = paths.reference_attention
    group_of: ClassVar[Callable[[Any], Any]] = optim.group_of
    rules: ClassVar[Callable[..., dict[str, optax.GradientTransformationExtraArgs]]] = optim.rules

    def __init__(self, *_: object) -> None:
        raise ValueError(f"{type(self).__name__} is a model of the JAX twin: train it with `quern grug train FILE`")


@dataclass(frozen=True)
class StepConfig:
    """Static arguments of a step. dtype: dtype of weights and activations in the forward pass ("float32", "bfloat16" or
    "float16"); block_tokens: see `loss_fn`; core: the functions."""

    model: ResolvedModel
    optim: ResolvedOptim
    dtype: str
    clip_norm: float | None
    block_tokens: int | None = None
    core: type[Grug] = Grug


def step_config(recipe: Resolved, dtype: str, core: type[Grug] = Grug) -> StepConfig:
    """Returns the static arguments for a resolved recipe (with its vocabulary) on this process's devices."""
    block = measured_block(jax.default_backend(), dtype, recipe.model.context)
    return StepConfig(recipe.model, recipe.optim, dtype, recipe.train.clip_norm, block, core)


def make_optimizer(cfg: StepConfig) -> Any:
    """Returns the optimizer: `update(grads, state, params, multipliers=…)` returns the changes to add."""
    rules = cfg.core.rules(cfg.optim, jnp.dtype(cfg.dtype), cfg.model.depth)
    return optax.partition({name: optim.with_factor(name, rules) for name in rules}, cfg.core.group_of)


@partial(jax.jit, static_argnames="cfg")
def init_state(seed: int, cfg: StepConfig) -> JaxTrainState:
    """Returns a new state on the current mesh."""
    return state_of(cfg.core.init_parameters(cfg.model, key=jax.random.split(jax.random.key(seed))[0]), cfg)


@partial(jax.jit, static_argnames="cfg")
def state_of(params: Params, cfg: StepConfig) -> JaxTrainState:
    """Returns a state with these parameters and fresh moments, each sharded like its parameter."""
    return JaxTrainState(params, make_optimizer(cfg).init(params))


def device_batch(batch: HostBatch, micro_rows: int, mesh: Mesh) -> Batch:
    """Places a global batch on the devices, its rows sharded over the batch axes.

    Returns tokens and targets (int32) and scale (fp32), each (micro-batches, micro_rows, T); masked rows fill the last
    micro-batch. Raises ValueError where the batch has no valid target.
    """
    valid = int(batch.mask.sum())
    if valid == 0:
        raise ValueError("a batch without a single target cannot train: check the data's masks")
    scale = batch.mask.astype(np.float32)
    if batch.weight is not None:
        scale *= batch.weight
    scale /= valid
    padding = ((0, -len(batch.tokens) % micro_rows), (0, 0))
    arrays = {"tokens": batch.tokens, "targets": batch.targets, "scale": scale}
    split = {name: rearrange(np.pad(x, padding), "(m b) t -> m b t", b=micro_rows) for name, x in arrays.items()}
    return {name: place(x, P(None, BATCH, None), mesh) for name, x in split.items()}


@partial(jax.jit, static_argnames="cfg", donate_argnames="state")
def train_step(
    state: JaxTrainState, batch: Batch, multipliers: Multipliers, cfg: StepConfig
) -> tuple[JaxTrainState, dict[str, jax.Array]]:
    """Runs one optimizer step on a batch of `device_batch`; donates the state.

    Returns the new state, and metrics: loss (nats per valid target) and grad_norm.
    """
    loss, grads = loss_and_grads(state.params, batch, cfg)
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)

    def update(state: JaxTrainState) -> JaxTrainState:
        scale = 1.0 if cfg.clip_norm is None else jnp.minimum(1.0, cfg.clip_norm / (norm + 1e-6))
        clipped = jax.tree.map(lambda g: g * scale, grads) if cfg.clip_norm is not None else grads
        updates, opt_state = make_optimizer(cfg).update(clipped, state.opt_state, state.params, multipliers=multipliers)
        return JaxTrainState(jax.tree.map(jnp.add, state.params, updates), opt_state)

    return jax.lax.cond(finite, update, lambda state: state, state), {"loss": loss, "grad_norm": norm}


def loss_and_grads(params: Params, batch: Batch, cfg: StepConfig) -> tuple[jax.Array, Params]:
    """Returns loss and gradients summed over all micro-batches; gradients are fp32 and sharded like the parameters."""
    objective = jax.value_and_grad(lambda params, batch: _loss(params, batch, cfg))
    if batch["tokens"].shape[0] == 1:
        return objective(params, jax.tree.map(lambda x: x[0], batch))

    def add(total: tuple[jax.Array, Params], micro: Batch) -> tuple[tuple[jax.Array, Params], None]:
        return jax.tree.map(jnp.add, total, objective(params, micro)), None

    zero = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
    return jax.lax.scan(add, zero, batch)[0]


def _loss(params: Params, batch: Batch, cfg: StepConfig) -> jax.Array:
    return loss_fn(_cast(params, cfg.dtype), batch, cfg.model, block_tokens=cfg.block_tokens, forward=cfg.core.forward)


@partial(jax.jit, static_argnames="cfg")
def eval_step(params: Params, tokens: jax.Array, targets: jax.Array, cfg: StepConfig) -> jax.Array:
    """Returns the nats of each target (B, T), fp32, replicated on every device, so each process can read all."""
    params = _cast(params, cfg.dtype)
    losses = token_losses(params, cfg.core.forward(params, tokens, cfg.model), targets, cfg.model)
    return jax.reshard(losses, P(None, None))


def _cast(params: Params, dtype: str) -> Params:
    return jax.tree.map(lambda p: p.astype(dtype), params)


# The loss ---------------------------------------------------------------------------------------------------
#
# The sum of scale · nats over the targets, for whole rows or a block of positions at a time. The blockwise loss holds
# the logits of one block at a time and computes their gradients along with them.


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
