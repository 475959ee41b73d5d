"""A recipe from a YAML or JSON file, the verbs' messages; none of it starts JAX."""

import json
from pathlib import Path

import pytest

from quern.recipes.gpt import RECIPE
from quern.stages import grug


def test_a_file_fills_in_the_recipe(tmp_path: Path) -> None:
    yaml, plain = tmp_path / "run.yaml", tmp_path / "run.json"
    yaml.write_text("depth: 3\ntrain:\n  steps: 7\nmodel: {width: 96}\n", encoding="utf-8")
    plain.write_text(json.dumps({"depth": 3, "train": {"steps": 7}, "model": {"width": 96}}), encoding="utf-8")
    for path in (yaml, plain):
        recipe = grug.with_config(RECIPE, path)
        assert (recipe.depth, recipe.train.steps, recipe.model.width) == (3, 7, 96)
        assert recipe.train.log_every == RECIPE.train.log_every
    assert grug.with_config(RECIPE, None) is RECIPE


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"depht": 3}, "has no field 'depht': use one of"),
        ({"train": {"step": 3}}, "train has no field 'step'"),
        ({"make_model": "os:system"}, "has no field 'make_model'"),
        ([3], "must hold recipe fields"),
    ],
)
def test_what_a_file_may_not_say(tmp_path: Path, body: object, message: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(body), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        grug.with_config(RECIPE, path)


def test_verbs_are_named() -> None:
    said: list[str] = []
    with pytest.raises(SystemExit) as left:
        grug.main([], said.append)
    assert left.value.code == 0
    assert all(verb in said[0] for verb in ("train", "eval", "export", "import", "gauntlet"))
    with pytest.raises(ValueError, match="there is no 'grug trian': use one of train"):
        grug.main(["trian"], said.append)
