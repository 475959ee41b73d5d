"""Flags from a YAML or JSON file, the verbs' messages; none of it starts JAX."""

import json
from pathlib import Path

import pytest

from quern.flags.recipe_flags import Arguments
from quern.recipes.gpt import RECIPE
from quern.stages.jax import command


def told(path: Path) -> command.JaxTrainOptions:
    return command.training(Arguments(["--config", str(path)]), RECIPE)


def test_a_file_fills_in_the_flags(tmp_path: Path) -> None:
    yaml, plain = tmp_path / "run.yaml", tmp_path / "run.json"
    body = {
        "depth": 3, "train": {"steps": 7}, "model": {"width": 96}, "run": "named", "resume": True,
        "mesh": {"model": 2}, "track": ["tensorboard"], "val": None,
    }  # fmt: skip
    yaml.write_text(
        "depth: 3\ntrain:\n  steps: 7\nmodel: {width: 96}\nrun: named\nresume: true\nmesh: {model: 2}\n"
        "track: [tensorboard]\nval:\n",
        encoding="utf-8",
    )
    plain.write_text(json.dumps(body), encoding="utf-8")
    for path in (yaml, plain):
        options = told(path)
        recipe, where = options.recipe, options.where
        assert (recipe.depth, recipe.train.steps, recipe.model.width) == (3, 7, 96)
        assert recipe.train.log_every == RECIPE.train.log_every and recipe.make_model is RECIPE.make_model
        assert (where.run, where.mesh.model, options.resume, options.track) == ("named", 2, True, ("tensorboard",))
        later = command.training(Arguments(["--train.steps", "9", "--config", str(path), "--no-resume"]), RECIPE)
        assert (later.recipe.train.steps, later.recipe.depth, later.resume) == (9, 3, False)
    assert command.training(Arguments([]), RECIPE).recipe == RECIPE


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"depht": 3}, r"unknown option --depht; nearest: --depth; .*with the fields of .*run\.json"),
        ({"train": 3}, "unknown option --train"),
        ({"make_model": "os:system"}, "unknown option --make-model"),
        ({"resume": "no"}, "--resume takes no value: give --resume or --no-resume"),
        ({"train": {"minutes": 5}}, "--train.minutes is for `quern pretrain`"),
        ({"model": {"dropout": 0.1}}, "--model.dropout does nothing"),
        ([3], "must hold recipe fields"),
    ],
)
def test_what_a_file_may_not_say(tmp_path: Path, body: object, message: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(body), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        told(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"depth: [1")
    with pytest.raises(ValueError, match=r"a.yaml cannot be read \((.|\n)+\): correct it"):
        told(tmp_path / "a.yaml")


def test_verbs_are_named() -> None:
    said: list[str] = []
    with pytest.raises(SystemExit) as left:
        command.main(Arguments(), said.append)
    assert left.value.code == 0
    assert all(verb in said[0] for verb in ("train", "eval", "export", "import", "gauntlet"))
    with pytest.raises(ValueError, match="there is no 'grug trian'; nearest: train; all of them: quern grug"):
        command.main(Arguments(["trian"]), said.append)
