"""Toy Llamas whose tokenizers llama.cpp can have, and what a GGUF export of them holds."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quern.interop import export_gguf
from quern.model.base import LanguageModel
from quern.model.context import CausalContext
from quern.recipe import Resolved, TextRecipe
from quern.text.tokenizer import Tokenizer, split_pattern
from tests.support.exported import model_of, toy_recipe
from tests.support.toy_engine import SENTENCES

BLOCKS: dict[str, Any] = {"width": 64, "head_dim": 16, "heads": 4, "kv_heads": 2, "mlp_width": 96}
"""Rows of multiples of 32 weights, as Q8_0 needs them."""


@cache
def single_digits() -> Tokenizer:
    """The toy tokenizer, with one digit in a token."""
    return Tokenizer.train(SENTENCES * 8, 330, split_pattern(1))


def gguf_recipe(tokenizer: Tokenizer, **shape: Any) -> Resolved:
    recipe = toy_recipe("llama", **{"vocab_size": tokenizer.vocab_size, "bos": tokenizer.bos, **shape})
    return replace(recipe, text=TextRecipe(vocab_size=max(300, tokenizer.vocab_size), digits=1))


def toy(recipe: Resolved, *, tied: bool = False) -> LanguageModel:
    """The random model; tied: its head equals its embedding."""
    model = model_of(recipe)
    if tied:
        with torch.no_grad():
            model.head.weight.copy_(model.embedding.weight)
    return model


def write_toy(
    path: Path, recipe: Resolved, tokenizer: Tokenizer, *, kind: str = "F32", tied: bool = False, **facts: Any
) -> dict[str, Tensor]:
    """Writes a model as `quern export` does. facts: metadata that differs. Returns what was written."""
    weights = export_gguf.tensors(toy(recipe, tied=tied).state_dict(), recipe.model)
    kinds = export_gguf.kinds_of(weights, kind, lambda line: None)
    export_gguf.write(path, export_gguf.metadata(recipe.model, tokenizer, "toy") | facts, weights, kinds)
    return weights


def log_probabilities(model: LanguageModel, ids: list[int]) -> Tensor:
    """(T, V) in fp64: of the token that follows each position."""
    with torch.no_grad():
        logits = model.logits(model(torch.tensor([ids]), CausalContext()))[0].double()
    assert logits.std() > 1, "logits this flat prove nothing"
    return logits.log_softmax(-1)
