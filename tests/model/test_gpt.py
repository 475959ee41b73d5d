"""What the model may see and how it starts. What it computes: tests/laws/test_export_code_law.py."""

import math
from dataclasses import replace

import pytest
import torch

from quern.model.base import loss_sum
from quern.model.context import CausalContext
from quern.model.gpt import GPT
from quern.recipe import ResolvedModel
from quern.recipes.gpt import RECIPE
from quern.resolve import resolve
from tests.support.models import initialised, randomized, tokens

pytestmark = pytest.mark.usefixtures("eager")

SHAPE = ResolvedModel(
    depth=3, width=32, head_dim=8, heads=4, kv_heads=2, context=24, vocab_size=53, rope_base=100_000.0
)


# What it may see --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("windows", [[None] * 3, [3] * 3, [1, 5, 2]])
def test_a_token_reaches_exactly_as_far_as_the_windows_allow(windows: list[int | None]) -> None:
    """Nothing before it changes in a single bit, nor does anything past the windows; all in between does."""
    model, ids = randomized(GPT(SHAPE)), tokens()
    model.windows = windows
    at = 7
    other = ids.clone()
    other[:, at] = (ids[:, at] + 1) % 53
    before, after = (model(x, CausalContext()) for x in (ids, other))
    # Each layer carries window - 1 tokens further; the smear, before them all, carries one.
    reach = 24 if windows[0] is None else at + 1 + sum(w - 1 for w in windows if w)
    changed = [t for t in range(24) if not torch.equal(before[:, t], after[:, t])]
    assert changed == list(range(at, min(24, reach + 1)))


def test_window_pattern_ends_long_and_a_short_one_is_a_quarter() -> None:
    shape = replace(SHAPE, depth=6, context=24, windows="SSSL")
    assert GPT(shape).windows == [6, 6, 6, None, 6, None]
    assert GPT(replace(shape, windows="L")).windows == [None] * 6
    assert GPT(replace(shape, windows="S", depth=2, context=3)).windows == [1, None]


# How it starts ----------------------------------------------------------------------------------------------


def test_initial_spread_of_every_matrix() -> None:
    width = 256
    recipe = resolve(replace(RECIPE, depth=4, model=replace(RECIPE.model, width=width)))
    weights = initialised(GPT(recipe.model), 0).state_dict()
    std = {
        "embedding": 0.8,
        "head": 0.001,
        "query": width**-0.5,
        "key": width**-0.5,
        "value": width**-0.5,
        "up": 0.4 * width**-0.5,
        "out": 0.0,
        "down": 0.0,
        "value_embeddings": width**-0.5,
    }
    for name, value in weights.items():
        part = name.split(".")[0] if not name.startswith("blocks") else name.split(".")[-2]
        if part in std:
            assert value.std().item() == pytest.approx(std[part], rel=0.02), name
            assert abs(value.mean().item()) <= 0.02 * std[part], name
        elif part in ("value_gate", "smear_gate"):
            assert value.min() >= 0 and value.max() <= 0.02 and value.std() > 0, name
    assert weights["smear_scale"] == 0 and weights["backout_scale"] == pytest.approx(0.2)
    assert weights["residual_scales"].tolist() == pytest.approx([1.15, 1.15 - 0.1 / 3, 1.15 - 0.2 / 3, 1.05])
    assert weights["x0_scales"].tolist() == pytest.approx([0.2, 0.15, 0.1, 0.05])


def test_the_first_loss_is_that_of_a_uniform_guess() -> None:
    vocabulary = 8192
    model = initialised(GPT(replace(SHAPE, vocab_size=vocabulary)), 0)
    ids = tokens(V=vocabulary)
    total, losses = loss_sum(model, ids, ids.roll(-1, 1), torch.full(ids.shape, 1 / ids.numel()))
    assert total.item() == pytest.approx(math.log(vocabulary), abs=2e-3)
    assert (losses - math.log(vocabulary)).abs().max() < 0.1
