"""Import of folders in Hugging Face's format: what is refused leaves no run; older spellings; the run that is made.

That the logits are those of transformers is a law of its own (tests/laws/test_export_law.py).
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quern.interop import export_hf, import_hf
from quern.recipes.llama import RECIPE
from quern.runs.load import load
from quern.runs.run_dir import RunDir
from quern.terminal import silent
from quern.train import checkpoint, manifest
from tests.support.full_disk import full_disk
from tests.support.llama_run import FP32, llama_recipe, model_of, write_run

pytestmark = pytest.mark.usefixtures("eager")

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported")
    export_hf.run(write_run(path, llama_recipe()), path / "hf", stage=None, dtype=torch.float32, log=silent)
    return path


@pytest.fixture
def folder(exported: Path, tmp_path: Path) -> Path:
    return shutil.copytree(exported, tmp_path / "out") / "hf"


def imported(folder: Path, run: str = "copy") -> RunDir:
    run_dir = RunDir(folder.parent, run)
    import_hf.run(folder, run_dir, RECIPE, stage="pretrain", tokenizer=None, log=silent)
    return run_dir


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
    """The same weight in two files."""
    both = [folder / f"model-{number}.safetensors" for number in range(2)]
    save_file(load_file(both[0]) | load_file(both[1]), both[1])


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def torn(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


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
        (mapped({"a": "../other.safetensors"}), "Expected the name of a file in the same folder"),
        (indexed(lambda f, _: (f / "model-1.safetensors").unlink()), "there is no .*model-1.safetensors"),
        (indexed(put_twice), "model-1.safetensors holds lm_head.weight, which another file holds too"),
        (reconfigure(tie_word_embeddings="no"), "at `..tie_word_embeddings`"),
        (reconfigure(partial_rotary_factor=0.5), "it has partial_rotary_factor 0.5 instead of 1.0"),
        (reconfigure(num_hidden_layers="2"), "num_hidden_layers of its .* must be a whole number .*, not '2'"),
        (reconfigure(num_hidden_layers=10**7), "num_hidden_layers of .* between 1 and 1,000"),
        (reconfigure(max_position_embeddings=None), "max_position_embeddings of .*, not None"),
        (reconfigure(mlp_bias=True, hidden_act="gelu"), "hidden_act 'gelu' instead of 'silu', mlp_bias True"),
        (reconfigure(intermediate_size=78), "the weights do not fit the model"),
        (reconfigure(num_hidden_layers=1), "these weights are no Llama's: model.layers.1.input_layernorm.weight, .* 6"),
        (reweigh(lambda w: w.pop("model.norm.weight")), "weights are missing: model.norm.weight"),
        (reweigh(lambda w: w.update(surplus=torch.ones(2))), "these weights are no Llama's: surplus"),
        (pickled, "weights are read from safetensors only, which transformers writes with save_pretrained"),
        (reweigh(lambda w: w["model.norm.weight"].fill_(torch.nan)), "model.norm.weight .torch.float32. must hold fin"),
        (reweigh(lambda w: w.update({"model.norm.weight": torch.ones(60).int()})), "torch.int32. must hold finite"),
        (torn, "model.safetensors is damaged"),
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


def test_an_imported_run_can_be_fine_tuned_from(folder: Path) -> None:
    """Its checkpoint is a whole one: masters as imported, an optimizer that has not moved."""
    copy = imported(folder)
    found = manifest.latest(copy.checkpoints("pretrain"), silent)
    assert found is not None
    tensors, meta = checkpoint.load(found[0])
    assert meta["state"]["step"] == 0
    masters = {name.removeprefix("master."): t for name, t in tensors.items() if name.startswith("master.")}
    expected = model_of(llama_recipe()).state_dict()
    assert masters.keys() == expected.keys() and all(torch.equal(masters[n], expected[n]) for n in masters)
    assert all((t == 0).all() for name, t in tensors.items() if not name.startswith("master."))
