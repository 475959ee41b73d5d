"""The optimizer: optax's AdamW and our Muon, each on its groups of parameters; the twin of quern/optim/.

Rates, Muon's momentum and its decay are arguments of every update, as arrays, so a schedule never causes a
recompilation. Muon needs whole matrices: matrices of one shape form a stack, which is sharded over all devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from quern.grug.mesh import AXES
from quern.grug.model import Params
from quern.optim import constants
from quern.optim.schedule import Multipliers
from quern.recipe import ResolvedOptim


def group_of(params: Params) -> Params:
    """Returns the same structure with the name of each parameter's group; a field without one is a group by itself."""
    groups = {"value_gate": "gates", "value_embedding": "value_embeddings", "bigram_scales": "x0_scales"}
    groups |= dict.fromkeys(("query", "key", "value", "out", "up", "down"), "matrices")
    groups |= dict.fromkeys(("smear_gate", "smear_scale", "backout_scale"), "smear")
    return jax.tree_util.tree_map_with_path(lambda path, _: groups.get(path[-1].name, path[-1].name), params)


def rules(recipe: ResolvedOptim, dtype: jnp.dtype, depth: int) -> dict[str, optax.GradientTransformationExtraArgs]:
    """Returns each group's rule with its peak rate and constants. dtype: the dtype of Muon's matrix products."""
    lr, decay = constants.muon_rate(recipe)
    return {"matrices": muon(lr, recipe.muon_beta2, decay, recipe.muon_steps, dtype)} | {
        name: adamw(group, recipe.eps) for name, group in constants.adamw_groups(recipe, depth).items()
    }


def with_factor(
    name: str, rules: dict[str, optax.GradientTransformationExtraArgs]
) -> optax.GradientTransformationExtraArgs:
    """A group's rule, whose rate has the group's factor in `Multipliers.groups`. Its update raises ValueError for
    factors of a group that does not exist."""
    rule = optax.with_extra_args_support(rules[name])

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        told: Multipliers = extra["multipliers"]
        factors = told.groups or {}
        if unknown := factors.keys() - rules.keys():
            raise ValueError(f"the schedule has factors for {sorted(unknown)}: the model's groups are {sorted(rules)}")
        own = told._replace(lr=told.lr * factors.get(name, 1.0))
        return rule.update(updates, state, params, **extra | {"multipliers": own})

    return optax.GradientTransformationExtraArgs(rule.init, update)


def adamw(group: constants.AdamWGroup, eps: float) -> optax.GradientTransformationExtraArgs:
    """optax.adamw with the learning rate group.lr · multipliers.lr."""
    moments = optax.scale_by_adam(group.beta1, group.beta2, eps)
    chain = optax.chain(moments, optax.add_decayed_weights(group.weight_decay))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        # optax jits a function of trees, and jaxlib takes dataclasses of equally many fields for one type: it would
        # sometimes return the class of a file that was loaded before.
        with jax.disable_jit():
            steps, state = chain.update(updates, state, params)
        lr = group.lr * extra["multipliers"].lr
        return jax.tree.map(lambda step: -lr * step, steps), state

    return optax.GradientTransformationExtraArgs(chain.init, update)


class MuonState(NamedTuple):
    """momentum: like the matrix, (R, C); second: (R, 1) if R ≥ C, else (1, C); both fp32."""

    momentum: Any
    second: Any


def muon(
    peak: float, beta2: float, weight_decay: float, steps: int, dtype: jnp.dtype
) -> optax.GradientTransformationExtraArgs:
    """Muon on a pytree of (R, C) matrices; quern/optim/muon.py explains the method and names its sources.

    peak: peak learning rate; beta2: of the variance reduction; steps: iterations of the orthogonalisation; dtype: of
    its matrix products.
    """

    def init(params: Any) -> MuonState:
        def second(p: jax.Array) -> jax.Array:
            return jnp.zeros((p.shape[0], 1) if p.shape[0] >= p.shape[1] else (1, p.shape[1]))

        return MuonState(jax.tree.map(jnp.zeros_like, params), jax.tree.map(second, params))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        multipliers: Multipliers = extra["multipliers"]
        momentum = jax.tree.map(lambda m, g: m + (1 - multipliers.momentum) * (g - m), state.momentum, updates)
        nesterov = jax.tree.map(lambda g, m: g + multipliers.momentum * (m - g), updates, momentum)
        turn = partial(_direction, beta2=beta2, steps=steps, dtype=dtype)
        direction, second = _by_shape(turn, nesterov, state.second)

        def step(p: jax.Array, d: jax.Array) -> jax.Array:
            lr = peak * multipliers.lr * max(1.0, p.shape[0] / p.shape[1]) ** 0.5
            decayed = jnp.where(d * p >= 0, p, 0.0) * (weight_decay * multipliers.decay)
            return -lr * (d + decayed)

        return jax.tree.map(step, params, direction), MuonState(momentum, second)

    return optax.GradientTransformationExtraArgs(init, update)


def polar_express(x: jax.Array, steps: int) -> jax.Array:
    """Brings the singular values of matrices (…, R, C) near 1; in x's dtype, accumulated in fp32."""
    tall, dtype = x.shape[-2] > x.shape[-1], x.dtype
    norm = jnp.linalg.norm(x.astype(jnp.float32), axis=(-2, -1), keepdims=True)
    x = (x / (norm * constants.POLAR_MARGIN + constants.TINY)).astype(dtype)
    for a, b, c in constants.polar_coefficients(steps):
        gram = _gram(x, tall)
        polynomial = (b * gram + c * _times(gram, gram)).astype(dtype)
        x = (a * x + (_times(x, polynomial) if tall else _times(polynomial, x))).astype(dtype)
    return x


def _gram(x: jax.Array, tall: bool) -> jax.Array:
    """xᵀx of a tall matrix, else xxᵀ. A tall matrix's rows are split into two dims, so XLA's CPU backend transposes
    an operand instead of multiplying in fp32 (see `_over_queries` in attention.py)."""
    if not tall:
        return _times(x, jnp.swapaxes(x, -1, -2))
    *stack, R, C = x.shape
    halves = jnp.reshape(x, (*stack, 2 - R % 2, -1, C))
    return jnp.einsum("...hrc,...hrs->...cs", halves, halves, preferred_element_type=jnp.float32).astype(x.dtype)


def _times(x: jax.Array, y: jax.Array) -> jax.Array:
    """A matrix product in x's dtype, accumulated in fp32 (see `mesh.product`)."""
    return jnp.matmul(x, y, preferred_element_type=jnp.float32).astype(x.dtype)


def _direction(
    x: jax.Array, second: jax.Array, beta2: float, steps: int, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """Equal rows → orthogonalisation → norm restored → variance reduced; returns that and the new second moment."""
    rows = jnp.linalg.norm(x, axis=-1, keepdims=True)
    floor = constants.ROW_FLOOR * jnp.sqrt(jnp.mean(jnp.square(rows), axis=-2, keepdims=True))
    x = polar_express((x / (jnp.maximum(rows, floor) + constants.TINY)).astype(dtype), steps).astype(jnp.float32)
    x = x * (min(x.shape[-2:]) ** 0.5 / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + constants.TINY))
    axis = -1 if second.shape[-1] == 1 else -2
    energy = jnp.mean(jnp.square(x), axis=axis, keepdims=True)
    second = second + (1 - beta2) * (energy - second)
    scale = jax.lax.rsqrt(second + constants.VARIANCE_EPS)
    before = jnp.sum(energy, axis=(-2, -1), keepdims=True)
    after = jnp.sum(energy * jnp.square(scale), axis=(-2, -1), keepdims=True)
    return x * (scale * jnp.sqrt(before / (after + constants.TINY))), second


def _by_shape(function: Callable[..., tuple[jax.Array, jax.Array]], tree: Any, second: Any) -> tuple[Any, Any]:
    """Applies a function of stacks to the matrices of a pytree, one stack per shape, sharded over all devices."""
    matrices, structure = jax.tree.flatten(tree)
    if jax.default_backend() == "cpu":
        function = _one_by_one(function)
    seconds = jax.tree.leaves(second)
    devices = math.prod(jax.sharding.get_abstract_mesh().shape.values())
    results: list[tuple[jax.Array, jax.Array]] = [(x, x) for x in matrices]
    for shape in dict.fromkeys(x.shape for x in matrices):
        members = [i for i, x in enumerate(matrices) if x.shape == shape]
        padding = -len(members) % devices  # matrices of zeros stay zero
        done = function(*(_spread([leaves[i] for i in members], padding) for leaves in (matrices, seconds)))
        stacks = [jax.reshard(stack, P(None, None, None)) for stack in done]
        for n, i in enumerate(members):
            like = jax.typeof(matrices[i]).sharding, jax.typeof(seconds[i]).sharding
            results[i] = (jax.reshard(stacks[0][n], like[0]), jax.reshard(stacks[1][n], like[1]))
    return tuple(jax.tree.unflatten(structure, [pair[part] for pair in results]) for part in (0, 1))  # type: ignore


def _one_by_one(function: Callable[..., tuple[jax.Array, jax.Array]]) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Maps over one matrix at a time on each device, so that it stays in a CPU's cache."""
    cut = P(AXES, None, None)
    return jax.shard_map(
        lambda *stacks: jax.lax.map(lambda one: function(*one), stacks),
        in_specs=(cut, cut),
        out_specs=(cut, cut),
        check_vma=False,
    )


def _spread(matrices: list[jax.Array], padding: int) -> jax.Array:
    """(N + padding, R, C) of whole matrices, sharded along N over all devices."""
    whole = [jax.reshard(x, P(None, None)) for x in matrices]
    stack = jnp.stack(whole + [jnp.zeros_like(whole[0])] * padding)
    return jax.reshard(stack, P(AXES, None, None))
