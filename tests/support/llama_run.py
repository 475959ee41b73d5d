"""A run with a random Llama in it, without training: what export reads, and import must give back."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quern.machine import Machine
from quern.model.llama import Llama
from quern.recipe import Recipe, Resolved, TextRecipe
from quern.recipes.llama import RECIPE
from quern.resolve import resolve
from quern.runs.run_dir import RunDir
from quern.text.chat import Message
from quern.text.tokenizer import Tokenizer
from quern.train import checkpoint
from quern.train.state import TrainState, build_model, build_state
from tests.support.toy_engine import toy_tokenizer

FP32 = Machine(torch.device("cpu"), torch.float32, compile=False, threads=1)
ODD = {
    "depth": 2, "width": 60, "head_dim": 10, "heads": 6, "kv_heads": 2, "mlp_width": 77, "context": 48,
    "norm_eps": 1e-3,
}  # fmt: skip
"""Sizes that are no powers of two, and keys shared by three queries each."""
SHAPES: dict[str, dict[str, Any]] = {
    "odd sizes, keys shared by three": {},
    "one key head": {"kv_heads": 1, "depth": 1},
    "a key for each query": {"kv_heads": 6, "depth": 3, "rope_base": 500.0},
    "heads wider than the stream": {"width": 36, "head_dim": 14, "mlp_width": 20, "norm_eps": 1e-6},
}
MODEL_FILES = {"README.md", "config.json", "generation_config.json", "model.safetensors"}
TOKENIZER_FILES = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
"""The files of an export."""
CHAT: list[Message] = [
    {"role": "system", "content": "Be brief.\n"},
    {"role": "user", "content": " What is 3 × 4 - 1?"},
    {
        "role": "assistant",
        "content": [
            {"type": "tool", "text": "3*4-1"},
            {"type": "output", "text": "11"},
            {"type": "text", "text": "It is 11. "},
        ],
    },
    {"role": "user", "content": "Danke, schön!"},
]


def llama_recipe(base: Recipe = RECIPE, **shape: Any) -> Resolved:
    tokenizer = toy_tokenizer()
    sizes: dict[str, Any] = {**ODD, "vocab_size": tokenizer.vocab_size, "bos": tokenizer.bos, "windows": "L", **shape}
    text = TextRecipe(vocab_size=tokenizer.vocab_size, tinyworld_megabytes=0.05, val_megabytes=0.02)
    return Resolved.of(resolve(replace(base, depth=sizes["depth"], text=text, model=replace(RECIPE.model, **sizes))))


def random_state(recipe: Resolved) -> TrainState:
    """Every weight random, norms too, so that no part of the model is the identity; logits spread over some units."""
    model = build_model(recipe, FP32, recipe.seed)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            size = 2.0 * parameter.size(-1) ** -0.5 if parameter.dim() == 2 else 1.0
            parameter.copy_(size * torch.randn(parameter.shape, generator=generator))
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


def model_of(recipe: Resolved) -> Llama:
    return random_state(recipe).model.eval()


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
