"""A run's record: which fields and inputs may change on a resume, and what a new run takes from it."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quern.flags.recipe_flags import field_names
from quern.recipe import FOR_FINE_TUNING, Recipe
from quern.recipes.gpt import RECIPE
from quern.resolve import resolve
from quern.runs.origin import Origin, compare
from quern.runs.run_dir import RunDir
from quern.runs.saved import to_continue

HERE: Recipe = resolve(RECIPE)
MAY_CHANGE = {
    f"train.{name}"
    for name in """micro_batch_tokens log_every eval_every save_every keep max_skips recompute steps
    optimizer_memory warmup_steps warmdown_share final_lr clip_norm""".split()
} | {f"sft.{name}" for name in ("steps", "epochs", "lr_share", "warmdown_share")}
MAY_CHANGE |= {"rl.steps", "rl.lr_share", "rl.warmdown_share"}
BY_CONTENT = ("data", "val", "shards", "conversations", "text.tokenizer", "sft.tests")


def with_other(name: str) -> Recipe:
    part, _, field = name.rpartition(".")
    body: Any = getattr(HERE, part) if part else HERE
    value = getattr(body, field)
    other = replace(body, **{field: f"{value}?" if isinstance(value, str | tuple) or value is None else value + 1})
    return replace(HERE, **{part: other}) if part else other


def changes(other: Recipe, besides: Sequence[str] = ()) -> list[str]:
    began = Origin("t", recipe=json.loads(json.dumps(HERE.to_json())))
    return compare(began, Origin("t", recipe=other.to_json()), RunDir(Path("out"), "r"), "pretrain", besides)


@pytest.mark.parametrize("name", list(field_names(HERE)))
def test_each_field_is_refused_or_may_change(name: str) -> None:
    """What text and conversations are named is not compared: their content is (test_run_ownership.py)."""
    assert changes(HERE) == []
    other = with_other(name)
    if name in BY_CONTENT:
        assert changes(other) == []
    elif name in MAY_CHANGE or name.startswith("optim."):
        (line,) = changes(other)
        assert line.startswith(f"{name.replace('_', '-')} ") and " → " in line
    else:
        with pytest.raises(ValueError, match=rf"{name.replace('_', '-')} .* → .* would make it another run"):
            changes(other)


def test_pretraining_goes_on_whatever_will_be_asked_of_fine_tuning() -> None:
    other = replace(HERE, text=replace(HERE.text, tinyworld_conversations=5))
    assert changes(other, besides=FOR_FINE_TUNING) == []
    with pytest.raises(ValueError, match=r"text.tinyworld-conversations 12000 → 5 would make it another run"):
        changes(other)


def test_a_new_run_derives_again_what_follows_from_the_fields_it_names() -> None:
    base = resolve(replace(RECIPE, train=replace(RECIPE.train, steps=400, batch_tokens=4096)))
    base = replace(base, optim=replace(base.optim, table_decay_scale=7.0))
    same, other_text = resolve(to_continue(base, ())), resolve(to_continue(base, {"data"}))
    assert (same.train.steps, same.train.batch_tokens, same.data_seed) == (400, 4096, 1)
    assert same.optim == base.optim and same.train.warmup_steps == base.train.warmup_steps
    assert other_text.train == same.train and other_text.optim == replace(base.optim, table_decay_scale=None)
    assert resolve(to_continue(base, (), at_peak=True)).train.warmup_steps == 0
    named = {"train.batch_tokens", "train.steps"}
    asked = to_continue(base, named)
    larger = resolve(replace(asked, train=replace(asked.train, steps=100, batch_tokens=16_384)))
    alike = resolve(replace(RECIPE, train=replace(RECIPE.train, steps=100, batch_tokens=16_384)))
    assert larger.optim == alike.optim and larger.train == alike.train
    of_public_set = replace(base, shards=8)
    shards = [to_continue(of_public_set, named).shards for named in ((), ("data",), ("train.steps",))]
    assert shards == [8, None, None]
