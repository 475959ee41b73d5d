"""A run's files: messages for damaged ones name the file and the remedy; which fields may change on a resume, and what
a new run takes from the saved recipe."""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quern.flags.recipe_flags import Arguments, field_names
from quern.recipe import FOR_FINE_TUNING, ConversationSource, Recipe, RlRecipe, SftRecipe
from quern.recipes.gpt import RECIPE
from quern.resolve import resolve
from quern.runs.load import load, open_checkpoint
from quern.runs.origin import Origin, compare, find_saved, read_origin, to_continue, with_absolute_paths
from quern.runs.run_dir import RunDir
from quern.runs.run_lock import run_lock
from quern.stages import sft
from quern.stages.session import Session
from quern.text.tokenizer import Tokenizer
from quern.train import checkpoint
from quern.train.manifest import CheckpointError
from quern.validate import data_paths
from tests.support.models import CPU


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    """A run with a tokenizer and run.json."""
    made = RunDir(tmp_path, "r")
    tokenizer = Tokenizer([b"ab", b"cd"])
    tokenizer.save(made.folder / "tokenizer.json")
    made.write("run.json", {"tokenizer": {"fingerprint": tokenizer.fingerprint[:16]}})
    return made


def open_it(run_dir: RunDir) -> None:
    load(run_dir, CPU, lambda line: None)


def save(run_dir: RunDir, recipe: dict) -> Path:
    meta = {"recipe": recipe, "tokenizer": run_dir.tokenizer().fingerprint, "state": {"step": 1}}
    return checkpoint.save(run_dir.checkpoints("pretrain"), 1, {"x": torch.zeros(3)}, meta, keep=1)


def test_a_damaged_tokenizer_says_where_a_copy_may_be(run_dir: RunDir) -> None:
    path = run_dir.folder / "tokenizer.json"
    path.write_text("not JSON", encoding="utf-8")
    where = f"put a copy back as {path}; {run_dir.out}/tokenizers may have one"
    with pytest.raises(ValueError, match=f"The run's model needs it: {where}$"):
        run_dir.tokenizer()


def test_a_missing_run_a_missing_tokenizer_and_an_untrained_run_are_told_apart(run_dir: RunDir) -> None:
    with pytest.raises(FileNotFoundError) as missing:
        RunDir(run_dir.out, "no").tokenizer()
    assert str(missing.value) == f"there is no run 'no' under {run_dir.out}: name one of r"
    path = run_dir.folder / "tokenizer.json"
    path.unlink()
    with pytest.raises(FileNotFoundError) as untrained:
        run_dir.tokenizer()
    assert str(untrained.value) == f"run 'r' has no model yet: `quern run --run r --out {run_dir.out}` makes one"
    with run_lock(run_dir, "quern pretrain"), pytest.raises(FileNotFoundError, match="quern pretrain.*; wait for its"):
        run_dir.require_trained(None)
    run_dir.checkpoints("pretrain").mkdir(parents=True)
    with pytest.raises(FileNotFoundError) as lost:
        run_dir.tokenizer()
    assert f"The run's model needs it: put a copy back as {path}; " in str(lost.value)


def test_a_recipe_of_another_version_names_its_run_and_the_remedy(run_dir: RunDir) -> None:
    body = resolve(RECIPE).to_json()
    told = "recipe of run 'r', stage sft, cannot be read .*unheard_of.*: open it with the version of quern that wrote"
    with pytest.raises(ValueError, match=told):
        run_dir.read_recipe(body | {"train": body["train"] | {"unheard_of": 1}}, "sft")


def test_a_damaged_recipe_is_named(run_dir: RunDir) -> None:
    stage = save(run_dir, resolve(RECIPE).to_json()).parents[1]
    (path := stage / "recipe.json").write_text(json.dumps(resolve(RECIPE).to_json()), encoding="utf-8")
    assert read_origin(stage) is not None
    for body, expected in (
        ('{"train": {"ste', "Unterminated string"),
        ('{"train": {"steps": "many"}}', "Expected .int . null., got .str. - at ...train.steps."),
        ('{"train": {"steps": 0}}', "train.steps must be a whole number between .*, not 0"),
    ):
        path.write_text(body, encoding="utf-8")
        with pytest.raises(ValueError, match=f"^{path} is damaged .{expected}.*: put back a copy of it, or remove it"):
            read_origin(stage)


@pytest.mark.parametrize(
    "use", [open_it, lambda run_dir: sft.run(RECIPE, Session(stage="sft", machine=CPU, run_dir=run_dir))]
)
def test_a_checkpoint_that_cannot_be_used_is_named(run_dir: RunDir, use: Callable[[RunDir], None]) -> None:
    body, folder = resolve(replace(RECIPE, name="own")).to_json(), run_dir.checkpoints("pretrain")
    saved = save(run_dir, body | {"make_model": "mine:Model"})
    kept = "whose file is not kept with it: put back the file that the run was trained with as .*recipe_source.py$"
    with pytest.raises(ValueError, match=kept):
        use(run_dir)
    (saved / "manifest.json").write_text("{}", encoding="utf-8")
    with pytest.raises(CheckpointError) as refused:
        use(run_dir)
    assert str(refused.value).startswith(f"none of the checkpoints under {folder} is good: put back a copy of one")
    assert str(refused.value).endswith(f"and run `quern pretrain --run r --out {run_dir.out}` again")
    run_dir.stage("pretrain").rename(run_dir.stage("grug"))
    with pytest.raises(CheckpointError, match="and run `quern grug train --run r "):
        open_checkpoint(run_dir, "grug", print)


@pytest.mark.parametrize("resume", [(), ("--resume",)])  # also one that was killed before it wrote anything
@pytest.mark.parametrize("verb", ["sft", "rl"])
def test_a_stage_begins_with_what_its_models_recipe_asks(run_dir: RunDir, verb: str, resume: tuple[str, ...]) -> None:
    talks, rl = (ConversationSource("talks.jsonl"),), RlRecipe(rewards=("sums",), steps=7)
    own = replace(RECIPE, conversations=talks, sft=SftRecipe(steps=5), rl=rl, train=replace(RECIPE.train, keep=9))
    save(run_dir, resolve(own).to_json() | {"make_model": "theirs:Model"})  # the stage reads the code
    command = (*resume, "--run", "r", "--out", str(run_dir.out))
    if verb == "rl":
        assert find_saved(verb, Arguments(command), RECIPE, None) is None, "there is no fine-tuned model"
        shutil.copytree(run_dir.stage("pretrain"), run_dir.stage("sft"))
    changed = {"rl": rl} if verb == "rl" else {"conversations": talks, "sft": SftRecipe(steps=5)}
    assert find_saved(verb, Arguments(command), RECIPE, None) == (replace(RECIPE, **changed), None)
    if verb == "sft":
        found = find_saved(verb, Arguments((*command, "--sft.epochs", "3")), RECIPE, None)
        assert found and found[0].sft.steps is None, "they contradict each other"
    with pytest.raises(FileNotFoundError, match="there is no run 'other'"):
        find_saved(verb, Arguments((*command, "--resume", "--run", "other")), RECIPE, None)


def test_a_fine_tuned_model_that_is_damaged_is_not_replaced_by_its_base_model(run_dir: RunDir) -> None:
    save(run_dir, resolve(RECIPE).to_json())
    shutil.copytree(run_dir.stage("pretrain"), run_dir.stage("sft"))
    (run_dir.checkpoints("sft") / "step-00000001" / "manifest.json").write_text("{}", encoding="utf-8")
    with pytest.raises(CheckpointError, match=f"none of the checkpoints under {run_dir.checkpoints('sft')} is good"):
        open_it(run_dir)


# What may change on a resume, and what a new run takes -----------------------------------------------------------


HERE: Recipe = resolve(RECIPE)
MAY_CHANGE = {
    f"train.{name}"
    for name in """micro_batch_tokens log_every eval_every save_every keep max_skips recompute steps
    optimizer_memory warmup_steps warmdown_share final_lr clip_norm""".split()
} | {f"sft.{name}" for name in ("steps", "epochs", "lr_share", "warmdown_share")}
MAY_CHANGE |= {"rl.steps", "rl.lr_share", "rl.warmdown_share"}
BY_CONTENT = ("data", "val", "shards", "conversations", "text.tokenizer", "sft.tests", "rl.rewards", "rl.data")


def changes(other: Recipe, besides: Sequence[str] = (), stage: str = "pretrain") -> list[str]:
    began = Origin("t", recipe=json.loads(json.dumps(HERE.to_json())))
    return compare(began, Origin("t", recipe=other.to_json()), RunDir(Path("out"), "r"), stage, besides)


@pytest.mark.parametrize("name", list(field_names(HERE)))
def test_each_field_is_refused_or_may_change(name: str) -> None:
    """The names of text and conversations are not compared: their content is (test_run_ownership.py)."""
    assert changes(HERE) == []
    part, _, field = name.rpartition(".")
    body: Any = getattr(HERE, part) if part else HERE
    value = getattr(body, field)
    other = replace(body, **{field: f"{value}?" if isinstance(value, str | tuple) or value is None else value + 1})
    other = replace(HERE, **{part: other}) if part else other
    if name in BY_CONTENT:
        assert changes(other) == []
    elif name in MAY_CHANGE or name.startswith("optim."):
        (line,) = changes(other)
        assert line.startswith(f"{name.replace('_', '-')} ") and " → " in line
    else:
        with pytest.raises(ValueError, match=rf"{name.replace('_', '-')} .* → .* would make it another run"):
            changes(other)


@pytest.mark.parametrize(("stage", "may"), [("pretrain", "optim), train.steps"), ("sft", "sft.lr-share), sft.steps")])
def test_a_refusal_names_the_flags_of_the_stage_that_may_change(stage: str, may: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"the rates ({may} and what only says")):
        changes(replace(HERE, seed=HERE.seed + 1), stage=stage)


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
    read_as = replace(base.text, encoding="cp1252", column="body", separator="###", split="validation", vocab_size=700)
    chosen = replace(base, include="*.md", exclude="a*", val="v.txt", text=read_as)
    assert to_continue(chosen, ()).text == read_as
    assert to_continue(chosen, {"data"}).text == replace(base.text, vocab_size=700)
    of_text = [(one.include, one.exclude, one.val) for one in (to_continue(chosen, ()), to_continue(chosen, {"data"}))]
    assert of_text == [("*.md", "a*", "v.txt"), (None, None, None)]


def test_a_pattern_stays_one_in_a_folder_that_looks_like_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a[1]"
    folder.mkdir()
    (folder / "b.txt").write_text("x", encoding="utf-8")
    monkeypatch.chdir(folder)
    made = with_absolute_paths(replace(RECIPE, data="*.txt\nb.txt\nnone.txt", val="hf:a/b"))
    monkeypatch.chdir(tmp_path)
    *files, none = made.data.split("\n")
    assert data_paths("\n".join(files)) == [folder / "b.txt"] * 2 and (none, made.val) == ("none.txt", "hf:a/b")
