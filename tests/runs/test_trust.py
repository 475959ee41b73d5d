"""A run folder from elsewhere is code: no command executes it unasked, wherever the folder comes from."""

import json
import py_compile
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from quern.field_types import CONSTRUCTORS
from quern.flags.recipe_file import read_recipe_file
from quern.recipe import Recipe, RlRecipe
from quern.recipes import load_recipe, recipe_names
from quern.runs.origin import Origin, source_digest
from quern.runs.run_dir import RunDir, require_trusted, trust
from quern.text.tokenizer import Tokenizer
from tests.support.command import Told
from tests.support.exported import toy_recipe, write_run

SOURCE = """
from dataclasses import replace
from pathlib import Path
from quern.model.llama import Llama
from quern.recipes.llama import RECIPE as BASE

Path({ran!r}).touch()

class Own(Llama):
    pass

RECIPE = replace(BASE, name="own", make_model=Own)
"""
PLAIN = "--device cpu --dtype fp32 --threads 1 --no-compile".split()
CHAT = ["-p", "Hi", "--max-tokens", "2", *PLAIN]
VERBS = {
    **dict.fromkeys(("chat", "complete"), CHAT),
    "serve": ["--port", "0", *PLAIN],
    "evaluate": ["--questions", "1", *PLAIN],
    "export --to hf": ["--dir", "exported"],
    "export --to gguf": ["--dir", "exported.gguf"],
    **dict.fromkeys(("pretrain --resume", "run", "sft"), PLAIN),
    **dict.fromkeys(("pretrain --from first", "sft --from first"), ["--run", "next", *PLAIN]),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An output folder that another user trained in, and the file that its code creates."""
    folder = tmp_path_factory.mktemp("theirs")
    made, ran, path = folder / "made", folder / "ran", folder / "own.py"
    path.write_text(SOURCE.format(ran=str(ran)), encoding="utf-8")
    recipe, source = read_recipe_file(path)
    stage = write_run(made, replace(toy_recipe("llama"), make_model=recipe.make_model)).stage("pretrain")
    own = replace(toy_recipe("llama"), make_model=recipe.make_model).to_json()
    origin = Origin(Tokenizer.load(stage.parent / "tokenizer.json").fingerprint, source=source_digest(source))
    for name, text in {"recipe.json": own, "origin.json": origin.to_json()}.items():
        (stage / name).write_text(json.dumps(text), encoding="utf-8")
    (stage / "recipe_source.py").write_text(source, encoding="utf-8")
    trust(made, source_digest(source))
    require_trusted(made, stage / "recipe_source.py")
    return made, ran


@pytest.fixture
def theirs(made: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    """The folder copied here whole, and the file that its code creates."""
    shutil.copytree(made[0], tmp_path / "here")
    made[1].unlink(missing_ok=True)
    return tmp_path / "here", made[1]


@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_executes_the_code_of_a_run_from_elsewhere(
    theirs: tuple[Path, Path], verb: str, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, ran = theirs
    monkeypatch.chdir(out)
    said = told(*verb.split(), *VERBS[verb], "--out", out, code=1)
    assert "recipe_source.py is Python code that was not run under" in said and "--trust-code" in said, said
    assert not ran.exists()


def test_a_run_whose_code_is_allowed_once_goes_on(theirs: tuple[Path, Path], told: Told) -> None:
    out, ran = theirs
    chat = ["chat", *CHAT, "--out", out]
    told(*chat, "--trust-code")
    assert ran.exists()
    told(*chat)
    kept = out / "runs/first/pretrain/recipe_source.py"
    kept.write_text(kept.read_text(encoding="utf-8") + "# changed\n", encoding="utf-8")
    put_back = f"was changed after training: put back the file that the run was trained with as {kept}"
    assert put_back in told(*chat, code=1)


def test_a_file_that_no_callable_needs_is_not_carried_on_unread(theirs: tuple[Path, Path], told: Told) -> None:
    """Preparation in a child process executes the recipe's file also where the recipe names quern's own functions."""
    out, ran = theirs
    stage = out / "runs/first/pretrain"
    (stage / "recipe.json").write_text(json.dumps(toy_recipe("llama").to_json()), encoding="utf-8")
    assert "--trust-code" in told("pretrain", "--resume", *PLAIN, "--out", out, code=1) and not ran.exists()


def test_bytecode_beside_the_file_is_not_executed(theirs: tuple[Path, Path], told: Told) -> None:
    out, ran = theirs
    kept, other = out / "runs/first/pretrain/recipe_source.py", out / "other.py"
    steal = f"open({str(out / 'stolen')!r}, 'w').close()\n"
    other.write_text(steal + kept.read_text(encoding="utf-8"), encoding="utf-8")
    cached = kept.parent / "__pycache__" / Path(py_compile.compile(str(other)) or "").name.replace("other", kept.stem)
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(other), str(cached), invalidation_mode=mode)
    trust(out, source_digest(kept.read_text(encoding="utf-8")))
    told("chat", *CHAT, "--out", out)
    assert ran.exists() and not (out / "stolen").exists()


@pytest.mark.parametrize("resumed", [False, True])
def test_rewards_that_a_saved_recipe_names_are_code_too(tmp_path: Path, resumed: bool, told: Told) -> None:
    """The recipe of the fine-tuned model, or that of the stage itself."""
    ran, evil, out = tmp_path / "ran", tmp_path / "rewards.py", tmp_path / "out"
    evil.write_text(f"open({str(ran)!r}, 'w').close()\n", encoding="utf-8")
    recipe = replace(toy_recipe("llama"), rl=RlRecipe(rewards=(str(evil),)))
    stage = write_run(out, recipe).stage("pretrain")
    (stage / "recipe.json").write_text(json.dumps(recipe.to_json()), encoding="utf-8")
    stage = stage.rename(stage.with_name("sft"))
    if resumed:
        shutil.copytree(stage, stage.with_name("rl"))
    rl = ["rl", *["--resume"] * resumed, *PLAIN, "--out", out]
    assert "rewards.py is Python code that was not run" in told(*rl, code=1) and not ran.exists()
    assert "does not end in ENVIRONMENT" in told(*rl, "--trust-code", code=1) and ran.exists()


def test_a_saved_recipe_names_only_what_recipes_are_made_of(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "out", "first")
    for name in ("quern.cli.main:os.system", "quern.cli.main:main", "quern.temporaries:sha256_of"):
        with pytest.raises(ValueError, match="has a recipe of its own"):
            run_dir.read_recipe(toy_recipe("llama").to_json() | {"make_model": name}, "pretrain")
        with pytest.raises(ValueError, match="lives outside quern"):
            Recipe.from_json(toy_recipe("llama").to_json() | {"make_model": name})
    named = [value for name in recipe_names() for value in load_recipe(name)[0].to_json().values()]
    assert {value for value in named if isinstance(value, str) and ":" in value} == CONSTRUCTORS
