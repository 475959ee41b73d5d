"""Which fields have a flag, what is said of the others, and that the recipe comes back as it was given."""

import inspect
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import pytest

from quern.cli.options import EvaluateOptions, PretrainOptions
from quern.flags.check_flags import Mark
from quern.flags.recipe_file import read_object, read_recipe_file
from quern.flags.recipe_flags import Arguments, field_names, parse, refuse_idle
from quern.recipe import ConversationSource, Recipe
from quern.recipes import gpt, llama


@dataclass
class Flags:
    recipe: Annotated[Recipe, Mark.FLAT]
    speed: int = 1
    """How fast."""


def given(text: str, recipe: Recipe = gpt.RECIPE) -> Flags:
    return parse(Flags, recipe, Arguments(text.split()), verb="pretrain")


def test_flags_make_the_recipe_and_nothing_else_of_it_changes() -> None:
    assert given("").recipe == gpt.RECIPE and type(given("").recipe) is Recipe
    found = given("--speed 3 --depth 6 --train.log-every=7 --train.save-in-background")
    train = replace(gpt.RECIPE.train, log_every=7, save_in_background=True)
    assert (found.recipe, found.speed) == (replace(gpt.RECIPE, depth=6, train=train), 3)


def test_a_command_line_is_read_once() -> None:
    typed = Arguments(
        "llama own.py --train.log-every=7 --train.log_every 3 --no-compile --data my--text -p "
        "--track tensorboard wandb --run a --run=b --out".split()
    )
    assert typed.recipes == ("llama", "own.py") and not typed.asks_for_help
    assert [*typed.given] == ["train.log_every", "compile", "data", "track", "run", "out"]
    values = {field: typed.value(field) for field in ("train.log_every", "run", "out", "from", "compile")}
    assert values == {"train.log_every": "3", "run": "b", "out": None, "from": None, "compile": None}
    assert typed.repeated(("run", "track", "from")) == "--track tensorboard wandb --run a --run=b".split()
    assert {"train.log_every", "data"} < {*field_names(gpt.RECIPE)}
    assert Arguments(("--data", "my texts/a b.txt")).command("run") == "quern run --data 'my texts/a b.txt'"
    assert not Arguments().recipes and not Arguments().given and Arguments(("-h",)).asks_for_help


def test_a_field_without_a_flag_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="^--seed belongs to the run's recipe and cannot change: leave it out$"):
        parse(EvaluateOptions, gpt.RECIPE, Arguments(("--seed", "3")), verb="evaluate")
    with pytest.raises(ValueError, match=r"^--model.softcap does nothing in the 'llama' recipe: .*model.dropout"):
        given("--model.softcap 15.0", llama.RECIPE)  # its default, but the flag was given


def test_the_help_shows_what_has_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(PretrainOptions, llama.RECIPE, Arguments(("--help-all",)), verb="pretrain")
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--model.dropout" in shown and "--optim.matrix-lr" in shown and "Tokens in a training row" in shown
    assert "--depth INT The one dial" in shown and "(default: 40; follows)" in shown and "(default: unset)" in shown
    assert not any(
        word in shown for word in ("fixed", "make-", "softcap", "unused", "--sft", "smear-lr", "sft options")
    )


def test_conversations_take_several_sources() -> None:
    typed = "--conversations talks.jsonl gsm8k,repeats=4 a,b.json,limit=10 --speed 3"
    found = given(typed)
    sources = (
        ConversationSource("talks.jsonl"),
        ConversationSource("gsm8k", 4.0),
        ConversationSource("a,b.json", 1, 10),
    )
    assert found.recipe.conversations == sources and found.speed == 3
    kept = given("", found.recipe).recipe
    assert kept.conversations == sources, "those of a saved recipe are the default"
    assert given("--conversations=one.jsonl", found.recipe).recipe.conversations == (ConversationSource("one.jsonl"),)
    for wrong, message in (
        ("gsm8k,repeat=4", "--conversations 'gsm8k,repeat=4' sets repeat: give repeats, limit, split, column as NAME"),
        ("x,limit=1.5", "--conversations 'x,limit=1.5': limit must be a whole number, not '1.5'"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            given(f"--conversations talks.jsonl {wrong}")


def test_a_number_of_shards_is_for_public_data_alone(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x", encoding="utf-8")
    for data in ("tinyworld", f"{tmp_path}/*.txt"):
        with pytest.raises(ValueError, match="--shards is the number of files of a public data set"):
            refuse_idle(replace(gpt.RECIPE, data=data, shards=2), (), tokens=False)
    refuse_idle(replace(gpt.RECIPE, data="tinystories", shards=2), (), tokens=False)


def test_a_recipe_file_with_the_name_of_a_module_leaves_the_module_to_others(tmp_path: Path) -> None:
    known, path = sys.modules["random"], tmp_path / "random.py"
    text = "from quern.recipes.gpt import RECIPE\n\ndef build(shape):\n    pass\n"
    path.write_text(f"\ufeff{text}", encoding="utf-8")  # as some editors write it
    recipe, source = read_recipe_file(path)
    assert recipe == gpt.RECIPE and source == f"\ufeff{text}"
    assert sys.modules["random"] is known
    own = read_object(path, "build", type(lambda: 0))[0]
    assert inspect.getsource(own) == "def build(shape):\n    pass\n"
