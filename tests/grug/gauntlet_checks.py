"""Checks of the gauntlet and of experiments, run in JAX's process (jax_process.py)."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from quern.grug import attention, gauntlet, model
from quern.grug.mesh import BATCH, place
from quern.grug.state import Grug, StepConfig, init_state, step_config, train_step
from quern.optim.schedule import Multipliers
from quern.recipe import Resolved
from quern.stages.jax.train import core_of
from tests.grug.parity import recipe_in, recipes_of


def core_in(name: str) -> type[Grug]:
    return core_of(recipe_in(f"grug/{name}.py"))


def checks(name: str) -> dict[str, Any]:
    """Returns whether each check of an experiment passed. Its own attention has one path, so fp32 does for it."""
    core = Grug if name == "gpt" else core_in(name)
    cases = [case for case in gauntlet.CASES if case[2] == "bfloat16"] if name == "gpt" else []
    cases = [gauntlet.CASES[0], *cases]
    found = gauntlet.check_attention(core, cases) | gauntlet.check(core)
    return {check: value["passed"] for check, value in found.items()}


def broken() -> list[str]:
    """Returns the checks of the model that fail on a core that is broken in three ways."""
    good: Callable[..., jax.Array] = model.forward

    def wrong(q: jax.Array, k: jax.Array, v: jax.Array, mask: attention.AttentionMask) -> jax.Array:
        return 1.01 * attention.reference_attention(q, k, v, mask)

    def silent(params: model.Params, tokens: jax.Array, *rest: Any, **more: Any) -> jax.Array:
        first = jax.lax.stop_gradient(params.blocks[0].query)
        blocks = (replace(params.blocks[0], query=first), *params.blocks[1:])
        forgetful = jax.typeof(tokens).sharding.mesh.shape["data"]
        return good(replace(params, blocks=blocks), tokens, *rest, **more) / forgetful

    core = type("Broken", (Grug,), {"reference_attention": wrong, "forward": silent})
    return [check for check, value in gauntlet.check(core).items() if not value["passed"]]


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """Breaks each path of attention in one way: a window or a block of keys that is off by one key, a later key."""
    blocks, visible = attention._blocks, attention.visible

    def shifted(path: Any, by: int) -> Any:
        def call(q: Any, k: Any, v: Any, mask: attention.AttentionMask) -> Any:
            return path(q, k, v, mask if mask.window is None else replace(mask, window=mask.window + by))

        return call

    def short(T: int, mask: attention.AttentionMask) -> list[tuple[int, int, int, int]]:
        return [(first, last, low + (low > 0), high) for first, last, low, high in blocks(T, mask)]

    def later(mask: attention.AttentionMask, first: int, last: int, low: int, high: int) -> jax.Array:
        return visible(mask, first + 1, last + 1, low, high) | visible(mask, first, last, low, high)

    with ExitStack() as stack:
        if fault == "a block's first key":
            stack.enter_context(patch.object(attention, "_blocks", short))
        elif fault == "a later key":
            stack.enter_context(patch.object(attention, "visible", later))
        else:
            by = 1 if fault == "a wide window" else -1
            totals = shifted(attention.blocked_with_totals, by)
            stack.enter_context(patch.object(attention, "blocked_with_totals", totals))
            emulated = {path: shifted(function, by) for path, function in gauntlet.EMULATED.items()}
            stack.enter_context(patch.dict(gauntlet.EMULATED, emulated))
        yield


def noticed(fault: str) -> dict[str, Any]:
    """Deviations over their bounds with a planted fault, in one case of each path that can have it."""
    several = fault == "a narrow window"  # a wide one is the same line of each path
    cases = [gauntlet.CASES[at] for at in ((1, 3, 5) if several else (1,))]
    with planted(fault):
        found = gauntlet.check_attention(Grug, cases)
    return {check: value["value"] for check, value in found.items()}


def edits() -> dict[str, Any]:
    """The changes that the sinks' file makes to core.py: in the resolved recipe, the step, the start and the program;
    and how far a training step with every sink at minus infinity, and at 0, is from the core's."""
    recipes = recipes_of(("grug/core.py", "grug/attention_sink.py"))
    core, sinks = (step_config(recipe, "float32", core_of(recipe)) for recipe in recipes)
    first, second = (recipe.to_json() for recipe in recipes)
    rates = [repr(sorted(cfg.core.rules(cfg.optim, jnp.dtype("float32"), cfg.model.depth))) for cfg in (core, sinks)]
    with jax.set_mesh(gauntlet.single_mesh()):
        start, other = (init_state(0, cfg).params for cfg in (core, sinks))
        programs = [operations(start, core), operations(other, sinks)]
        found: dict[str, Any] = {
            "recipe": sorted(name for name in first if first[name] != second[name]),
            "step": [f.name for f in fields(core) if getattr(core, f.name) != getattr(sinks, f.name)],
            "functions": sorted(
                name for name in Grug.__annotations__ if vars(core.core).get(name) is not vars(sinks.core).get(name)
            ),
            "rules": rates[0] == rates[1],
            "start": all(np.array_equal(a, b) for a, b in zip(leaves(start), leaves(without(other)), strict=True)),
            "removed": dict(programs[0] - programs[1]),
            "added": dict(programs[1] - programs[0]),
        }
        expected = after_a_step(start, core)
        for name, value in (("off", -jnp.inf), ("on", 0.0)):
            blocks = tuple(replace(block, sinks=jnp.full_like(block.sinks, value)) for block in other.blocks)
            got = after_a_step(replace(other, blocks=blocks), sinks)
            found[name] = max(gauntlet.relative(a, b) for a, b in zip(got, expected, strict=True))
    return found


def operations(params: Any, cfg: StepConfig) -> Counter[str]:
    """Counts each operation in the program of the hidden states, inner programs included."""

    def walk(program: Any) -> Iterator[str]:
        for equation in program.eqns:
            inner = [
                x for x in jax.tree.leaves(list(equation.params.values())) if hasattr(x, "eqns") or hasattr(x, "jaxpr")
            ]
            yield from (name for x in inner for name in walk(getattr(x, "jaxpr", x)))
            if not inner:
                yield equation.primitive.name

    traced = jax.make_jaxpr(lambda p, t: cfg.core.forward(p, t, cfg.model))(params, tokens_of(cfg))
    return Counter(walk(traced.jaxpr))


def tokens_of(cfg: StepConfig) -> jax.Array:
    host = gauntlet.random_batch(cfg.model, 0, 1)["tokens"]
    return place(host, P(BATCH, None), gauntlet.single_mesh())


def after_a_step(params: Any, cfg: StepConfig) -> list[np.ndarray]:
    """The loss and the weights, without sinks, after a step from perturbed weights."""
    state = init_state(0, cfg)
    state = replace(state, params=jax.tree.map(lambda p: gauntlet.moved(p) if np.all(np.isfinite(p)) else p, params))
    host = gauntlet.random_batch(cfg.model, 0, 1)
    batch = {name: place(x[None], P(None, BATCH, None), gauntlet.single_mesh()) for name, x in host.items()}
    state, metrics = train_step(state, batch, Multipliers(), cfg)
    return [np.asarray(metrics["loss"]), *leaves(without(state.params))]


def without(params: Any) -> model.Params:
    names = [f.name for f in fields(model.JaxBlock)]
    blocks = tuple(model.JaxBlock(**{name: getattr(block, name) for name in names}) for block in params.blocks)
    return replace(params, blocks=blocks)


def leaves(params: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(params)]


def refused() -> dict[str, str]:
    """The messages of PyTorch's side about a recipe of the twin, and of the twin about PyTorch's."""
    said = {}
    for name, function in (
        ("torch", lambda: load("grug/attention_sink.py").make_model(None)),
        ("model", lambda: core_of(load("document_mask.py"))),
        ("rules", lambda: core_of(load("adamw_everywhere.py"))),
    ):
        try:
            function()
        except ValueError as error:
            said[name] = str(error)
    return said


def load(name: str) -> Resolved:
    return Resolved.of(recipe_in(name))
