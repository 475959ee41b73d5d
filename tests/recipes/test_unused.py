"""Fields that a recipe does not use: what it declares is what its callables do not read, and setting one is refused."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from quern.recipe import Recipe
from quern.recipes import gpt, llama, llama_adamw, unet
from quern.resolve import resolve
from quern.validate import FILLED_IN

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

    silent = not_read(replace(resolved.model, bos=0), use_shape)
    declared = {name.removeprefix("model.") for name in recipe.unused if name.startswith("model.")}
    assert silent - {name.removeprefix("model.") for name in FILLED_IN} == declared
    declared = {name.removeprefix("optim.") for name in recipe.unused if name.startswith("optim.")}
    silent = not_read(resolved.optim, lambda optim: resolved.make_rules(replace(resolved, optim=optim)))
    assert silent - {"batch_exponent"} == declared  # `resolve` alone reads it


@RECIPES
def test_setting_one_is_refused_by_name_and_defaults_are_not(recipe: Recipe) -> None:
    assert resolve(resolve(recipe)) == resolve(recipe)
    for name in recipe.unused:
        part, _, field = name.partition(".")
        changed = replace(recipe, **{part: replace(getattr(recipe, part), **{field: 0.125})})
        flag = name.replace("_", "-")
        with pytest.raises(
            ValueError, match=f"^{flag} does nothing in the '{recipe.name}' recipe: .* {part}[.]"
        ) as said:
            resolve(changed)
        assert str(said.value).count(flag) == 1


def test_a_recipe_of_ones_own_says_what_it_uses() -> None:
    own = replace(gpt.RECIPE, name="own", unused=(), model=replace(gpt.RECIPE.model, dropout=0.1))
    assert resolve(own).model.dropout == 0.1
    assert Recipe.from_json(own.to_json()) == own
