"""Export of `gpt` and `unet` as someone uses it: a process without quern, the model card, what is refused.

That the numbers agree is a law of its own (tests/laws/test_export_law.py).
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

from quern.interop import export_hf
from quern.model.gpt import GPT
from quern.model.llama import Llama
from quern.records import StageFolder
from quern.runs.run_dir import RunDir
from quern.terminal import silent
from tests.support.exported import (
    MODEL_FILES,
    TOKENIZER_FILES,
    exported,
    load_exported,
    model_of,
    modules_in,
    toy_recipe,
    write_run,
)
from tests.support.toy_engine import toy_tokenizer

pytestmark = pytest.mark.usefixtures("eager")

KINDS = ("gpt", "unet")
ROOT = Path(__file__).resolve().parents[2]
WITHOUT_QUERN = """
import json, sys

class Guard:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "quern":
            raise ImportError("quern is not installed here")

sys.modules["quern"] = None
sys.meta_path.insert(0, Guard())
try:
    import quern
except ImportError:
    pass
else:
    raise AssertionError("quern can be imported")
from transformers import AutoModelForCausalLM, AutoTokenizer

found = []
for folder in sys.argv[1:]:
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    inputs = tokenizer("The miller grinds the grain", return_tensors="pt")
    reply = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "Who?"}], add_generation_prompt=True)
    found.append([inputs["input_ids"].tolist(), model(**inputs).logits.tolist(), reply.size(1), len(asked) > 0])
print(json.dumps(found))
"""


@pytest.fixture(autouse=True, scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with modules_in(tmp_path_factory.mktemp("modules")):
        yield


def test_the_folder_works_where_quern_is_not_installed(tmp_path: Path) -> None:
    """A process of its own, in another folder, that can import nothing of quern and reach no network."""
    recipes = [toy_recipe(kind) for kind in KINDS]
    folders = [exported(tmp_path / recipe.name, recipe) for recipe in recipes]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTHON"))}
    environment |= {"HF_HOME": str(elsewhere / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-I", "-c", WITHOUT_QUERN, *map(str, folders)],
        cwd=elsewhere,
        env=environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    for recipe, (ids, logits, length, asked) in zip(recipes, json.loads(done.stdout), strict=True):
        model, tokens = model_of(recipe), torch.tensor(ids)
        with torch.no_grad():
            expected = model.logits(model(tokens, model.context(tokens)))[..., : len(logits[0][0])]
        assert (torch.tensor(logits) - expected).abs().max() <= 1e-5
        assert len(ids[0]) < length <= len(ids[0]) + 4 and asked


@pytest.mark.parametrize("kind", KINDS)
def test_the_files_of_the_folder(kind: str, tmp_path: Path) -> None:
    folder = exported(tmp_path, toy_recipe(kind))
    code = {"modeling_quern.py", f"modeling_quern_{kind}.py"}
    assert {path.name for path in folder.iterdir()} == code | MODEL_FILES | TOKENIZER_FILES
    for name in code:
        assert (folder / name).read_bytes() == (ROOT / "quern" / "interop" / name).read_bytes()


def test_ids_that_no_token_has_are_left_out(tmp_path: Path) -> None:
    tokens = toy_tokenizer().vocab_size
    recipe = toy_recipe("gpt", vocab_size=tokens + 37)
    native, found = model_of(recipe), load_exported(exported(tmp_path, recipe))
    ids = torch.arange(16)[None] * 7 % tokens
    with torch.no_grad():
        expected = native.logits(native(ids, native.context(ids)))[..., :tokens]
        assert found.config.vocab_size == tokens
        torch.testing.assert_close(found(ids).logits, expected, rtol=0, atol=1e-5)


# What transformers may pass ---------------------------------------------------------------------------------


def test_what_cannot_be_computed_is_refused(tmp_path: Path) -> None:
    model = load_exported(exported(tmp_path, toy_recipe("gpt")))
    ids, cache = torch.tensor([[1, 2, 3, 4]]), DynamicCache()
    model(ids, past_key_values=cache)
    static = StaticCache(model.config, max_cache_len=8)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"inputs_embeds": torch.zeros(1, 4, 32)}, "does not support the arguments inputs_embeds: leave them out"),
        ({"input_ids": ids, "position_ids": ids}, "does not support the arguments position_ids"),
        ({}, "this model needs input_ids"),
        (
            {"input_ids": ids, "attention_mask": torch.tensor([[1, 0, 1, 1]])},
            "zeros between ones: only padding on the left or right can be masked",
        ),
        ({"input_ids": ids, "attention_mask": torch.ones(1, 3)}, r"attention_mask is \(1, 3\) and input_ids \(1, 4\)"),
        (
            {"input_ids": ids[:, :1], "past_key_values": cache},
            "the cache holds 4 tokens and input_ids 1: pass the whole text in input_ids",
        ),
        ({"input_ids": ids, "past_key_values": static}, "the cache must be a DynamicCache, not a StaticCache"),
    ]
    for arguments, message in wrong:
        with pytest.raises(ValueError, match=message):
            model(**arguments)
    with pytest.raises(NotImplementedError, match="the vocabulary cannot be resized"):
        model.resize_token_embeddings(400)


def test_logits_of_some_tokens_only(tmp_path: Path) -> None:
    model, ids = load_exported(exported(tmp_path, toy_recipe("gpt"))), torch.arange(12)[None]
    whole = model(ids).logits
    assert torch.allclose(model(ids, logits_to_keep=3).logits, whole[:, -3:], atol=1e-5)
    assert torch.allclose(model(ids, logits_to_keep=torch.tensor([2, 5])).logits, whole[:, [2, 5]], atol=1e-5)
    assert torch.equal(model(ids, return_dict=False)[0], whole)


def test_beams_are_those_without_a_cache(tmp_path: Path) -> None:
    for kind in KINDS:
        model = load_exported(exported(tmp_path / kind, toy_recipe(kind)))
        settings = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False, "temperature": None, "top_k": None}
        ids = torch.tensor([[5, 6, 7, 8, 9]])
        assert torch.equal(model.generate(ids, **settings), model.generate(ids, use_cache=False, **settings))


def test_a_step_of_generation_computes_one_token(tmp_path: Path) -> None:
    """Whatever transformers calls the cache; 5.24 gave it another name."""
    model, ids, sizes = load_exported(exported(tmp_path, toy_recipe("gpt"))), torch.tensor([[5, 6, 7, 8, 9]]), []
    model.blocks[0].register_forward_pre_hook(lambda block, inputs: sizes.append(inputs[0].size(1)))
    model.generate(ids, max_new_tokens=4, do_sample=False, temperature=None, top_k=None, eos_token_id=None)
    for name in ("past_key_values", "cache"):
        named = {name: DynamicCache()}
        model(ids[:, :3], **named)
        model(**model.prepare_inputs_for_generation(ids, **named))
    assert sizes == [5, 1, 1, 1, 3, 2, 3, 2]


# What is refused --------------------------------------------------------------------------------------------


def test_the_model_of_an_idea_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoX0(GPT):
        pass

    recipe = toy_recipe("gpt")
    loaded = SimpleNamespace(recipe=recipe, model=NoX0(recipe.model))
    monkeypatch.setattr(export_hf, "load", lambda *_: loaded)
    with pytest.raises(ValueError, match="holds a NoX0 that its own recipe file makes, .*: export a run of"):
        card_of(RunDir(tmp_path, "idea"), tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


# The model card ---------------------------------------------------------------------------------------------


def card_of(run_dir: RunDir, folder: Path) -> str:
    export_hf.run(run_dir, folder, stage=None, dtype=torch.float32, log=silent)
    return (folder / "README.md").read_text(encoding="utf-8")


def test_the_card_says_what_the_records_say(tmp_path: Path) -> None:
    recipe = toy_recipe("unet")
    run_dir = write_run(tmp_path / "out", recipe)
    with StageFolder(run_dir.stage("pretrain")) as records:
        records.write_recipe(recipe.to_json() | {"data": "/home/somebody/private/letters.txt"}, None)
        records.metric(step=7, tokens=1234567, loss=3.25)
        records.metric(step=7, tokens=1234567, val_loss=3.5, val_bpb=1.75)
        records.metric(step=9, tokens=9999999, loss=1.0)  # of steps after the exported one
    score = {"metric": "accuracy", "low": 0.4, "high": 0.6, "chance": 0.25, "count": 200, "stage": "pretrain"}
    lines = [
        score | {"step": 7, "task": "choice", "value": 0.4321},
        score | {"step": 7, "task": "choice", "value": 0.5},
        score | {"step": 5, "task": "an earlier step", "value": 0.9},
        {"stage": "untrained", "step": 0, "task": "validation", "metric": "bpb", "value": 8.0},
    ]
    run_dir.append("evaluate.jsonl", lines)
    card = card_of(run_dir, tmp_path / "hf")
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: text-generation\nlicense: unknown\n")
    assert "| pretrain | letters.txt | 7 | 1,234,567 | 3.2500 | 3.5000 | 1.7500 |" in card
    assert "| choice | accuracy | 0.5000 | 0.4000 to 0.6000 | 0.2500 | 200 |" in card
    assert "an earlier step" not in card and "untrained" not in card and "9,999,999" not in card
    assert "/home" not in card and str(tmp_path) not in card
    assert "trust_remote_code=True" in card and "A BOS token begins a document" in card
    weights = sum(p.numel() for p in load_exported(tmp_path / "hf").parameters())
    assert f"with {weights:,} parameters" in card
    assert "| tokens that each layer sees | 256, 128, 128, 256 |" in card


def test_the_card_of_a_llama_needs_no_code(tmp_path: Path) -> None:
    recipe = replace(toy_recipe("llama"), name="llama_adamw")  # as of a file
    card = card_of(write_run(tmp_path / "out", recipe), tmp_path / "hf")
    assert f"architecture `{Llama.__name__.lower()}`" in card and "trust_remote_code" not in card
    assert "## Scores" not in card and "## License" in card


def test_the_code_in_the_card_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind in KINDS:
        folder = exported(tmp_path / kind, toy_recipe(kind))
        card = (folder / "README.md").read_text(encoding="utf-8")
        code = card.split("```python\n")[1].split("```")[0].replace("path/to/this/folder", str(folder))
        capsys.readouterr()
        exec(compile(code.replace("max_new_tokens=100", "max_new_tokens=5"), "README.md", "exec"), {})
        assert "Once upon a time" in capsys.readouterr().out


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    recipe = toy_recipe("gpt")
    run_dir = write_run(tmp_path / "out", recipe)
    (run_dir.folder / "evaluate.jsonl").write_text("{\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"evaluate.jsonl, line 1, is not a record .*: remove that line"):
        card_of(run_dir, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
