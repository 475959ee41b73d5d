"""Export and import as someone uses them: a toy Llama the whole way and back; what is refused; nothing by halves.

That the numbers agree with another implementation is a law of its own (tests/laws/test_export_law.py).
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quern.cli import main
from quern.interop import export_hf, import_hf
from quern.model.count import parameters
from quern.recipes.llama import RECIPE
from quern.records import read_events, read_metrics
from quern.runs.load import load
from quern.runs.run_dir import RunDir
from quern.terminal import silent
from quern.text.hugging_face import read_tokenizer, tokenizer_json
from quern.text.tokenizer import Tokenizer
from quern.train import manifest
from tests.support.full_disk import full_disk
from tests.support.llama_run import FP32, llama_recipe, write_run
from tests.support.toy_engine import toy_tokenizer

pytestmark = pytest.mark.usefixtures("eager")

PLAIN = ["--no-compile", "--dtype", "fp32", "--threads", "1"]
TOY = """--depth 2 --text.vocab-size 400 --text.tinyworld-megabytes 0.1 --text.tokenizer-megabytes 0.1
 --text.val-megabytes 0.01 --model.width 32 --model.head-dim 16 --model.context 256 --model.dropout 0.1
 --train.batch-tokens 512 --train.log-every 2 --train.save-every 4""".split()
SFT = "--text.tinyworld-conversations 100 --sft.steps 6 --sft.batch-tokens 512".split()


def command(verb: str, out: Path, *arguments: str) -> None:
    assert main.main([verb, *arguments, "--out", str(out)]) == 0


# A toy, the whole way ---------------------------------------------------------------------------------------


def test_a_llama_the_whole_way_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pretrained, resumed, fine-tuned, talked to; exported, imported, talked to again."""
    steps = ("--train.steps", "8", "--run", "toy", *PLAIN)
    command("pretrain", tmp_path, "llama", *TOY, "--train.steps", "4", *steps[2:])
    command("pretrain", tmp_path, "llama", *TOY, *steps, "--resume")
    command("sft", tmp_path, *SFT, "--run", "toy", *PLAIN)
    run = tmp_path / "runs" / "toy"
    assert "resumed at step 4" in capsys.readouterr().out
    assert [manifest.steps(run / s / "checkpoints")[-1] for s in ("pretrain", "sft")] == [8, 6]
    assert all(0 < line["loss"] < 10 for line in read_metrics(run / "pretrain") if "loss" in line)
    command("export", tmp_path, "--run", "toy", "--to", "hf", "--dir", str(tmp_path / "hf"))
    assert "step 6 of sft" in capsys.readouterr().out
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "hf").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]
    command("import", tmp_path, str(tmp_path / "hf"), "--run", "copy", "--stage", "sft")
    copy = tmp_path / "runs" / "copy"
    assert [event["kind"] for event in read_events(copy / "sft")] == ["import"]
    facts = json.loads((copy / "run.json").read_text(encoding="utf-8"))
    one, other = (load(RunDir(tmp_path, name), FP32, silent) for name in ("toy", "copy"))
    assert facts["model"]["parameters"]["total"] == parameters(one.recipe).total
    before, after = one.model.state_dict(), other.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    replies = []
    for name in ("toy", "copy"):
        capsys.readouterr()
        command("chat", tmp_path, "--run", name, "-p", "Who are you?", "--max-tokens", "8", *PLAIN)
        replies.append(capsys.readouterr().out)
    assert replies[0] == replies[1]


def test_an_imported_model_is_scored_in_its_own_words(tmp_path: Path) -> None:
    """Text is split by the tokenizer that came with it, not by one trained for the text."""
    recipe = llama_recipe(context=256)
    export_hf.run(write_run(tmp_path, recipe), tmp_path / "hf", stage=None, dtype=torch.float32, log=silent)
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


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    run_dir, folder = write_run(tmp_path, llama_recipe()), tmp_path / "hf"
    folder.mkdir()
    export_hf.run(run_dir, folder, stage=None, dtype=torch.float32, log=silent)  # an empty one is taken
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert before.keys() == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    with pytest.raises(ValueError, match="hf is there already: name another folder with --dir, or remove it first"):
        export_hf.run(run_dir, folder, stage=None, dtype=torch.float32, log=silent)
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_next_export_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    run_dir, left = write_run(tmp_path / "out", llama_recipe()), tmp_path / ".hf.tmp-0123"
    (left / "hf").mkdir(parents=True)
    export_hf.run(run_dir, tmp_path / "hf", stage=None, dtype=torch.float32, log=silent)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out"]


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "out", llama_recipe())
    with full_disk(1000), pytest.raises(OSError, match=r"cannot write .*/hf \(.*too large.*\): choose another fol"):
        export_hf.run(run_dir, tmp_path / "hf", stage=None, dtype=torch.float32, log=silent)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"windows": "SL"}, r"the model's attention has windows \(SL\).*train with --model.windows L"),
        ({"width": 64}, "transformers refuses a width of 64 for 6 heads, since it is no multiple: train with other"),
    ],
)
def test_a_llama_that_theirs_cannot_be_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, llama_recipe(**changes))
    with pytest.raises(ValueError, match=message):
        export_hf.run(run_dir, tmp_path / "hf", stage=None, dtype=torch.float32, log=silent)
    assert not (tmp_path / "hf").exists()


def test_a_tokenizer_of_unknown_meaning_stays_behind(tmp_path: Path) -> None:
    recipe, own = llama_recipe(), Tokenizer(toy_tokenizer().merges, r"\p{L}+|\P{L}+")
    run_dir = write_run(tmp_path, recipe, tokenizer=own)
    said: list[str] = []
    export_hf.run(run_dir, tmp_path / "hf", stage=None, dtype=torch.float32, log=said.append)
    assert said[0].startswith("exported without a tokenizer: the tokenizer splits text by a pattern of its own")
    assert {path.name for path in (tmp_path / "hf").iterdir()} == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    copy = RunDir(tmp_path, "copy")
    with pytest.raises(FileNotFoundError, match="give quern's tokenizer.json of this model with --tokenizer"):
        import_hf.run(tmp_path / "hf", copy, RECIPE, stage="pretrain", tokenizer=None, log=silent)
    kept = run_dir.folder / "tokenizer.json"
    import_hf.run(tmp_path / "hf", copy, RECIPE, stage="pretrain", tokenizer=kept, log=silent)
    assert load(copy, FP32, silent).tokenizer.fingerprint == own.fingerprint


def test_without_the_extra_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"tokenizer.json needs an extra package .*pip install -e '\.\[export\]'"):
        tokenizer_json(toy_tokenizer())


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
