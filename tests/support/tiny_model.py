"""A tokenizer, a model whose every weight matters, and texts in many scripts: for the tests of evaluation."""

import math
from dataclasses import replace

import numpy as np
import torch

from quern.eval.bits_per_byte import BitsPerByte
from quern.model.context import CausalContext
from quern.model.gpt import GPT
from quern.recipe import ModelRecipe
from quern.recipes.gpt import RECIPE
from quern.resolve import resolve
from quern.text.tokenizer import Tokenizer
from tests.support.models import CPU as CPU
from tests.support.models import randomized

# Trained on English only: other scripts fall apart into tokens that are no valid UTF-8 by themselves.
ENGLISH = ["The miller ground the corn and the baker baked the bread, day after day, in the valley."] * 4
TEXTS = [
    "The baker ground the corn in the valley, and the miller baked bread. " * 3,
    "Größe, naïve, Æsop — “quotes”… ",
    "粉ひき場の石臼はゆっくり回る。",
    "молоть зерно на мельнице",
    "👩‍👩‍👧 🌾🥖 mill",
    "a",
    "طاحونة قديمة عند النهر",
]


def tiny_tokenizer() -> Tokenizer:
    return Tokenizer.train(ENGLISH, 300)


def tiny_model(vocab_size: int, context: int = 32, seed: int = 0) -> GPT:
    """Random weights everywhere (also where training starts at zero), so that no part can be left out unseen."""
    shape = ModelRecipe(
        depth=3, width=32, head_dim=16, heads=2, kv_heads=1, context=context, vocab_size=vocab_size, windows="SL"
    )
    return randomized(GPT(resolve(replace(RECIPE, depth=3, model=shape)).model), vectors=0.4, seed=seed, matrices=2.3)


def plain_bits_per_byte(model: GPT, tokenizer: Tokenizer, texts: list[str], context: int) -> BitsPerByte:
    """The measure, written again: one window at a time, full logits, NumPy in float64, bytes counted on the text."""
    nats, tokens = 0.0, 0
    for text in texts:
        ids = tokenizer.encode(text)
        for start in range(0, len(ids), context):
            targets = ids[start : start + context]
            row = torch.tensor([[tokenizer.bos, *targets[:-1]]])
            with torch.no_grad():
                logits_TV = model.logits(model(row, CausalContext()))[0].double().numpy()
            largest_T1 = logits_TV.max(axis=1, keepdims=True)
            sums_T = np.log(np.exp(logits_TV - largest_T1).sum(axis=1)) + largest_T1[:, 0]
            nats += float((sums_T - logits_TV[np.arange(len(targets)), targets]).sum())
            tokens += len(targets)
    num_bytes = sum(len(text.encode("utf-8")) for text in texts)
    return BitsPerByte(nats / (math.log(2) * num_bytes), nats / tokens, tokens, num_bytes)
