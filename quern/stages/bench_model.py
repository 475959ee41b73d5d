"""The reference model that training and generation are measured on, and what both need of it.

The reference size: 4 layers, width 256, 4 heads, vocabulary 8,192, context 512, every window full: 37.7
MFLOP a token in training. Weights and tokens are random: how fast a step is does not depend on what was
learned.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from quern.data.loader import Batch
from quern.model.gpt import GPT
from quern.optim.groups import table
from quern.optim.schedule import warmup_stable_decay
from quern.recipe import ModelRecipe, Recipe, TrainRecipe, resolve

MICRO_BATCH_TOKENS = 4096


def reference(quick: bool, seed: int, batch_tokens: int = MICRO_BATCH_TOKENS) -> Recipe:
    """The reference recipe, resolved; quick: a tiny one."""
    if quick:
        model = ModelRecipe(width=32, heads=2, head_dim=16, vocab_size=512, context=64, windows="L")
        depth, batch_tokens, micro = 2, 128, 128
    else:
        model = ModelRecipe(width=256, heads=4, vocab_size=8192, context=512, windows="L")
        depth, micro = 4, min(batch_tokens, MICRO_BATCH_TOKENS)
    train = TrainRecipe(batch_tokens=batch_tokens, micro_batch_tokens=micro, steps=1000)
    recipe = Recipe(
        name="reference",
        make_model=GPT,
        make_rules=table,
        make_schedule=warmup_stable_decay,
        depth=depth,
        seed=seed,
        model=model,
        train=train,
    )
    return resolve(recipe)


def left_to_itself(recipe: Recipe) -> Recipe:
    """The recipe with the batch and the steps that it picks for the horizon of its size."""
    micro = recipe.train.micro_batch_tokens
    return resolve(replace(recipe, train=TrainRecipe(micro_batch_tokens=micro)))


def random_batch(recipe: Recipe, seed: int) -> Batch:
    """A global batch of random tokens, every target counted."""
    context, batch_tokens = recipe.model.context, recipe.train.batch_tokens
    assert context and batch_tokens and recipe.model.vocab_size
    numbers = torch.Generator().manual_seed(seed)
    rows = max(1, batch_tokens // context)
    row_tokens = torch.randint(recipe.model.vocab_size, (rows, context + 1), generator=numbers, dtype=torch.int32)
    tokens, targets = row_tokens[:, :-1].contiguous().numpy(), row_tokens[:, 1:].contiguous().numpy()
    return Batch(tokens, targets, targets >= 0)
