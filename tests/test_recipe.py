"""Recipes: nothing is lost in JSON, every refused value says what to do, and every number follows from depth."""

import json
import math
from dataclasses import asdict, fields, replace
from typing import Any

import pytest

from quern.model.count import flops_per_token, parameters
from quern.model.gpt import GPT
from quern.recipe import (
    MINIMUM_BATCH_TOKENS,
    REFERENCE_BATCH_TOKENS,
    ModelRecipe,
    OptimRecipe,
    Recipe,
    SftRecipe,
    TextRecipe,
    TrainRecipe,
    batch_rule,
    resolve,
)
from quern.recipes.gpt import RECIPE
from tests.train.toy import toy_recipe

PARTS = {
    "text": TextRecipe,
    "model": ModelRecipe,
    "optim": OptimRecipe,
    "train": TrainRecipe,
    "sft": SftRecipe,
}
BASE = replace(RECIPE, unused=())  # as one that knows every field


def changed(part: str, name: str, value: Any) -> Recipe:
    """The default recipe with one field set; part "" is the recipe itself."""
    if not part:
        return replace(BASE, **{name: value})
    return replace(BASE, **{part: replace(getattr(BASE, part), **{name: value})})


def through_json(recipe: Recipe) -> Recipe:
    return Recipe.from_json(json.loads(json.dumps(recipe.to_json(), allow_nan=False)))


# JSON -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [BASE, resolve(BASE), resolve(replace(BASE, depth=12)), toy_recipe()])
def test_json_round_trip(recipe: Recipe) -> None:
    assert through_json(recipe) == recipe


def test_no_field_is_lost_in_json() -> None:
    for part, kind in PARTS.items():
        for field in fields(kind):
            default = getattr(getattr(BASE, part), field.name)
            value = "dropped?" if isinstance(default, str) else 7
            recipe = changed(part, field.name, value)
            assert recipe != BASE and through_json(recipe) == recipe, f"{part}.{field.name}"
    for name, value in {
        "name": "x",
        "depth": 9,
        "data": "d",
        "val": "v",
        "conversations": "c",
        "seed": 3,
    }.items():
        assert through_json(changed("", name, value)) == changed("", name, value) != BASE


def test_a_recipe_of_another_version_is_refused() -> None:
    body = BASE.to_json()
    with pytest.raises(ValueError, match="written by another version of quern .expected schema 1"):
        Recipe.from_json(body | {"schema": 2})
    with pytest.raises(ValueError, match="not a recipe this version can read: .*unheard_of"):
        Recipe.from_json(body | {"unheard_of": 1})
    with pytest.raises(ValueError, match="not a recipe this version can read: .*unheard_of"):
        Recipe.from_json(body | {"train": body["train"] | {"unheard_of": 1}})
    with pytest.raises(ValueError, match="not a recipe this version can read: 'model'"):
        Recipe.from_json({name: value for name, value in body.items() if name != "model"})


class Custom(GPT):
    """A class that lives outside quern."""


def test_classes_from_outside_come_back_only_when_handed_over() -> None:
    body = replace(BASE, make_model=Custom).to_json()
    assert body["make_model"].endswith(":Custom")
    with pytest.raises(ValueError, match="lives outside quern: hand over the recipe's Python file as well"):
        Recipe.from_json(body)
    assert Recipe.from_json(body, make_model=Custom).make_model is Custom
    custom = replace(BASE, make_model=Custom)
    assert Recipe.from_json(body, **custom.callables()) == custom
    with pytest.raises(ValueError, match="lives outside quern"):
        Recipe.from_json(BASE.to_json() | {"make_model": "os:system"})


# Refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "name", "value", "message"),
    [
        ("", "depth", 0, "depth must be at least 1, not 0"),
        ("", "seed", -1, "seed must not be negative, not -1: use 0 or more"),
        ("text", "digits", 4, "text.digits must be 1, 2 or 3, not 4"),
        ("text", "vocab_size", 299, "text.vocab-size must lie between 300 and 1,048,576, not 299"),
        ("text", "vocab_size", 2**20 + 1, "text.vocab-size must lie between 300 and 1,048,576"),
        (
            "train",
            "packing",
            "bestfit",
            "must be one of best-fit, greedy-crop, greedy-pad, first-fit-decreasing",
        ),
        ("train", "steps", 0, "train.steps must be above 0, not 0"),
        ("train", "minutes", -1.0, "train.minutes must be above 0, not -1.0"),
        ("train", "horizon_ratio", -1.0, "train.horizon-ratio must be above 0, not -1.0"),
        ("train", "batch_tokens", -5, "train.batch-tokens must be above 0, not -5"),
        ("train", "micro_batch_tokens", 0, "train.micro-batch-tokens must be above 0, not 0"),
        ("train", "batch_tokens", 10, "must be a multiple of model.context, .* have 512 tokens: at least 512, not 10"),
        ("train", "batch_tokens", 1100, "since rows have 512 tokens: 1024 or 1536, not 1100"),
        ("sft", "batch_tokens", 700, "sft.batch-tokens must be a multiple of .* 512 tokens: 512 or 1024, not 700"),
        ("train", "micro_batch_tokens", 511, "must hold a row of model.context: at least 512, not 511"),
        ("train", "log_every", 0, "train.log-every must be above 0, not 0"),
        ("train", "eval_every", -3, "train.eval-every must be above 0, not -3"),
        ("train", "save_every", -4, "train.save-every must be above 0, not -4"),
        ("train", "warmup_steps", -3, "train.warmup-steps must not be negative, not -3"),
        ("train", "final_lr", -1.0, "train.final-lr must not be negative, not -1.0"),
        ("train", "fp8", "on", "train.fp8 must be off, head or all, not on"),
        ("train", "keep", 0, "train.keep must be at least 1, not 0"),
        ("train", "warmdown_share", 1.5, "train.warmdown-share must lie between 0 and 1"),
        ("train", "clip_norm", 0.0, "train.clip-norm must be above 0, not 0.0: leave it out for no clipping"),
        ("sft", "steps", -3, "sft.steps must be above 0, not -3"),
        ("sft", "epochs", 0.0, "sft.epochs must be above 0, not 0.0"),
        ("model", "width", -32, "model.width must be above 0, not -32"),
        ("model", "heads", 0, "model.heads must be above 0, not 0"),
        ("model", "head_dim", 0, "model.head-dim must be above 0, not 0"),
        ("sft", "too_long", "split", "sft.too-long must be crop or drop, not split"),
        ("model", "windows", "SLX", "a pattern of S .short. and L .long., such as SSSL, not 'SLX'"),
        ("model", "windows", "", "a pattern of S .short. and L .long., such as SSSL, not ''"),
        ("model", "head_dim", 63, "model.head-dim must be even for rotary embeddings, not 63"),
        ("model", "kv_heads", 3, r"model.kv-heads must divide the 4 heads: one of \[1, 2, 4\], not 3"),
        ("model", "context", 1, "model.context must be at least 2 tokens, not 1"),
        ("model", "softcap", 0.0, "model.softcap must be above 0, not 0.0"),
        ("model", "mlp_width", 0, "model.mlp-width must be above 0, not 0"),
        ("model", "norm_eps", 0.0, "model.norm-eps must be above 0, not 0.0"),
        ("model", "dropout", 1.0, "model.dropout must be at least 0 and below 1, not 1.0"),
    ],
)
def test_refused_values_say_what_to_do(part: str, name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(changed(part, name, value))


# What follows from depth ------------------------------------------------------------------------------------

OPEN = {
    "text.tokenizer",
    "model.bos",
    "model.mlp_width",
    "model.norm_eps",
    "model.dropout",
    "train.minutes",
    "train.clip_norm",
    "sft.steps",
}
"""What stays None: not asked for, or known only once the data is."""


@pytest.mark.parametrize("depth", [1, 2, 4, 7, 8, 12, 26])
def test_resolve_fills_everything_and_changes_nothing_twice(depth: int) -> None:
    recipe = resolve(replace(BASE, depth=depth))
    for part in PARTS:
        empty = {f"{part}.{name}" for name, value in asdict(getattr(recipe, part)).items() if value is None}
        assert empty <= OPEN
    assert resolve(recipe) == recipe


def test_what_is_set_is_kept() -> None:
    for part, kind in PARTS.items():
        for field in fields(kind):
            if getattr(getattr(BASE, part), field.name) is None and field.name != "depth":
                value = {"kv_heads": 2, "vocab_size": 777, "dropout": 0.1}.get(field.name, 1024)
                resolved = resolve(changed(part, field.name, value))
                assert getattr(getattr(resolved, part), field.name) == value, f"{part}.{field.name}"


def test_the_dial_turns_every_number_the_right_way() -> None:
    recipes = [resolve(replace(BASE, depth=depth)) for depth in range(1, 31)]
    growing = {
        "width": [r.model.width for r in recipes],
        "heads × head_dim": [(r.model.heads or 0) * (r.model.head_dim or 0) for r in recipes],
        "vocabulary": [r.model.vocab_size for r in recipes],
        "context": [r.model.context for r in recipes],
        "parameters": [parameters(r).total for r in recipes],
        "FLOPs per token": [flops_per_token(r) for r in recipes],
        "batch": [r.train.batch_tokens for r in recipes],
        "horizon": [(r.train.steps or 0) * (r.train.batch_tokens or 0) for r in recipes],
        "learning rate": [r.optim.lr_scale for r in recipes],
    }
    for name, values in growing.items():
        assert all(a is not None and b is not None and a <= b for a, b in zip(values, values[1:], strict=False)), name
        assert values[0] != values[-1], name
    width_scales = [r.optim.width_scale or 0.0 for r in recipes]
    assert width_scales == sorted(width_scales, reverse=True)
    for recipe in recipes:
        assert recipe.model.width == 64 * recipe.depth
        assert (recipe.model.heads or 0) * (recipe.model.head_dim or 0) <= 64 * recipe.depth
        assert (recipe.train.micro_batch_tokens or 0) <= (recipe.train.batch_tokens or 0)


def test_at_the_reference_point_every_scale_is_one() -> None:
    """Depth 12 at a vocabulary of 32,768 is where the rules were fitted."""
    recipe = resolve(replace(BASE, depth=12))
    assert recipe.train.batch_tokens == REFERENCE_BATCH_TOKENS == 2**19
    assert recipe.optim.lr_scale == 1 and recipe.optim.width_scale == 1
    assert recipe.optim.decay_scale == pytest.approx(1, rel=1e-3)
    assert (recipe.model.width, recipe.model.heads, recipe.model.context) == (768, 6, 2048)


@pytest.mark.parametrize("context", [16, 512, 8192])
def test_the_batch_is_a_power_of_two_that_grows_with_the_horizon(context: int) -> None:
    horizons = [10 ** (exponent / 4) for exponent in range(8, 56)]
    batches = [batch_rule(horizon, context) for horizon in horizons]
    assert batches == sorted(batches)
    assert batches[0] == max(context, MINIMUM_BATCH_TOKENS) and batches[-1] > 2**20
    for horizon, batch in zip(horizons, batches, strict=True):
        assert math.log2(batch).is_integer()
        # Rounded to a power of two, by a factor of sqrt(2) at most, it leaves about 2,000 steps.
        assert batch == batches[0] or horizon / batch >= 2000 / math.sqrt(2) - 1


@pytest.mark.parametrize("context", [48, 1000, 5000])
def test_batches_that_follow_are_whole_rows(context: int) -> None:
    recipe = resolve(changed("model", "context", context))
    assert (recipe.train.batch_tokens or 0) % context == (recipe.sft.batch_tokens or 0) % context == 0
    assert (recipe.train.batch_tokens or 0) > 4096 - context
    assert resolve(recipe) == recipe


def test_steps_and_batch_fix_the_horizon_that_the_rates_follow() -> None:
    recipe = resolve(replace(BASE, train=TrainRecipe(steps=100, batch_tokens=2**17)))
    assert (recipe.train.steps, recipe.train.batch_tokens) == (100, 2**17)
    assert recipe.optim.lr_scale == 0.5  # sqrt(2^17 / 2^19)
    longer = resolve(replace(BASE, train=TrainRecipe(steps=200, batch_tokens=2**17)))
    assert longer.optim.lr_scale == 0.5
    assert recipe.optim.decay_scale == pytest.approx(2 * (longer.optim.decay_scale or 0))
    for name in ("warmup_steps", "eval_every", "save_every"):
        short, long = getattr(recipe.train, name), getattr(longer.train, name)
        assert 1 <= short < long < 100, name
