"""How the Llama starts, trains and is counted. What it computes: tests/laws/test_export_law.py."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from quern.model.context import CausalContext
from quern.model.count import FlopCounter, parameters
from quern.model.llama import INIT_STD, Llama, RMSNorm, mlp_width
from quern.optim.groups import make_groups
from quern.optim.schedule import Multipliers
from quern.recipe import ModelRecipe, Resolved, ResolvedModel
from quern.recipes.llama import RECIPE
from quern.resolve import resolve
from quern.train.state import TrainState, build_model, build_state
from quern.train.step import train_step
from tests.support.models import initialised, randomized, tokens
from tests.support.toy_training import CONTEXT, CPU, VOCABULARY, toy_loader

pytestmark = pytest.mark.usefixtures("eager")

SHAPE = ResolvedModel(
    depth=3, width=30, head_dim=6, heads=4, kv_heads=2, context=24, vocab_size=53, windows="L", rope_base=100_000.0
)


def test_the_norm_is_taken_in_fp32() -> None:
    """Squares of numbers like these overflow half precision."""
    norm = RMSNorm(16, 1e-5).to(torch.float16)
    torch.nn.init.constant_(norm.weight, 2.0)
    assert torch.equal(norm(torch.full((1, 1, 16), 60_000.0, dtype=torch.float16)), torch.full((1, 1, 16), 2.0).half())


# Dropout ----------------------------------------------------------------------------------------------------


def test_dropout_is_off_by_default_and_in_evaluation() -> None:
    ids = tokens()
    plain, dropping = (randomized(Llama(replace(SHAPE, dropout=share))) for share in (0.0, 0.3))
    expected = plain(ids, CausalContext())
    assert torch.equal(plain.train()(ids, CausalContext()), expected)
    assert torch.equal(dropping(ids, CausalContext()), expected)
    torch.manual_seed(0)
    one = dropping.train()(ids, CausalContext())
    other = dropping(ids, CausalContext())
    torch.manual_seed(0)
    assert not torch.equal(one, expected) and not torch.equal(one, other)
    assert torch.equal(dropping(ids, CausalContext()), one)


# How it starts and trains -----------------------------------------------------------------------------------


def test_initial_spread_of_every_matrix() -> None:
    shape = resolve(replace(RECIPE, depth=4)).model
    for name, value in initialised(Llama(shape), 0).state_dict().items():
        if "norm" in name:
            assert (value == 1).all(), name
        else:
            small = name.endswith(("attention.out.weight", "mlp.down.weight"))
            assert value.std().item() == pytest.approx(INIT_STD / math.sqrt(8) if small else INIT_STD, rel=0.02), name


def toy_llama(**changes: Any) -> Resolved:
    shape = {"width": 32, "head_dim": 16, "kv_heads": 1, "context": CONTEXT, "vocab_size": VOCABULARY, "windows": "L"}
    return Resolved.of(resolve(replace(RECIPE, depth=2, model=ModelRecipe(**(shape | changes)))))


def toy_state(recipe: Resolved) -> TrainState:
    return build_state(recipe, CPU, build_model(recipe, CPU, recipe.seed))


def test_every_parameter_receives_a_gradient_and_moves_and_the_loss_falls() -> None:
    state, loader = toy_state(toy_llama(dropout=0.1)), toy_loader()
    before = {name: p.detach().clone() for name, p in state.model.named_parameters()}
    result = train_step(state, loader.batch(0), Multipliers(), CPU, micro_batch_rows=3)
    silent = [n for n, p in state.model.named_parameters() if p.grad is None or p.grad.count_nonzero() == 0]
    assert result.verdict == "step" and silent == []
    assert [n for n, p in state.model.named_parameters() if torch.equal(p, before[n])] == []
    for _ in range(5):
        again = train_step(state, loader.batch(0), Multipliers(), CPU, micro_batch_rows=3)
    assert again.loss < 0.97 * result.loss


def test_everything_has_a_rule_and_norms_do_not_decay() -> None:
    recipe = toy_llama()
    model = Llama(recipe.model)
    found = make_groups(model.parameter_groups(), recipe.make_rules(recipe), model.named_parameters())
    groups = {group.name: group for group in found}
    assert groups.keys() == {"matrices", "head", "embedding", "norms"}
    norms = groups["norms"]
    assert len(norms.parameters) == 5 and not norms.rule.stacked
    assert norms.rule.weight_decay == 0  # type: ignore[attr-defined]


# What it costs ----------------------------------------------------------------------------------------------


def test_counts_are_those_of_the_formula() -> None:
    """Twelve squares of the width in a block, as in a plain transformer, and no window shortens attention."""
    recipe = resolve(replace(RECIPE, depth=12))
    counted, width = parameters(recipe), 768
    assert mlp_width(recipe.model) == 2048
    assert counted.transformer == 12 * 12 * width**2
    assert counted.scalars == 25 * width and counted.value_embeddings == 0
    assert counted.total == counted.kaplan + 32_768 * width + 25 * width
    assert FlopCounter(recipe).per_token() == 6 * counted.kaplan + 12 * 12 * width * 2049 / 2
