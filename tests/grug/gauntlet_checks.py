"""Checks of the gauntlet and of experiments, run in JAX's process (jax_process.py)."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from quern.grug import attention, gauntlet, model
from quern.grug.attention import AttentionMask
from quern.grug.mesh import BATCH, place
from quern.grug.state import Grug, StepConfig, init_state, step_config, train_step
from quern.optim.schedule import Multipliers
from quern.recipe import Resolved
from quern.stages.jax.train import core_of
from tests.grug.parity import recipe_in, recipes_of


def passes(name: str) -> None:
    """An experiment. Its own attention has one path, so fp32 does for it. One layer has every kind of parameter."""
    core = core_of(recipe_in(f"grug/{name}.py"))
    with patch.object(gauntlet, "TINY", replace(gauntlet.TINY, depth=1)):
        found = gauntlet.check_attention(core, gauntlet.CASES[:1]) | gauntlet.check(core)
    assert len(found) == 7 and all(value["passed"] for value in found.values()), found


def check_the_attention_of_each_platform() -> None:
    """The core's model passes as core.py, whose functions are the same."""
    cases = [case for case in gauntlet.CASES if case[2] == "bfloat16"]
    found = gauntlet.check_attention(Grug, cases)
    assert len(found) == 3 and all(value["passed"] for value in found.values()), found


def check_a_broken_experiment_is_noticed() -> None:
    """In three ways, each of which one check sees."""
    good: Callable[..., jax.Array] = model.forward

    def wrong(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> jax.Array:
        return 1.01 * attention.reference_attention(q, k, v, mask)

    def silent(params: model.Params, tokens: jax.Array, *rest: Any, **more: Any) -> jax.Array:
        first = jax.lax.stop_gradient(params.blocks[0].query)
        blocks = (replace(params.blocks[0], query=first), *params.blocks[1:])
        forgetful = jax.typeof(tokens).sharding.mesh.shape["data"]
        return good(replace(params, blocks=blocks), tokens, *rest, **more) / forgetful

    core = type("Broken", (Grug,), {"reference_attention": wrong, "forward": silent})
    with patch.object(gauntlet, "TINY", replace(gauntlet.TINY, depth=1)):
        failed = [check for check, value in gauntlet.check(core).items() if not value["passed"]]
    for notices in ("fast attention = reference", "parameters without", "devices = 1, loss"):
        assert any(notices in check for check in failed) and len(failed) < 6, failed


def check_a_fault_in_attention_is_far_outside_the_bound() -> None:
    """A window or a block of keys that is off by one key, and a later key."""
    blocks, visible, totals = attention._blocks, attention.visible, attention.blocked_with_totals

    def narrow(q: Any, k: Any, v: Any, mask: AttentionMask) -> Any:
        return totals(q, k, v, mask if mask.window is None else replace(mask, window=mask.window - 1))

    def short(T: int, mask: AttentionMask) -> list[tuple[int, int, int, int]]:
        return [(first, last, low + (low > 0), high) for first, last, low, high in blocks(T, mask)]

    def later(mask: AttentionMask, first: int, last: int, low: int, high: int) -> jax.Array:
        return visible(mask, first + 1, last + 1, low, high) | visible(mask, first, last, low, high)

    def wide(q: Any, k: Any, v: Any, mask: AttentionMask) -> Any:
        wider = mask if mask.window is None else replace(mask, window=mask.window + 1)
        return attention.cudnn_attention(q, k, v, wider, implementation="xla")

    on_cpu, on_gpu = gauntlet.CASES[1], gauntlet.CASES[3]
    for planted, case in (
        (patch.object(attention, "blocked_with_totals", narrow), on_cpu),
        (patch.object(attention, "_blocks", short), on_cpu),
        (patch.object(attention, "visible", later), on_cpu),
        (patch.dict(gauntlet.EMULATED, {attention.cudnn_attention: wide}), on_gpu),
    ):
        with planted:
            (found,) = gauntlet.check_attention(Grug, [case]).values()
        assert found["value"] > 20, (planted, found)


def check_the_sinks_are_the_core_and_their_edit() -> None:
    """In the resolved recipe, the step, the start and the program; and in a training step with every sink at minus
    infinity, and at 0."""
    recipes = recipes_of(("grug/core.py", "grug/attention_sink.py"), depth=1)
    core, sinks = (step_config(recipe, "float32", core_of(recipe)) for recipe in recipes)
    first, second = (recipe.to_json() for recipe in recipes)
    assert sorted(name for name in first if first[name] != second[name]) == ["make_model", "name"]
    assert [f.name for f in fields(core) if getattr(core, f.name) != getattr(sinks, f.name)] == ["core"]
    own = [name for name in Grug.__annotations__ if vars(core.core).get(name) is not vars(sinks.core).get(name)]
    assert sorted(own) == ["attention", "forward", "group_of", "init_parameters", "reference_attention"]
    rates = [repr(sorted(cfg.core.rules(cfg.optim, jnp.dtype("float32"), cfg.model.depth))) for cfg in (core, sinks)]
    assert rates[0] == rates[1]
    with jax.set_mesh(gauntlet.single_mesh()):
        start, other = (init_state(0, cfg).params for cfg in (core, sinks))
        assert all(np.array_equal(a, b) for a, b in zip(leaves(start), leaves(without(other)), strict=True))
        before, after = operations(start, core), operations(other, sinks)
        added = dict(after - before)
        assert before - after == Counter() and added.pop("logistic") == 1  # one gate of a sink in each layer
        assert set(added) <= {"sub", "mul", "broadcast_in_dim", "convert_element_type", "reshape"}
        expected, gaps = after_a_step(start, core), []
        for value in (-jnp.inf, 0.0):
            blocks = tuple(replace(block, sinks=jnp.full_like(block.sinks, value)) for block in other.blocks)
            got = after_a_step(replace(other, blocks=blocks), sinks)
            gaps.append(max(gauntlet.relative(a, b) for a, b in zip(got, expected, strict=True)))
    assert gaps[0] <= 1e-6 and gaps[1] > 1e-3


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

    tokens = place(gauntlet.random_batch(cfg.model, 0, 1)["tokens"], P(BATCH, None), gauntlet.single_mesh())
    traced = jax.make_jaxpr(lambda p, t: cfg.core.forward(p, t, cfg.model))(params, tokens)
    return Counter(walk(traced.jaxpr))


def after_a_step(params: Any, cfg: StepConfig) -> list[np.ndarray]:
    """The loss and the weights, without sinks, after a step from perturbed weights."""
    params = jax.jit(partial(jax.tree.map, gauntlet.moved))(params)
    host = gauntlet.random_batch(cfg.model, 0, 1)
    batch = {name: place(x[None], P(None, BATCH, None), gauntlet.single_mesh()) for name, x in host.items()}
    state, metrics = train_step(replace(init_state(0, cfg), params=params), batch, Multipliers(), cfg)
    return [np.asarray(metrics["loss"]), *leaves(without(state.params))]


def without(params: Any) -> model.Params:
    names = [f.name for f in fields(model.JaxBlock)]
    blocks = tuple(model.JaxBlock(**{name: getattr(block, name) for name in names}) for block in params.blocks)
    return replace(params, blocks=blocks)


def leaves(params: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(params)]


def check_a_recipe_of_the_other_library_is_refused() -> None:
    def recipe(name: str) -> Resolved:
        return Resolved.of(recipe_in(name))

    with pytest.raises(ValueError, match="train it with `quern grug train"):
        recipe("grug/attention_sink.py").make_model(None)
    with pytest.raises(ValueError, match="make_model = document_mask:DocumentsGPT, which is PyTorch's"):
        core_of(recipe("document_mask.py"))
    with pytest.raises(ValueError, match="make_rules = adamw_everywhere:rules, which is PyTorch's"):
        core_of(recipe("adamw_everywhere.py"))
