"""Checks of the gauntlet and of experiments, run in JAX's process (jax_process.py)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import jax
import pytest

from quern.grug import attention, gauntlet, model
from quern.grug.attention import AttentionMask
from quern.grug.state import Grug
from quern.recipe import Resolved
from quern.stages.jax.train import core_of
from tests.grug.parity import recipe_in


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


def check_a_recipe_of_the_other_library_is_refused() -> None:
    def recipe(name: str) -> Resolved:
        return Resolved.of(recipe_in(name))

    with pytest.raises(ValueError, match="train it with `quern grug train"):
        recipe("grug/attention_sink.py").make_model(None)
    with pytest.raises(ValueError, match="make_model = document_mask:DocumentsGPT, which is PyTorch's"):
        core_of(recipe("document_mask.py"))
    with pytest.raises(ValueError, match="make_rules = adamw_everywhere:rules, which is PyTorch's"):
        core_of(recipe("adamw_everywhere.py"))
