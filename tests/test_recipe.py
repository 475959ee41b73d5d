"""Recipes: nothing is lost in JSON, every refused value says what to do, and every number follows from depth."""

import json
import math
from dataclasses import asdict, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quern.field_types import annotations_of
from quern.model.count import FlopCounter, parameters
from quern.model.gpt import GPT
from quern.optim.constants import adamw_groups
from quern.recipe import ConversationSource, ModelRecipe, OptimRecipe, Recipe, SftRecipe, TextRecipe, TrainRecipe
from quern.recipes.gpt import RECIPE
from quern.recipes.llama import RECIPE as LLAMA
from quern.recipes.unet import RECIPE as UNET
from quern.resolve import MINIMUM_BATCH_TOKENS, batch_rule, resolve, sft_batch_rule, table_decay_rule
from tests.support.toy_training import toy_recipe

PARTS = {"text": TextRecipe, "model": ModelRecipe, "optim": OptimRecipe, "train": TrainRecipe, "sft": SftRecipe}
BASE = replace(RECIPE, unused=())  # as one that knows every field


def changed(part: str, name: str, value: Any) -> Recipe:
    """The default recipe with one field set; part "" is the recipe itself."""
    if not part:
        return replace(BASE, **{name: value})
    return replace(BASE, **{part: replace(getattr(BASE, part), **{name: value})})


def through_json(recipe: Recipe) -> Recipe:
    return type(recipe).from_json(json.loads(json.dumps(recipe.to_json(), allow_nan=False)))


# JSON -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [BASE, resolve(replace(BASE, depth=12)), toy_recipe(), UNET, resolve(UNET)])
def test_json_round_trip(recipe: Recipe) -> None:
    assert through_json(recipe) == recipe


def test_no_field_is_lost_in_json() -> None:
    for part, kind in PARTS.items():
        for field in fields(kind):
            default = getattr(getattr(BASE, part), field.name)
            kind_name = str(field.type)
            value: Any = "dropped?" if "str" in kind_name else (not default) if "bool" in kind_name else 7
            if get_origin(annotation := annotations_of(kind)[field.name]) is Literal:
                value = get_args(annotation)[-1]
            recipe = changed(part, field.name, value)
            assert recipe != BASE and through_json(recipe) == recipe, f"{part}.{field.name}"
    for name, value in {"name": "x", "depth": 9, "data": "d", "val": "v", "conversations": "c", "seed": 3}.items():
        assert through_json(changed("", name, value)) == changed("", name, value) != BASE


def test_a_recipe_of_another_version_is_refused() -> None:
    body = BASE.to_json()
    with pytest.raises(ValueError, match="written by another version of quern .expected schema 1"):
        Recipe.from_json(body | {"schema": 2})
    with pytest.raises(ValueError, match="not a recipe this version can read: .*unheard_of"):
        Recipe.from_json(body | {"train": body["train"] | {"unheard_of": 1}})
    with pytest.raises(ValueError, match="not a recipe this version can read: 'model'"):
        Recipe.from_json({name: value for name, value in body.items() if name != "model"})


@pytest.mark.parametrize("recipe", [BASE, LLAMA])
def test_a_run_that_is_older_than_a_field_of_the_model_goes_on_as_it_was(recipe: Recipe) -> None:
    body = resolve(recipe).to_json()
    del body["model"]["key_offset"], body["model"]["bigrams"]
    assert not resolve(Recipe.from_json(body)).model.key_offset
    assert not resolve(Recipe.from_json(body)).model.bigrams
    body["model"]["key_offset"] = False
    assert not resolve(Recipe.from_json(body)).model.key_offset


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


@pytest.mark.parametrize("text", ["a,b.jsonl,repeats=0.5,limit=3", "hf:a/b:c@d,limit=9,split=dev,column=chat"])
def test_a_source_of_conversations_as_text(text: str) -> None:
    assert str(ConversationSource.parse(text)) == text
    assert ConversationSource.parse("x,limit=3,repeats=.5") == ConversationSource("x", 0.5, 3)


def test_conversations_in_a_recipe_file() -> None:
    sources = ("gsm8k,repeats=4", ConversationSource("talks.jsonl", limit=9))
    recipe = replace(BASE, conversations=sources)
    assert recipe.conversations == (ConversationSource("gsm8k", 4.0), ConversationSource("talks.jsonl", limit=9))
    assert through_json(recipe) == recipe
    assert BASE.conversations is None and BASE.has_built_in_conversations
    assert BASE.conversation_sources == (ConversationSource("tinyworld"),)


# Refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "name", "value", "message"),
    [
        ("", "conversations", (), "conversations is empty: name a file, a folder or a data set"),
        ("", "conversations", "a,repeats=0", "repeats of a must be a number above 0 and at most 10,000, not 0.0"),
        ("", "conversations", ConversationSource("a", limit=0), "limit of a must be a whole number between 1 and"),
        ("", "conversations", (7,), "conversations holds 7: name sources"),
        ("", "data", "a.txt\n", "data has an empty name among others: leave it out"),
        ("", "depth", 0, "^depth must be a whole number between 1 and 1,000, not 0$"),
        ("train", "packing", "bestfit", "must be one of best-fit, greedy-crop, greedy-pad, first-fit-decreasing"),
        ("train", "batch_tokens", 10, "must be a multiple of model.context, .* have 512 tokens: at least 512, not 10"),
        ("train", "batch_tokens", 1100, "since rows have 512 tokens: 1024 or 1536, not 1100"),
        ("sft", "batch_tokens", 700, "sft.batch-tokens must be a multiple of .* 512 tokens: 512 or 1024, not 700"),
        ("train", "micro_batch_tokens", 511, "must hold a row of model.context: at least 512, not 511"),
        ("train", "warmdown_share", 1.5, "train.warmdown-share must be a number between 0 and 1, not 1.5"),
        (
            "train",
            "clip_norm",
            0.0,
            "must be a number above 0 and .*, not 0.0: give a large one, such as 1e9, for no clipping",
        ),
        ("model", "windows", "SLX", "a pattern of S .short. and L .long., such as SSSL, not 'SLX'"),
        ("model", "head_dim", 63, "model.head-dim must be even for rotary embeddings, not 63"),
        ("model", "kv_heads", 3, r"model.kv-heads must divide the 4 heads: one of \[1, 2, 4\], not 3"),
        ("train", "steps", "many", "train.steps must be a whole number between 1 and 1,000,000,000,000, not 'many'"),
        ("rl", "normalize", "yes", "rl.normalize must be true or false, not 'yes'"),
        ("rl", "rewards", "sums", r"^rl.rewards must be a tuple of texts, such as \('a', 'b'\), not 'sums'$"),
        ("rl", "rewards", None, "rl.rewards must be a tuple of texts"),
        ("rl", "rewards", (7,), "rl.rewards must be a tuple of texts"),
        ("", "unused", "model.softcap", "unused must be a tuple of texts"),
        ("", "unused", ("model.nope",), "unused names 'model.nope', which is no field of a recipe: leave it out"),
        ("", "unused", ("modle.softcap",), "unused names 'modle.softcap', which is no field of a recipe: leave it out"),
        ("", "model", None, "model must be a ModelRecipe"),
        ("model", "windows", 5, "model.windows must be a text, not 5"),
        ("model", "bigram_dropout", 0.5, "model.bigram-dropout leaves out pairs: set model.bigrams too"),
        ("model", "dropout", 1.0, "model.dropout must be a number of at least 0 and below 1, not 1.0"),
    ],
)
def test_refused_values_say_what_to_do(part: str, name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(changed(part, name, value))


def numeric_fields() -> list[tuple[str, str]]:
    """(part, field) of every number of a recipe; part "" is the recipe itself."""
    kinds = {part: get_type_hints(kind) for part, kind in {"": Recipe, **PARTS}.items()}
    found = [(part, name, {hint, *get_args(hint)}) for part, hints in kinds.items() for name, hint in hints.items()]
    return [(part, name) for part, name, types in found if {int, float} & types]


@settings(deadline=None, max_examples=300)
@given(
    st.sampled_from(numeric_fields()),
    st.sampled_from([math.nan, math.inf, -math.inf, -1, 0, 1, 1e30, 2**70, 1e-30]) | st.floats() | st.integers(),
)
def test_a_number_is_refused_by_name_or_can_be_resolved(field: tuple[str, str], value: float) -> None:
    part, name = field
    try:
        resolved = resolve(changed(part, name, value))
    except ValueError as error:
        assert f"{part}.{name}".lstrip(".").replace("_", "-") in str(error)
        return
    for kind in PARTS:
        numbers = [x for x in asdict(getattr(resolved, kind)).values() if isinstance(x, float)]
        assert all(map(math.isfinite, numbers))


# What follows from depth ------------------------------------------------------------------------------------

OPEN = set(
    """text.separator text.tokenizer model.bos model.mlp_width model.norm_eps model.dropout optim.table_decay_scale
 train.minutes train.clip_norm sft.batch_tokens sft.steps sft.tests""".split()
)
"""Fields that stay None: not asked for, or known only once the data is."""


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
                own = {"kv_heads": 2, "vocab_size": 777, "dropout": 0.1, "norm_eps": 0.1, "batch_exponent": 0.4}
                own |= {"key_offset": False, "warmdown_share": 0.5}
                own |= {"separator": "</s>", "tokenizer": "t.json", "tests": "tests/"}
                value = own.get(field.name, 1024)
                resolved = resolve(changed(part, field.name, value))
                assert getattr(getattr(resolved, part), field.name) == value, f"{part}.{field.name}"


def test_the_dial_turns_every_number_the_right_way() -> None:
    recipes = [resolve(replace(BASE, depth=depth)) for depth in (1, 2, 3, 4, 6, 7, 8, 9, 12, 16, 20, 26, 30)]
    growing = {
        "width": [r.model.width for r in recipes],
        "heads × head_dim": [(r.model.heads or 0) * (r.model.head_dim or 0) for r in recipes],
        "vocabulary": [r.model.vocab_size for r in recipes],
        "context": [r.model.context for r in recipes],
        "parameters": [parameters(r).total for r in recipes],
        "FLOPs per token": [FlopCounter(r).per_token() for r in recipes[:9:3]],
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
        head_dim = recipe.model.head_dim or 1
        assert recipe.model.width == (recipe.model.heads or 0) * head_dim  # attention is as wide as the stream
        assert 0 <= (recipe.model.width or 0) - 64 * recipe.depth < head_dim
        assert (recipe.train.micro_batch_tokens or 0) <= (recipe.train.batch_tokens or 0)


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


@pytest.mark.parametrize("replicas", [1, 3, 8])
@pytest.mark.parametrize("context", [48, 1000, 5000])
def test_batches_that_follow_are_whole_rows_and_each_replica_has_one(context: int, replicas: int) -> None:
    recipe = resolve(changed("model", "context", context), replicas)
    for tokens in (recipe.train.batch_tokens or 0, *(sft_batch_rule(recipe, n, replicas) for n in (1, 10**6, 10**9))):
        assert tokens % context == 0 and tokens >= replicas * context and tokens > 4096 - context
    assert resolve(recipe, replicas) == recipe


@pytest.mark.parametrize(
    ("depth", "tokens", "replicas", "steps"),
    [
        (4, 512_000, 1, 250),  # the quickstart: 4,096 tokens, as little as keeps a processor busy
        (12, 300_000_000, 8, 1144),  # web-scale conversations: pretraining's own 2^19 tokens
        (24, 300_000_000, 8, 1144),  # fewer than pretraining's 2^20, which would leave 572
        (12, 60_000, 8, 7),  # no fewer rows than ranks
        (12, 10_000_000_000, 1, 38146),  # pretraining's batch, not a larger one
    ],
)
def test_fine_tunings_batch_leaves_steps_enough(depth: int, tokens: int, replicas: int, steps: int) -> None:
    recipe = resolve(replace(BASE, depth=depth), replicas)
    assert int(recipe.sft.epochs * tokens / sft_batch_rule(recipe, tokens, replicas)) == steps


def test_a_batch_that_was_asked_for_holds_a_row_for_each_replica() -> None:
    assert resolve(changed("train", "batch_tokens", 1024), 2).train.batch_tokens == 1024
    for part in ("train", "sft"):
        message = f"{part}.batch-tokens must hold a row of 512 tokens for each of 3 replicas: at least 1536, not 1024"
        with pytest.raises(ValueError, match=message):
            resolve(changed(part, "batch_tokens", 1024), 3)


def test_steps_and_batch_fix_the_horizon_that_the_rates_follow() -> None:
    recipe = resolve(replace(BASE, train=TrainRecipe(steps=100, batch_tokens=2**17)))
    assert (recipe.train.steps, recipe.train.batch_tokens) == (100, 2**17)
    assert recipe.optim.lr_scale == pytest.approx(2 ** (-2 / 3))  # the cube root of 2^17 / 2^19
    longer = resolve(replace(BASE, train=TrainRecipe(steps=200, batch_tokens=2**17)))
    assert longer.optim.lr_scale == recipe.optim.lr_scale
    assert recipe.optim.decay_scale == pytest.approx(2 * (longer.optim.decay_scale or 0))
    assert recipe.optim.table_decay_scale is None, "the text is not known yet"
    for name in ("warmup_steps", "eval_every", "save_every"):
        short, long = getattr(recipe.train, name), getattr(longer.train, name)
        assert 1 <= short < long < 100, name


def test_the_tables_decay_more_the_more_often_a_text_is_read() -> None:
    short = resolve(replace(BASE, train=TrainRecipe(steps=100, batch_tokens=2**12)))
    full = short.optim.decay_scale or 0
    assert full > 100
    scales = {readings: table_decay_rule(short, round(100 * 2**12 / readings)) for readings in (0.5, 1, 2, 4, 5, 40)}
    assert scales == pytest.approx({0.5: 1, 1: 1, 2: full / 4, 4: 0.75 * full, 5: full, 40: full}, rel=1e-3)
    long = resolve(replace(BASE, train=TrainRecipe(steps=10**6, batch_tokens=2**19)))
    assert table_decay_rule(long, 1) == 1, "never below the decay of a text that is read once"


def test_from_depth_8_on_batch_head_and_tables_follow_nanochat() -> None:
    length = TrainRecipe(steps=100, batch_tokens=2**13)  # a 64th of the reference
    small, large = (resolve(replace(BASE, depth=depth, train=length)) for depth in (7, 8))
    assert (small.optim.lr_scale, large.optim.lr_scale) == (pytest.approx(1 / 4), pytest.approx(1 / 8))
    head = {r.depth: adamw_groups(r.optim, r.depth)["head"].lr / r.optim.width_scale / 0.008 for r in (small, large)}
    assert head == {7: pytest.approx(1 / 2), 8: pytest.approx(1 / 8)}
    assert table_decay_rule(small, 1) > 1 == table_decay_rule(large, 1)
    asked = resolve(replace(BASE, depth=8, train=length, optim=OptimRecipe(batch_exponent=1 / 3)))
    assert asked.optim.lr_scale == pytest.approx(1 / 4)
