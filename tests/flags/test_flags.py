"""Flags are read as they are documented, each mistake is refused in one line, and the recipe comes back as it was
given. Those of the JAX stages may come from a YAML or JSON file; none of it starts JAX."""

import inspect
import io
import json
import re
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import pytest

from quern.cli.options import PretrainOptions
from quern.field_types import Count
from quern.flags.check_flags import Mark, Spelled, read
from quern.flags.recipe_file import read_object, read_recipe_file
from quern.flags.recipe_flags import Arguments, field_names, parse
from quern.recipe import ConversationSource, Recipe
from quern.recipes import gpt, llama
from quern.recipes.gpt import RECIPE
from quern.stages.jax import command
from quern.terminal import silent


@dataclass
class Inner:
    """An inner part."""

    steps: int | None = None
    rate: float = 0.5
    in_background: bool = False


@dataclass
class Flags:
    folder: Path
    """A text of
    two lines: 100 % of it
    (in one paragraph)."""
    what: Annotated[tuple[Literal["a", "b"], ...], Mark.POSITIONAL] = ()
    inner: Inner = field(default_factory=Inner)
    plain: Annotated[Inner, Mark.FLAT] = field(default_factory=Inner)
    kinds: tuple[Literal["x", "y"], ...] = ()
    stop: Annotated[tuple[str, ...], Mark.REPEATED] = ()
    prompt: Annotated[str | None, Spelled("prompt", "-p")] = None
    rare: Annotated[Count, Mark.RARE] = 3
    """Default: three."""


F = Path("f")


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("--folder f", Flags(F)),
        (
            "a b --folder=f --inner.steps 3 --inner.rate 1e-3 --inner.in-background",
            Flags(F, ("a", "b"), Inner(3, 1e-3, True)),
        ),
        (
            "--folder f --inner.in_background --inner.steps 4e0 --no-in-background",
            Flags(F, inner=Inner(4, in_background=True)),
        ),
        ("--rate -3 --folder f --kinds x y -p hello", Flags(F, plain=Inner(rate=-3), kinds=("x", "y"), prompt="hello")),
        ("--folder f --stop a --stop b", Flags(F, stop=("a", "b"))),
        ("--folder f -p -hello", Flags(F, prompt="-hello")),
        ("--folder f --prompt=--x --rate=-3", Flags(F, plain=Inner(rate=-3), prompt="--x")),
    ],
)
def test_flags_are_read(typed: str, expected: Flags) -> None:
    assert read(Flags, typed.split(), prog="p") == expected


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("", "--folder is missing: see p --help"),
        ("--folder f --inner.steps many", "--inner.steps takes a whole number, not 'many'"),
        ("--folder f --inner.steps inf", "--inner.steps takes a whole number, not 'inf'"),
        ("--folder f --inner.rate", "--inner.rate takes a number: none was given"),
        ("--folder f --kinds --prompt -1", "--kinds takes one of x, y: none was given"),
        ("--folder f -p --hello", "-p takes a value: none was given; one that begins with - follows -p="),
        ("--folder=", "--folder is empty: give a path, or leave it out"),
        ("--folder f --kinds x z", "--kinds takes one of x, y, not 'z'"),
        ("c --folder f", "the argument takes one of a, b, not 'c'"),
        ("--folder f --inner.in-background=1", "--inner.in-background takes no value: give --inner.in-background or "),
        ("--folder f --inner.step 3", "unknown option --inner.step; nearest: --inner.steps"),
        ("--folder f -q", "unknown option -q; all of them: p --help"),
        ("--folder f --rare 0", "--rare must be a whole number between 1 and 1,000,000,000,000, not 0"),
        ("--folder f --kinds x --kinds y", "--kinds is given twice: give all its values after one --kinds"),
    ],
)
def test_a_mistake_is_refused_in_one_line(typed: str, expected: str) -> None:
    with pytest.raises(ValueError) as refused:
        read(Flags, typed.split(), prog="p")
    assert str(refused.value).startswith(expected) and "\n" not in str(refused.value)


@pytest.mark.parametrize("asked", ["--help", "--help-all"])
def test_help_joins_the_lines_of_a_text_and_is_shown_whatever_else_is_wrong(
    asked: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        read(Flags, ["--nope", asked], prog="p", description="Reads.\n\nexample: p a")
    shown = re.sub(" {3,}", "  ", capsys.readouterr().out)
    assert "  --folder PATH  A text of two lines: 100 % of it (in one paragraph).\n" in shown
    assert "usage: p [WHAT …] [FLAGS]\n" in shown and "  --stop TEXT …  (default: none)\n" in shown
    assert "inner: An inner part.\n" in shown and "  --inner.steps INT" in shown and ended.value.code == 0
    assert ("  --rare INT  Default: three.\n" in shown) is (asked == "--help-all")
    assert ("all flags: p --help-all" in shown) is (asked == "--help")


# The recipe's fields --------------------------------------------------------------------------------------------------


@dataclass
class RecipeFlags:
    recipe: Annotated[Recipe, Mark.FLAT]
    speed: int = 1
    """How fast."""


def given(text: str, recipe: Recipe = gpt.RECIPE) -> RecipeFlags:
    return parse(RecipeFlags, recipe, Arguments(text.split()), verb="pretrain")


def test_flags_make_the_recipe_and_nothing_else_of_it_changes() -> None:
    assert given("").recipe == gpt.RECIPE and type(given("").recipe) is Recipe
    found = given("--speed 3 --depth 6 --train.log-every=7 --rl.normalize")
    parts = {"train": replace(gpt.RECIPE.train, log_every=7), "rl": replace(gpt.RECIPE.rl, normalize=True)}
    assert (found.recipe, found.speed) == (replace(gpt.RECIPE, depth=6, **parts), 3)


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


def test_the_help_shows_what_has_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(PretrainOptions, llama.RECIPE, Arguments(("--help-all",)), verb="pretrain")
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--model.dropout" in shown and "--optim.matrix-lr" in shown and "Tokens in a training row" in shown
    assert "--depth INT The one dial" in shown and "(default: 40; follows)" in shown and "(default: unset)" in shown
    with pytest.raises(SystemExit):
        parse(PretrainOptions, gpt.RECIPE, Arguments(("--help-all",)), verb="pretrain")
    assert "(default: True; follows)" in capsys.readouterr().out
    assert not re.search("fixed|make-|softcap|unused|--sft|smear-lr|sft options", shown)


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


def test_a_recipe_file_with_the_name_of_a_module_leaves_the_module_to_others(tmp_path: Path) -> None:
    known, path = sys.modules["random"], tmp_path / "random.py"
    text = "from quern.recipes.gpt import RECIPE\n\ndef build(shape):\n    pass\n"
    path.write_text(f"\ufeff{text}", encoding="utf-8")  # as some editors write it
    recipe, source = read_recipe_file(path)
    assert recipe == gpt.RECIPE and source == text
    assert sys.modules["random"] is known
    own = read_object(path, "build", type(lambda: 0))[0]
    assert inspect.getsource(own) == "def build(shape):\n    pass\n"


# Flags from a file ----------------------------------------------------------------------------------------------------


def told(path: Path, *flags: str) -> command.JaxTrainOptions:
    return command.training(command.with_config(Arguments(["--config", str(path), *flags])), RECIPE)


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
        later = told(path, "--train.steps", "9", "--no-resume")
        assert (later.recipe.train.steps, later.recipe.depth, later.resume) == (9, 3, False)
    assert command.training(Arguments([]), RECIPE).recipe == RECIPE


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("depth: [1", r"run.yaml cannot be read \((.|\n)+\): correct it"),
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
    path = tmp_path / ("run.yaml" if isinstance(body, str) else "run.json")
    path.write_text(body if isinstance(body, str) else json.dumps(body), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        told(path)


def test_flags_override_a_file_field_by_field_and_both_are_named(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    body = {"track": ["tensorboard", "wandb"], "data": ["a.txt", "b.txt"], "text": {"vocab-size": 320}, "depth": 3}
    path.write_text(json.dumps(body), encoding="utf-8")
    given = command.with_config(Arguments(["--config", str(path), "--track", "wandb", "--data=c.txt"]))
    options = command.training(given, RECIPE)
    assert (options.track, options.recipe.data, options.recipe.depth) == (("wandb",), "c.txt", 3)
    assert given.given.keys() == {"config", "track", "data", "text.vocab_size", "depth"}


def test_the_recipe_of_a_file_may_not_set_what_the_twin_ignores() -> None:
    recipe = replace(RECIPE, name="mine", train=replace(RECIPE.train, fp8="all"))
    with pytest.raises(ValueError, match="^train.fp8, which the recipe 'mine' sets, is for `quern pretrain`: the JAX"):
        command.training(Arguments(), recipe)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train --data -", "needs extra packages"),
        ("train --data tinyworld --val own.txt", "--val is for a --data of your own"),
        ("train --val own.txt --resume", "needs extra packages"),  # the run's data are not known yet
        ("export --processes.scheduler", "--processes is for `quern grug eval and import`: leave it out, export runs"),
        ("export --config all.json", "needs extra packages"),
        ("export --config threads.json", "--cpu-devices must be"),
    ],
)
def test_refusals_that_need_no_jax(words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a text")))
    files = {
        "all.json": json.dumps({"depth": 3, "dtype": "bf16", "processes.scheduler": True, "mesh": {"model": 2}}),
        "threads.json": json.dumps({"cpu-devices": 0}),
    }
    for name, text in files.items():
        Path(name).write_text(text, encoding="utf-8")
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises((ImportError, ValueError), match=re.escape(message)):
        command.main(Arguments(words.split()), silent)
    kept = [path.read_text(encoding="utf-8") for path in Path("out/downloads").rglob("*.txt")]
    assert kept == ["a text"] * words.endswith(" -")
