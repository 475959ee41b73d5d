"""Import of folders that transformers writes: shared keys, a tied head, bf16, several files, scaled rotary positions.

tests/interop/test_export_hf.py imports what quern exports. The oracle is transformers' own Llama, loaded from the same
folder.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from quern.interop import import_hf
from quern.model.context import CausalContext
from quern.recipes.llama import RECIPE
from quern.runs.load import load
from quern.runs.run_dir import RunDir
from tests.support.llama_run import FP32
from tests.support.toy_engine import toy_tokenizer

pytestmark = pytest.mark.usefixtures("eager")

INDEX = "model.safetensors.index.json"
SIZES: dict[str, Any] = {
    "vocab_size": 330,
    "hidden_size": 48,
    "intermediate_size": 76,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
SCALED: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


def written(folder: Path, dtype: torch.dtype = torch.float32, shard: str = "20KB", **config: Any) -> Path:
    """A folder as `save_pretrained` writes it."""
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**SIZES | config))
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    toy_tokenizer().save(folder / "tokenizer.json")
    return folder


def imported(folder: Path) -> RunDir:
    run_dir = RunDir(folder.parent / "out", "copy")
    import_hf.run(folder, run_dir, RECIPE, stage="pretrain", tokenizer=None, log=lambda line: None)
    return run_dir


@pytest.mark.parametrize(
    ("dtype", "kv_heads", "tied"),
    [
        (torch.float32, 4, False),
        (torch.float32, 1, True),
        (torch.bfloat16, 2, True),
        (torch.bfloat16, 2, False),
        (torch.float16, 1, False),
    ],
)
def test_logits_are_those_of_transformers(dtype: torch.dtype, kv_heads: int, tied: bool, tmp_path: Path) -> None:
    folder = written(tmp_path / "theirs", dtype, num_key_value_heads=kv_heads, tie_word_embeddings=tied)
    assert (folder / INDEX).exists()
    loaded = load(imported(folder), FP32, print)
    theirs = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.randint(0, 330, (2, 41), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = loaded.model.logits(loaded.model(ids, CausalContext()))
        assert logits.std() > 0.5
        assert (logits - theirs(ids).logits).abs().max() <= 1e-4
    assert loaded.recipe.model.kv_heads == kv_heads


@pytest.mark.parametrize("kind", SCALED)
def test_scaled_rotary_positions_are_refused(kind: str, tmp_path: Path) -> None:
    """As transformers 5 writes them, and as earlier versions did."""
    parameters = {"rope_type": kind, "rope_theta": 5e5, **SCALED[kind]}
    folder = written(tmp_path / "theirs", rope_parameters=parameters)
    with pytest.raises(ValueError, match=f"it has rope_parameters.rope_type '{kind}' instead of 'default'$"):
        imported(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": {"type": kind, **SCALED[kind]}}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ValueError, match=f"it has rope_scaling.rope_type '{kind}' instead of 'default'$"):
        imported(folder)
    assert not (tmp_path / "out").exists()


def rewrite(file: str, **changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        body = json.loads((folder / file).read_text(encoding="utf-8")) | changes
        (folder / file).write_text(json.dumps(body), encoding="utf-8")

    return change


def put_twice(folder: Path) -> None:
    """The same weight in two files."""
    one, other = sorted(folder.glob("model-*.safetensors"))[:2]
    save_file(load_file(one) | load_file(other), other)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (rewrite(INDEX, weight_map=None), f"{INDEX} is damaged .Expected `object`, got `null` - at `..weight_map`"),
        (rewrite(INDEX, weight_map={}), f"{INDEX} is damaged .Expected `object` of length >= 1"),
        (rewrite(INDEX, weight_map={"a": 1}), f"{INDEX} is damaged .Expected `str`, got `int`"),
        (rewrite(INDEX, weight_map={"a": "../other.safetensors"}), "Expected the name of a file in the same folder"),
        (lambda folder: next(folder.glob("model-00002*")).unlink(), "there is no .*model-00002-of-.*safetensors"),
        (put_twice, "model-00002-of-.* holds model.embed_tokens.weight, which another file holds too"),
        (rewrite("config.json", partial_rotary_factor=0.5), "it has partial_rotary_factor 0.5 instead of 1.0"),
        (
            rewrite("config.json", num_hidden_layers="2"),
            "num_hidden_layers of its .* must be a whole number .*, not '2'",
        ),
        (
            rewrite("config.json", num_hidden_layers=10**7),
            "num_hidden_layers of .* between 1 and 1,000",
        ),
        (
            rewrite("config.json", num_attention_heads=0),
            "num_attention_heads of .* between 1 and",
        ),
        (
            rewrite("config.json", max_position_embeddings=None),
            "max_position_embeddings of .*, not None",
        ),
    ],
)
def test_what_cannot_be_imported_leaves_no_run(spoil: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "theirs")
    spoil(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        imported(folder)
    assert not (tmp_path / "out").exists()
