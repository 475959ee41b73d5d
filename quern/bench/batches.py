"""Random batches for the trainers of both frameworks; no torch."""

import numpy as np

from quern.data.batch import Batch
from quern.recipe import Recipe


def random_batch(recipe: Recipe, seed: int) -> Batch:
    """Returns a global batch of random tokens, in which every target counts."""
    context, batch_tokens = recipe.model.context, recipe.train.batch_tokens
    assert context and batch_tokens and recipe.model.vocab_size
    size = max(1, batch_tokens // context), context + 1
    rows = np.random.default_rng(seed).integers(recipe.model.vocab_size, size=size, dtype=np.int32)
    tokens, targets = np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])
    return Batch(tokens, targets, targets >= 0)
