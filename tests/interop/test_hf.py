"""Hugging Face's format as someone uses it: a toy Llama there and back; what is refused; nothing by halves.

That the numbers agree with transformers' is a law of its own (tests/laws/test_export_law.py).
"""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quern.cli import main
from quern.interop import export_hf, import_hf
from quern.model.count import parameters
from quern.recipes.llama import RECIPE
from quern.records import read_events
from quern.runs.load import load
from quern.runs.run_dir import RunDir
from quern.terminal import silent
from quern.text.hugging_face import read_tokenizer, tokenizer_json
from quern.text.tokenizer import Tokenizer
from quern.train import checkpoint, manifest
from tests.support.exported import FP32, MODEL_FILES, TOKENIZER_FILES, model_of, toy_recipe, write_run
from tests.support.full_disk import full_disk
from tests.support.toy_engine import toy_tokenizer

pytestmark = pytest.mark.usefixtures("eager")

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
BATCH = ["--train.batch-tokens", "96", "--text.val-megabytes", "0.001"]
PLAIN = ["--no-compile", "--dtype", "fp32", "--threads", "1"]


def command(verb: str, out: Path, *arguments: str) -> None:
    assert main.main([verb, *arguments, "--out", str(out)]) == 0


def export(run_dir: RunDir, folder: Path, log: Callable[[str], None] = silent) -> None:
    export_hf.run(run_dir, folder, stage=None, dtype=torch.float32, log=log)


def imported(folder: Path, run: str = "copy", tokenizer: Path | None = None) -> RunDir:
    run_dir = RunDir(folder.parent, run)
    import_hf.run(folder, run_dir, RECIPE, stage="pretrain", tokenizer=tokenizer, log=silent)
    return run_dir


# There and back ---------------------------------------------------------------------------------------------


def test_a_llama_is_exported_and_comes_back(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the command line, and asked on both sides."""
    out = folder.parent
    command("export", out, "--run", "first", "--to", "hf", "--dir", str(out / "again"))
    assert "step 7 of pretrain" in capsys.readouterr().out
    modes = {path.name: path.stat().st_mode for path in (out / "again").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]
    (out / "text.txt").write_text("The miller grinds the grain.\n", encoding="utf-8")
    monkeypatch.chdir(out)
    command("import", Path(), "again", "--run", "copy", "--stage", "sft", "--data", "text.txt")
    copy = out / "runs" / "copy"
    assert '"data": "' + str(out / "text.txt") in (copy / "sft" / "recipe.json").read_text(encoding="utf-8")
    assert [event["kind"] for event in read_events(copy / "sft")] == ["import"]
    facts = json.loads((copy / "run.json").read_text(encoding="utf-8"))
    one, other = (load(RunDir(out, name), FP32, silent) for name in ("first", "copy"))
    assert facts["command"] == "quern import again --run copy --stage sft --data text.txt --out ."
    assert facts["model"]["parameters"]["total"] == parameters(one.recipe).total
    before, after = one.model.state_dict(), other.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    replies = []
    for name, stage in (("first", "pretrain"), ("copy", "sft")):
        capsys.readouterr()
        command("complete", out, "--run", name, "--stage", stage, "-p", "Who are you?", "--max-tokens", "8", *PLAIN)
        replies.append(capsys.readouterr().out)
    assert replies[0] == replies[1]


def test_an_imported_model_is_scored_in_its_own_words(tmp_path: Path) -> None:
    """Text is split by the tokenizer that came with it, not by one trained for the text."""
    recipe = toy_recipe("llama", context=256)
    export(write_run(tmp_path, recipe), tmp_path / "hf")
    text = tmp_path / "text.txt"
    text.write_text("The miller grinds the grain at dawn, and the stone hums.\n" * 40, encoding="utf-8")
    copy = RunDir(tmp_path, "copy")
    import_hf.run(tmp_path / "hf", copy, replace(RECIPE, data=str(text)), stage="pretrain", tokenizer=None, log=silent)
    command("evaluate", tmp_path, "--run", "copy", "--questions", "1", *PLAIN)
    assert not (tmp_path / "tokenizers").exists()
    scores = [json.loads(line) for line in (copy.folder / "evaluate.jsonl").read_text(encoding="utf-8").splitlines()]
    [score] = [s for s in scores if s["stage"] == "pretrain" and s["task"] == "validation"]
    assert score["value"] > 0


# Export -----------------------------------------------------------------------------------------------------


def test_a_folder_in_use_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, folder = write_run(tmp_path, toy_recipe("llama")), tmp_path / "hf"
    folder.mkdir()
    export(run_dir, folder)  # an empty one is taken
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert before.keys() == MODEL_FILES | TOKENIZER_FILES
    with pytest.raises(ValueError, match="hf is there already: name another folder with --dir, or remove it first"):
        export(run_dir, folder)
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.chdir(run_dir.out / "runs")
    empty, link = Path("empty").absolute(), Path("link")
    link.symlink_to(empty)
    for _ in range(2):  # to no folder, and to an empty one
        export(run_dir, link)
        assert link.is_symlink() and before.keys() == {path.name for path in empty.iterdir()}
        shutil.rmtree(empty)
        empty.mkdir()
    monkeypatch.chdir(empty)
    with pytest.raises(ValueError, match=". is there already: name another folder with --dir"):
        export(RunDir(Path("../.."), run_dir.run), Path())  # the shell would be in a folder that is gone


def test_the_next_export_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    run_dir, left = write_run(tmp_path / "out", toy_recipe("llama")), tmp_path / ".hf.tmp-0123"
    (left / "hf").mkdir(parents=True)
    export(run_dir, tmp_path / "hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out"]


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "out", toy_recipe("llama"))
    with full_disk(1000), pytest.raises(OSError, match=r"cannot write .*/hf \(.*too large.*\): choose another fol"):
        export(run_dir, tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"windows": "SL"}, r"the Llama of other programs has no windows \(SL\): train with --model.windows L"),
        ({"width": 64}, "transformers refuses a width of 64 for 6 heads: set other --model.heads"),
    ],
)
def test_a_llama_that_theirs_cannot_be_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, toy_recipe("llama", **changes))
    with pytest.raises(ValueError, match=message):
        export(run_dir, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_a_tokenizer_of_unknown_meaning_stays_behind(tmp_path: Path) -> None:
    recipe, own = toy_recipe("llama"), Tokenizer(toy_tokenizer().merges, r"\p{L}+|\P{L}+")
    run_dir = write_run(tmp_path, recipe, tokenizer=own)
    said: list[str] = []
    export(run_dir, tmp_path / "hf", said.append)
    assert said[0].startswith("exported without a tokenizer: the tokenizer splits text by a pattern of its own")
    assert {path.name for path in (tmp_path / "hf").iterdir()} == MODEL_FILES
    with pytest.raises(FileNotFoundError, match="give quern's tokenizer.json of this model with --tokenizer"):
        imported(tmp_path / "hf")
    copy = imported(tmp_path / "hf", tokenizer=run_dir.folder / "tokenizer.json")
    assert load(copy, FP32, silent).tokenizer.fingerprint == own.fingerprint


def test_without_the_extra_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"tokenizer.json needs an extra package .*pip install -e '\.\[export\]'"):
        tokenizer_json(toy_tokenizer())


# Import ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported")
    export(write_run(path, toy_recipe("llama")), path / "hf")
    return path


@pytest.fixture
def folder(exported: Path, tmp_path: Path) -> Path:
    return shutil.copytree(exported, tmp_path / "out") / "hf"


def reconfigure(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        config = json.loads(path.read_text(encoding="utf-8")) | changes
        path.write_text(json.dumps({k: v for k, v in config.items() if v != "gone"}), encoding="utf-8")

    return change


def reweigh(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors")

    return apply


def indexed(change: Callable[[Path, dict[str, Any]], Any]) -> Callable[[Path], None]:
    """The weights in two files with an index, which `change` spoils."""

    def apply(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        parts = {f"model-{number}.safetensors": list(weights)[number::2] for number in range(2)}
        for file, names in parts.items():
            save_file({name: weights[name] for name in names}, folder / file)
        index: dict[str, Any] = {"weight_map": {name: file for file, names in parts.items() for name in names}}
        change(folder, index)
        (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")

    return apply


def mapped(weight_map: Any) -> Callable[[Path], None]:
    return indexed(lambda folder, index: index.update(weight_map=weight_map))


def put_twice(folder: Path, index: dict[str, Any]) -> None:
    both = [folder / f"model-{number}.safetensors" for number in range(2)]
    save_file(load_file(both[0]) | load_file(both[1]), both[1])


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def other_words(folder: Path) -> None:
    """Longer tokens among the single bytes: an order of ids that quern does not have."""
    path = folder / "tokenizer.json"
    body = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = body["model"]["vocab"]
    longer = next(token for token, id_ in vocabulary.items() if id_ == 300)
    vocabulary["a"], vocabulary[longer] = vocabulary[longer], vocabulary["a"]
    path.write_text(json.dumps(body), encoding="utf-8")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "config.json: give a folder that holds a Llama in Hugging Face's"),
        (lambda f: (f / "config.json").write_text("{", encoding="utf-8"), "config.json is damaged"),
        (reconfigure(model_type="gpt2"), "hf: it holds a model of type 'gpt2': only llama can be imported"),
        (
            reconfigure(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5}),
            "this kind of Llama cannot be imported: it has rope_parameters.rope_type 'llama3' instead of 'default'",
        ),
        (reconfigure(rope_parameters="gone", rope_scaling={"type": "linear", "factor": 2.0}), "rope_type 'linear'"),
        (mapped(None), f"{INDEX} is damaged .Expected `object`, got `null` - at `..weight_map`"),
        (mapped({"a": "../other.safetensors"}), "Expected the name of a file inside the same folder"),
        (indexed(lambda f, _: (f / "model-1.safetensors").unlink()), "there is no .*model-1.safetensors"),
        (indexed(put_twice), "model-1.safetensors holds lm_head.weight, which another file holds too"),
        (reconfigure(tie_word_embeddings="no"), "at `..tie_word_embeddings`"),
        (reconfigure(partial_rotary_factor=0.5), "it has partial_rotary_factor 0.5 instead of 1.0"),
        (reconfigure(num_hidden_layers="2"), "num_hidden_layers of its .* must be a whole number .*, not '2'"),
        (reconfigure(num_hidden_layers=10**7), "num_hidden_layers of .* between 1 and 1,000"),
        (reconfigure(max_position_embeddings=None), "max_position_embeddings of .*, not None"),
        (reconfigure(num_key_value_heads=4), "hf: model.kv-heads must divide the 6 heads"),
        (reconfigure(mlp_bias=True, hidden_act="gelu"), "hidden_act 'gelu' instead of 'silu', mlp_bias True"),
        (reconfigure(intermediate_size=78), "the weights do not fit the model"),
        (reconfigure(vocab_size=100), "hf: the tokenizer has .* tokens, and the model 100"),
        (reconfigure(num_hidden_layers=1), "these weights are no Llama's: model.layers.1.input_layernorm.weight, .* 6"),
        (reweigh(lambda w: w.pop("model.norm.weight")), "weights are missing: model.norm.weight"),
        (reweigh(lambda w: w.update(surplus=torch.ones(2))), "these weights are no Llama's: surplus"),
        (pickled, "only safetensors are read, as save_pretrained writes them"),
        (reweigh(lambda w: w["model.norm.weight"].fill_(torch.nan)), "model.norm.weight .torch.float32. must hold fin"),
        (reweigh(lambda w: w.update({"model.norm.weight": torch.ones(60).int()})), "torch.int32. must hold finite"),
        (lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-100]), "model.safetensors is damaged"),
        (
            lambda f: (f / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n"),
            "damaged: run `git lfs pull`",
        ),
        (other_words, "tokenizer.json is not a tokenizer that quern can import: its ids must be the single bytes"),
        (
            lambda f: (f / "tokenizer.json").write_text("{}", encoding="utf-8"),
            "is not a tokenizer that quern can import",
        ),
    ],
)
def test_what_cannot_be_imported_leaves_no_run(spoil: Callable[[Path], Any], message: str, folder: Path) -> None:
    spoil(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        imported(folder)
    assert not RunDir(folder.parent, "copy").folder.exists()


def test_an_import_that_cannot_be_written_leaves_no_run(folder: Path) -> None:
    with full_disk(1 << 16), pytest.raises(manifest.CheckpointError, match="cannot write the checkpoint of step 0"):
        imported(folder)
    assert not RunDir(folder.parent, "copy").folder.exists()


def test_a_run_is_not_replaced(folder: Path) -> None:
    with pytest.raises(ValueError, match="there is a run 'first' already: name another one with --run"):
        imported(folder, "first")


def test_the_older_spelling_of_a_configuration_is_read(folder: Path) -> None:
    reconfigure(rope_parameters="gone", rope_theta=777.0, head_dim="gone", num_key_value_heads=2)(folder)
    shape = load(imported(folder), FP32, silent).recipe.model
    assert (shape.rope_base, shape.head_dim) == (777.0, 10)


def test_a_small_vocabulary_comes_back(tmp_path: Path) -> None:
    words = Tokenizer(toy_tokenizer().merges[:9], toy_tokenizer().pattern)
    export(write_run(tmp_path, toy_recipe("llama", vocab_size=words.vocab_size, bos=words.bos), words), tmp_path / "hf")
    copy = load(imported(tmp_path / "hf"), FP32, silent)
    assert copy.tokenizer.fingerprint == words.fingerprint and copy.recipe.model.vocab_size == words.vocab_size < 300


def test_an_imported_run_can_be_fine_tuned_from(folder: Path) -> None:
    """Its checkpoint is a whole one: masters as imported, an optimizer that has not moved."""
    copy = imported(folder)
    shutil.copytree(copy.stage("pretrain"), copy.stage("sft"))
    recipe = json.loads((copy.stage("sft") / "recipe.json").read_text(encoding="utf-8"))
    body = json.dumps(recipe | {"conversations": [{"source": "letters.jsonl"}]})
    (copy.stage("sft") / "recipe.json").write_text(body, encoding="utf-8")
    export(copy, folder.parent / "tuned")
    card = (folder.parent / "tuned" / "README.md").read_text(encoding="utf-8")
    assert "| pretrain | imported from hf |" in card and "| sft | letters.jsonl |" in card
    found = manifest.latest(copy.checkpoints("pretrain"), silent)
    assert found is not None
    tensors, meta = checkpoint.load(found[0])
    assert meta["state"]["step"] == 0
    masters = {name.removeprefix("master."): t for name, t in tensors.items() if name.startswith("master.")}
    expected = model_of(toy_recipe("llama")).state_dict()
    assert masters.keys() == expected.keys() and all(torch.equal(masters[n], expected[n]) for n in masters)
    assert all((t == 0).all() for name, t in tensors.items() if not name.startswith("master."))


def test_training_goes_on_from_a_vocabulary_that_was_filled_up(tmp_path: Path) -> None:
    rows = toy_tokenizer().vocab_size + 6
    export(write_run(tmp_path, toy_recipe("llama", vocab_size=rows)), tmp_path / "hf")
    text = tmp_path / "text.txt"
    text.write_text("The miller grinds the grain at dawn, and the stone hums.\n" * 90, encoding="utf-8")
    copy = RunDir(tmp_path, "copy")
    import_hf.run(tmp_path / "hf", copy, replace(RECIPE, data=str(text)), stage="pretrain", tokenizer=None, log=silent)
    command("pretrain", tmp_path, "--from", "copy", "--run", "next", "--train.steps", "1", *BATCH, *PLAIN)
    command("pretrain", tmp_path, "--resume", "--run", "next", "--train.steps", "2", *BATCH, *PLAIN)
    assert load(RunDir(tmp_path, "next"), FP32, silent).recipe.model.vocab_size == rows


# The tokenizer's file ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("digits", [1, 2, 3])
def test_the_tokenizer_survives_its_other_file(digits: int) -> None:
    pattern = toy_tokenizer().pattern.replace("{1,2}", f"{{1,{digits}}}")
    tokenizer = Tokenizer(toy_tokenizer().merges, pattern)
    body = json.loads(json.dumps(tokenizer_json(tokenizer)))
    assert read_tokenizer(body).fingerprint == tokenizer.fingerprint
    body["model"]["merges"] = [" ".join(pair) for pair in body["model"]["merges"]]  # as older versions write them
    assert read_tokenizer(body).fingerprint == tokenizer.fingerprint
    body["model"]["merges"].reverse()
    with pytest.raises(ValueError, match="would encode differently: its merges cannot be kept"):
        read_tokenizer(body)
