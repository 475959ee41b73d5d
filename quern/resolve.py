"""`resolve`: fills every field of a recipe that is marked `Gap` and None from `depth`, and checks every value.

The one place that derives numbers. Batch, rate and decay follow nanochat's scaling rules from one reference point.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from quern import validate
from quern.recipe import SMALL_DEPTH, Recipe, Resolved, ResolvedModel, ResolvedOptim, ResolvedTrain, TrainRecipe

# The reference point of the batch, rate and decay rules: depth 12, width 768, vocabulary 32,768, 12 tokens per
# parameter, at a batch of 2^19 tokens.
REFERENCE_BATCH_TOKENS = 2**19
REFERENCE_HORIZON_TOKENS = 12 * (12 * 12 * 768**2 + 32_768 * 768)

WIDTH_PER_LAYER = 64
"""Channels of the residual stream for each layer, as in nanochat. Narrower small models: experiments/narrow.py."""

ROPE_BASE, OFFSET_ROPE_BASE = 100_000.0, 1024.0
"""Bases of the rotary frequencies: nanochat's, and modded-nanogpt's for half of the pairs, with `model.key_offset`."""

READINGS_OF_FULL_DECAY = 5
"""Readings of the text from which the tables' decay follows batch and horizon as the matrices' decay does."""

_filled: Any = replace  # which does not know that a part without gaps has another type


def resolve(recipe: Recipe, replicas: int = 1) -> Resolved:
    """Returns the recipe with every field filled in that follows from `depth`, and checks every value.

    Args:
        recipe: The user's recipe.
        replicas: Data-parallel ranks, of which each reads at least one row of every batch.

    Raises:
        ValueError: A value is wrong; the message says what to do instead.
    """
    validate.check(recipe)
    depth = recipe.depth
    small = depth < SMALL_DEPTH
    text = replace(recipe.text, vocab_size=recipe.text.vocab_size or (8192 if small else 32_768))
    shape = recipe.model
    wanted = shape.width or WIDTH_PER_LAYER * depth
    head_dim = shape.head_dim or (64 if wanted < 512 else 128)
    width = shape.width or -(-wanted // head_dim) * head_dim  # whole heads, as nanochat rounds it
    heads = shape.heads or max(1, width // head_dim)
    context = shape.context or (512 if small else 2048)
    vocab_size = shape.vocab_size or text.vocab_size
    key_offset = shape.key_offset
    if key_offset is None and "model.key_offset" not in recipe.unused:
        key_offset = head_dim % 4 == 0
    rope_base = shape.rope_base or (OFFSET_ROPE_BASE if key_offset else ROPE_BASE)
    derived = {"depth": depth, "width": width, "head_dim": head_dim, "heads": heads, "context": context}
    derived |= {"kv_heads": shape.kv_heads or heads, "vocab_size": vocab_size}
    derived |= {"rope_base": rope_base, "key_offset": key_offset}
    model: ResolvedModel = _filled(shape, **derived)
    validate.check_shape(model)
    validate.check_rows(recipe.train, recipe.sft, context, replicas)
    train = _resolve_train(recipe.train, model, replicas)
    optim = _resolve_optim(recipe, train, width, small)
    seed = recipe.seed if recipe.data_seed is None else recipe.data_seed
    return Resolved.of(recipe, data_seed=seed, text=text, model=model, train=train, optim=optim)


def _resolve_optim(recipe: Recipe, train: ResolvedTrain, width: int, small: bool) -> ResolvedOptim:
    root = math.sqrt(train.batch_tokens / REFERENCE_BATCH_TOKENS)
    exponent = recipe.optim.batch_exponent
    if exponent is None:
        exponent = 1 / 3 if small else 1 / 2
    scales = {
        "lr_scale": (train.batch_tokens / REFERENCE_BATCH_TOKENS) ** exponent,
        "decay_scale": root * REFERENCE_HORIZON_TOKENS / (train.steps * train.batch_tokens),
        "width_scale": math.sqrt(768 / width),
    }
    missing = {name for name in scales if getattr(recipe.optim, name) is None and f"optim.{name}" not in recipe.unused}
    return _filled(recipe.optim, batch_exponent=exponent, **{name: scales[name] for name in missing})


def table_decay_rule(recipe: Resolved, text_tokens: int) -> float:
    """`optim.table_decay_scale` for a text: decay_scale · (readings - 1) / 4, from 1 to decay_scale.

    The tables are the head and the value embeddings, which have a row for each token. A run that reads its text once
    needs no more than nanochat's decay. A run that repeats its text memorises it in the tables, so the best decay grows
    with the number of readings (three studies of 200 steps, at one size). From depth 8 on it is nanochat's.
    """
    if recipe.depth >= SMALL_DEPTH:
        return 1.0
    readings = recipe.train.steps * recipe.train.batch_tokens / max(1, text_tokens)
    share = min(1.0, (readings - 1) / (READINGS_OF_FULL_DECAY - 1))
    return max(1.0, (recipe.optim.decay_scale or 0.0) * share)


def fine_tuning_rates(recipe: Resolved, share: float, batch_tokens: int) -> Resolved:
    """Rates of fine-tuning and RL on a base model's recipe: `share` of sqrt(batch / 2^19), without weight decay. Raises
    ValueError for a share of 0."""
    if not share:  # not in `check`, which reads saved recipes too
        raise ValueError("lr-share must be above 0, not 0: nothing would be learned")
    scale = share * math.sqrt(batch_tokens / REFERENCE_BATCH_TOKENS)
    no_decay = {name: 0.0 for name in ("decay_scale", "table_decay_scale") if f"optim.{name}" not in recipe.unused}
    return replace(recipe, optim=replace(recipe.optim, lr_scale=scale, matrix_decay=0.0, **no_decay))


def _resolve_train(train: TrainRecipe, model: ResolvedModel, replicas: int) -> ResolvedTrain:
    parameters = 12 * model.depth * model.width**2 + model.vocab_size * model.width
    horizon_tokens = train.horizon_ratio * parameters
    batch_tokens = train.batch_tokens or batch_rule(horizon_tokens, model.context, replicas)
    steps = train.steps or max(1, round(horizon_tokens / batch_tokens))
    return _filled(
        train,
        steps=steps,
        batch_tokens=batch_tokens,
        micro_batch_tokens=train.micro_batch_tokens or min(batch_tokens, max(model.context, MICRO_BATCH_TOKENS)),
        warmup_steps=train.warmup_steps if train.warmup_steps is not None else min(40, steps // 20),
        eval_every=train.eval_every or max(1, -(-steps // 8)),
        save_every=train.save_every or max(1, steps // 10),
    )


MICRO_BATCH_TOKENS = 4096
MINIMUM_STEPS = 2000
MINIMUM_BATCH_TOKENS = 4096
FINE_TUNING_STEPS = 1000


def batch_rule(horizon_tokens: float, context: int, replicas: int = 1) -> int:
    """Tokens in a batch for a horizon: 2^round(log2(2^19 · (D / D_reference)^0.383)), and few enough for 2,000 steps.

    The power law was fitted from depth 12 to 26; on horizons of a few million tokens it would leave too few steps
    to learn in, which is what the second bound repairs. Not below 4,096, under which processors idle, nor one row for
    each replica; whole rows, where the context is no power of two.
    """
    fitted = REFERENCE_BATCH_TOKENS * (horizon_tokens / REFERENCE_HORIZON_TOKENS) ** 0.383
    return _whole_rows(min(fitted, horizon_tokens / MINIMUM_STEPS), context, replicas)


def sft_batch_rule(recipe: Resolved, conversation_tokens: int, replicas: int = 1) -> int:
    """Tokens in a batch of fine-tuning: pretraining's, and few enough for 1,000 steps.

    nanochat fine-tunes with pretraining's own batch, on conversations enough for about 1,000 steps of it; fewer
    conversations would leave too few steps to learn in. conversation_tokens: each counted once.
    """
    context, pretraining = recipe.model.context, recipe.train.batch_tokens
    tokens = _whole_rows(recipe.sft.epochs * conversation_tokens / FINE_TUNING_STEPS, context, replicas)
    return max(context * replicas, min(tokens, pretraining // context * context))


def _whole_rows(wanted: float, context: int, replicas: int) -> int:
    tokens = max(context * replicas, MINIMUM_BATCH_TOKENS, 2 ** round(math.log2(max(1.0, wanted))))
    return tokens // context * context
