"""Runs of any architecture with random weights, without training: what export reads, and import must give back; their
exported folders, and transformers loading those, with the code in them."""

import importlib
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quern.interop import export_hf
from quern.model.base import LanguageModel
from quern.recipe import Resolved, ResolvedModel, TextRecipe
from quern.resolve import resolve
from quern.runs.run_dir import RunDir
from quern.text.chat import ContentPart, Message
from quern.text.tokenizer import Tokenizer
from quern.train import checkpoint
from quern.train.state import TrainState, build_model, build_state
from tests.support.models import CPU as FP32
from tests.support.models import RECIPES, randomized
from tests.support.toy_engine import toy_tokenizer

EVEN = {"depth": 4, "width": 32, "head_dim": 8, "heads": 4, "kv_heads": 4}
ODD = {"depth": 2, "width": 60, "head_dim": 10, "heads": 6, "kv_heads": 2, "mlp_width": 77}
SIZES: dict[str, dict[str, Any]] = {
    "llama": ODD | {"context": 48, "norm_eps": 1e-3, "windows": "L"},
    "gpt": EVEN | {"context": 32},
    "unet": EVEN | {"context": 256},
}
"""llama: no powers of two, and keys shared by three queries each. Short windows of gpt are 8 tokens, of unet 128."""
LLAMAS: dict[str, dict[str, Any]] = {
    "odd sizes, keys shared by three": {},
    "one key head": {"kv_heads": 1, "depth": 1},
    "a key for each query": {"kv_heads": 6, "depth": 3, "rope_base": 500.0},
    "heads wider than the stream": {"width": 36, "head_dim": 14, "mlp_width": 20, "norm_eps": 1e-6},
}
MODEL_FILES = {"README.md", "config.json", "generation_config.json", "model.safetensors"}
TOKENIZER_FILES = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
"""The files of an export."""
CALL: list[ContentPart] = [{"type": "tool", "text": "3*4-1"}, {"type": "output", "text": "11"}]
CHAT: list[Message] = [
    {"role": "system", "content": "Be brief.\n"},
    {"role": "user", "content": " What is 3 × 4 - 1?"},
    {"role": "assistant", "content": [*CALL, {"type": "text", "text": "It is 11. "}]},
    {"role": "user", "content": "Danke, schön!"},
]


def toy_recipe(name: str, **shape: Any) -> Resolved:
    """The resolved recipe of an architecture at toy size. shape: fields of `ModelRecipe`."""
    base, tokenizer = RECIPES[name], toy_tokenizer()
    sizes = {**SIZES[name], "vocab_size": tokenizer.vocab_size, "bos": tokenizer.bos, **shape}
    text = TextRecipe(vocab_size=tokenizer.vocab_size, tinyworld_megabytes=0.05, val_megabytes=0.02)
    model: ResolvedModel = replace(base.model, **sizes)
    return Resolved.of(resolve(replace(base, depth=sizes["depth"], text=text, model=model)))


def random_state(recipe: Resolved) -> TrainState:
    """Every weight random, norms too, so that no part of the model is the identity; logits spread over some units."""
    sizes = {} if recipe.name in ("gpt", "unet") else {"matrices": 2.0, "vectors": 1.0}
    model = randomized(build_model(recipe, FP32, recipe.seed), seed=0, **sizes)
    if recipe.name == "unet":
        with torch.no_grad():
            model.head.weight.mul_(6)  # its cap divides by 42 at this width
    return build_state(recipe, FP32, model)


def write_run(
    out: Path, recipe: Resolved, tokenizer: Tokenizer | None = None, state: TrainState | None = None
) -> RunDir:
    """The run `first` on disk, pretrained for seven steps as it says; by default, `model_of` is its model."""
    run_dir, state, tokenizer = RunDir(out, "first"), state or random_state(recipe), tokenizer or toy_tokenizer()
    state.step = 7
    tokenizer.save(run_dir.folder / "tokenizer.json")
    meta = {"recipe": recipe.to_json(), "tokenizer": tokenizer.fingerprint, "seed": 0, "state": state.meta()}
    checkpoint.save(run_dir.checkpoints("pretrain"), state.step, state.tensors(), meta, keep=1)
    return run_dir


def model_of(recipe: Resolved) -> LanguageModel:
    return random_state(recipe).model.eval()


def exported(tmp_path: Path, recipe: Resolved, dtype: torch.dtype = torch.float32) -> Path:
    """The exported folder of a new run."""
    run_dir, folder = write_run(tmp_path / "out", recipe), tmp_path / "exported"
    export_hf.run(run_dir, folder, stage=None, dtype=dtype, log=lambda line: None)
    return folder


def load_exported(folder: Path) -> Any:
    """The model as transformers loads it, with the Python files of the folder, if it has any."""
    from transformers import AutoModelForCausalLM  # which takes seconds

    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)


@contextmanager
def modules_in(folder: Path) -> Iterator[None]:
    """transformers copies the Python files of the models that it loads here, and imports them from here."""
    from transformers import dynamic_module_utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(folder))
        patch.setattr(sys, "path", list(sys.path))
        try:
            yield
        finally:
            for name in [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]:
                del sys.modules[name]
            importlib.invalidate_caches()


def rounding(model: torch.nn.Module) -> float:
    """The standard deviation of a logit between two orders of the same fp32 sums, as a share of the largest logit.

    Each of K terms of a sum is rounded by up to 2^-24, with the standard deviation 2^-24/√3, which adds up as a random
    walk, in both orders; every matrix of the model adds such an error of its own. The largest of some 10,000 such
    differences is 4 standard deviations.
    """
    rows = [parameter.size(1) for parameter in model.parameters() if parameter.dim() == 2]
    return 2.0**-24 * math.sqrt(2 / 3 * len(rows) * max(rows))


def relative(theirs: torch.Tensor, ours: torch.Tensor) -> float:
    """The largest difference of a logit, as a share of the largest logit."""
    return float((theirs - ours).abs().max() / ours.abs().max())
