"""Fields that a recipe does not use: what it declares is what its callables do not read, and setting one is refused."""

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quern.flags.recipe_flags import field_names
from quern.model.count import weightless
from quern.recipe import Recipe
from quern.recipes import gpt, llama, llama_adamw, unet
from quern.resolve import fine_tuning_rates, resolve
from quern.runs.run_dir import RunDir
from quern.validate import FILLED_IN
from tests.contracts.idea import idea_files, read

ALL = (gpt.RECIPE, llama.RECIPE, llama_adamw.RECIPE, unet.RECIPE)
RECIPES = pytest.mark.parametrize("recipe", ALL, ids=[recipe.name for recipe in ALL])


def watched(part: Any, read: set[str]) -> Any:
    """An equal object of the same kind that notes which of its fields are read."""
    names = {f.name for f in fields(part)}

    class Watched(type(part)):
        def __getattribute__(self, name: str) -> Any:
            if name in names:
                read.add(name)
            return super().__getattribute__(name)

    made = Watched(**{name: getattr(part, name) for name in names})
    read.clear()
    return made


def not_read(part: Any, use: Callable[[Any], object]) -> set[str]:
    read: set[str] = set()
    use(watched(part, read))
    return {f.name for f in fields(part)} - read


@RECIPES
def test_what_is_declared_is_what_is_not_read(recipe: Recipe) -> None:
    resolved = resolve(replace(recipe, depth=4, model=replace(recipe.model, width=32, context=256, vocab_size=50)))

    def use_shape(shape: Any) -> None:
        model = resolved.make_model(shape)
        model.initialize(0)
        tokens_BT = torch.zeros(1, 256, dtype=torch.int64)
        model.logits(model(tokens_BT, model.context(tokens_BT)))

    silent = not_read(replace(resolved.model, bos=0, bigrams="model.bigrams" not in recipe.unused), use_shape)
    declared = {name.removeprefix("model.") for name in recipe.unused if name.startswith("model.")}
    assert silent - {name.removeprefix("model.") for name in FILLED_IN} == declared
    declared = {name.removeprefix("optim.") for name in recipe.unused if name.startswith("optim.")}
    silent = not_read(resolved.optim, lambda optim: resolved.make_rules(replace(resolved, optim=optim)))
    assert silent - {"batch_exponent"} == declared  # `resolve` alone reads it


def test_the_table_of_bigrams_is_added_to_every_idea_or_refused() -> None:
    """An idea with a table of its own refuses it."""
    refused = list[str]()
    for name in idea_files():
        recipe = replace(read(name), depth=2)
        shapes = (replace(recipe.model, vocab_size=64, bigrams=table) for table in (False, True))
        try:
            plain, more = (weightless(resolve(replace(recipe, model=shape))).state_dict().keys() for shape in shapes)
        except ValueError as error:
            assert str(error).startswith(f"model.bigrams does nothing in the '{name}' recipe: leave it out"), name
            refused.append(name)
        else:
            assert more - plain == {"bigrams.weight", "bigram_scales"}, name
    assert refused == ["bigram", "bigram_early", "engram", "trigram"]


@RECIPES
def test_setting_one_is_refused_by_name_and_defaults_are_not(recipe: Recipe) -> None:
    assert resolve(resolve(recipe)) == resolve(recipe)
    for name in recipe.unused:
        part, _, field = name.partition(".")
        changed = replace(recipe, **{part: replace(getattr(recipe, part), **{field: 0.125})})
        flag = name.replace("_", "-")
        message = f"^{flag} does nothing in the '{recipe.name}' recipe: .* {part}[.]"
        with pytest.raises(ValueError, match=message) as said:
            resolve(changed)
        assert str(said.value).count(flag) == 1


@pytest.mark.parametrize("name", ["", *(one.name for one in ALL), *idea_files()])
def test_a_run_of_it_is_opened_again_although_resolving_and_fine_tuning_set_what_is_unused(
    name: str, tmp_path: Path
) -> None:
    """Also of a recipe (no name) that uses nothing."""
    nothing = replace(gpt.RECIPE, unused=tuple({*field_names(gpt.RECIPE)} - {"unused"}))
    recipe = {"": nothing, **{one.name: one for one in ALL}}.get(name) or read(name)
    resolved = resolve(recipe)
    with pytest.raises(ValueError, match="lr-share must be above 0"):
        fine_tuning_rates(resolved, 0.0, 2**14)
    for saved in (resolved, fine_tuning_rates(resolved, 0.3, 2**14)):
        body = json.loads(json.dumps(saved.to_json()))
        assert RunDir(tmp_path, "a").read_recipe(body, "sft", callables=recipe.callables()) == saved


def test_a_recipe_of_ones_own_says_what_it_uses() -> None:
    own = replace(gpt.RECIPE, name="own", unused=(), model=replace(gpt.RECIPE.model, dropout=0.1))
    assert resolve(own).model.dropout == 0.1
    assert Recipe.from_json(own.to_json()) == own
    with pytest.raises(ValueError, match="^shards does nothing in the 'own' recipe: leave it out$"):
        resolve(replace(own, unused=("shards",), shards=2))
