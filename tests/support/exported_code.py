"""Runs of `gpt` and `unet` with random weights, their exported folders, and transformers loading the code in them."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, dynamic_module_utils

from quern.interop import export_hf
from quern.model.base import LanguageModel
from quern.recipe import Resolved, ResolvedModel, TextRecipe
from quern.recipes.gpt import RECIPE as GPT_RECIPE
from quern.recipes.unet import RECIPE as UNET_RECIPE
from quern.resolve import resolve
from quern.train.state import TrainState, build_model, build_state
from tests.support.llama_run import FP32, write_run
from tests.support.models import randomized
from tests.support.toy_engine import toy_tokenizer

SIZES: dict[str, Any] = {"depth": 4, "width": 32, "head_dim": 8, "heads": 4, "kv_heads": 4}
CONTEXT = {"gpt": 32, "unet": 256}
"""gpt: short windows are 8 tokens; unet: they are 128."""


def toy_recipe(name: str, **shape: Any) -> Resolved:
    """A resolved recipe of `gpt` or `unet` at toy size. shape: fields of `ModelRecipe`."""
    base, tokenizer = {"gpt": GPT_RECIPE, "unet": UNET_RECIPE}[name], toy_tokenizer()
    sizes = {**SIZES, "context": CONTEXT[name], "vocab_size": tokenizer.vocab_size, "bos": tokenizer.bos, **shape}
    text = TextRecipe(vocab_size=tokenizer.vocab_size, tinyworld_megabytes=0.05, val_megabytes=0.02)
    model: ResolvedModel = replace(base.model, **sizes)
    return Resolved.of(resolve(replace(base, depth=sizes["depth"], text=text, model=model)))


def random_state(recipe: Resolved) -> TrainState:
    """Every weight random, so that no part of the model is the identity; logits spread over some units."""
    model = randomized(build_model(recipe, FP32, recipe.seed), seed=0)
    if recipe.name == "unet":
        with torch.no_grad():
            model.head.weight.mul_(6)  # its cap divides by 42 at this width
    return build_state(recipe, FP32, model)


def model_of(recipe: Resolved) -> LanguageModel:
    return random_state(recipe).model.eval()


def exported(tmp_path: Path, recipe: Resolved, dtype: torch.dtype = torch.float32) -> Path:
    """The exported folder of a new run."""
    folder = tmp_path / "exported"
    run_dir = write_run(tmp_path / "out", recipe, state=random_state(recipe))
    export_hf.run(run_dir, folder, stage=None, dtype=dtype, log=lambda line: None)
    return folder


def load_exported(folder: Path) -> Any:
    """The model as transformers loads it, with the Python files of the folder."""
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)


@contextmanager
def modules_in(folder: Path) -> Iterator[None]:
    """transformers copies the Python files of the models that it loads here, and imports them from here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(folder))
        patch.setattr(sys, "path", list(sys.path))
        try:
            yield
        finally:
            for name in [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]:
                del sys.modules[name]
            importlib.invalidate_caches()
