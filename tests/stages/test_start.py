"""Resuming: every field in which a recipe differs is named, but for those that only say how training goes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quern.recipe import FOR_FINE_TUNING, Recipe, resolve
from quern.recipes.gpt import RECIPE
from quern.stages.offered import field_names
from quern.stages.start import refuse_other_recipe

HERE: Recipe = resolve(RECIPE)
MAY_CHANGE = {
    f"train.{name}"
    for name in (
        "micro_batch_tokens",
        "log_every",
        "eval_every",
        "save_every",
        "keep",
        "save_in_background",
        "max_skips",
    )
}


def with_other(name: str) -> Recipe:
    part, _, field = name.rpartition(".")
    body: Any = getattr(HERE, part) if part else HERE
    value = getattr(body, field)
    other = replace(body, **{field: f"{value}?" if isinstance(value, str | tuple) or value is None else value + 1})
    return replace(HERE, **{part: other}) if part else other


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "recipe.json").write_text(json.dumps(HERE.to_json()), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("name", list(field_names(HERE)))
def test_each_field_is_named_or_may_change(name: str, folder: Path) -> None:
    refuse_other_recipe(HERE, folder)
    if name in MAY_CHANGE:
        refuse_other_recipe(with_other(name), folder)
        return
    with pytest.raises(ValueError, match=f"it was trained with in {name}; give the same values, or start another run"):
        refuse_other_recipe(with_other(name), folder)


def test_pretraining_goes_on_whatever_will_be_asked_of_fine_tuning(folder: Path) -> None:
    other = replace(HERE, sft=replace(HERE.sft, steps=7, epochs=9.0), conversations="talks.jsonl")
    other = replace(other, text=replace(other.text, tinyworld_conversations=5))
    refuse_other_recipe(other, folder, besides=FOR_FINE_TUNING)
    with pytest.raises(ValueError, match=r"in conversations, sft.epochs, sft.steps, text.tinyworld_conversations;"):
        refuse_other_recipe(other, folder)
