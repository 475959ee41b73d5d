"""Which recipes are refused, each with one line that says what to do instead; `recipe.resolve` asks for all of it.

What a model itself refuses (the sizes that its architecture can do without) is not here, nor what a machine lacks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quern.recipe import ModelRecipe, Recipe, SftRecipe, TrainRecipe

ABOVE_ZERO = {
    "model": ("width", "head_dim", "heads", "kv_heads", "context", "softcap", "mlp_width", "norm_eps"),
    "train": (
        "steps",
        "minutes",
        "horizon_ratio",
        "batch_tokens",
        "micro_batch_tokens",
        "log_every",
        "eval_every",
        "save_every",
    ),
    "sft": ("epochs", "steps", "batch_tokens"),
}
FILLED_IN = ("model.depth", "model.vocab_size", "model.bos")
"""Fields of the shape that are never set by themselves: they follow the dial and the tokenizer."""


def flag(name: str) -> str:
    """train.log_every → train.log-every, as it is typed."""
    return name.replace("_", "-")


def check(recipe: Recipe) -> None:
    """Every value by itself, and fields that this recipe does not use. recipe: resolved or not."""
    train, sft = recipe.train, recipe.sft
    for name in ("data", "val", "conversations"):
        value = getattr(recipe, name)
        _refuse(value is not None and not value.strip(), f"{name} is empty: name a file, a folder or a data set")
    _refuse(recipe.depth < 1, f"depth must be at least 1, not {recipe.depth}")
    _refuse(recipe.seed < 0, f"seed must not be negative, not {recipe.seed}: use 0 or more")
    _refuse(recipe.text.digits not in (1, 2, 3), f"text.digits must be 1, 2 or 3, not {recipe.text.digits}")
    _refuse(not recipe.text.column, "text.column is empty: name the column or the key that holds the text")
    vocab_size = recipe.text.vocab_size
    _refuse(
        vocab_size is not None and not 300 <= vocab_size <= 2**20,
        f"text.vocab-size must lie between 300 and 1,048,576, not {vocab_size}",
    )
    packings = ("best-fit", "greedy-crop", "greedy-pad", "first-fit-decreasing", "stream")
    _refuse(
        train.packing not in packings,
        f"train.packing must be one of {', '.join(packings)}, not {train.packing}",
    )
    _refuse(train.fp8 not in ("off", "head", "all"), f"train.fp8 must be off, head or all, not {train.fp8}")
    _refuse(sft.too_long not in ("crop", "drop"), f"sft.too-long must be crop or drop, not {sft.too_long}")
    for part, names in ABOVE_ZERO.items():
        for name in names:
            value = getattr(getattr(recipe, part), name)
            _refuse(value is not None and value <= 0, f"{flag(f'{part}.{name}')} must be above 0, not {value}")
    for name, value in [("train.warmup-steps", train.warmup_steps), ("train.final-lr", train.final_lr)]:
        _refuse(value is not None and value < 0, f"{name} must not be negative, not {value}")
    _refuse(train.keep < 1, f"train.keep must be at least 1, not {train.keep}")
    _refuse(not 0 <= train.warmdown_share <= 1, "train.warmdown-share must lie between 0 and 1")
    _refuse(
        train.clip_norm is not None and train.clip_norm <= 0,
        f"train.clip-norm must be above 0, not {train.clip_norm}: leave it out for no clipping",
    )
    for name in recipe.unused:
        part, _, field = name.partition(".")
        body = getattr(recipe, part)
        default = next(f.default for f in fields(body) if f.name == field)
        _refuse(getattr(body, field) != default, unused(recipe, name))


def unused(recipe: Recipe, name: str) -> str:
    """What to say of a field that the recipe does not use."""
    part = name.partition(".")[0]
    used = ", ".join(flag(other) for other in _names(recipe, part))
    return f"{flag(name)} does nothing in the '{recipe.name}' recipe: leave it out; of this kind it knows {used}"


def _names(recipe: Recipe, part: str) -> Iterator[str]:
    names = (f"{part}.{f.name}" for f in fields(getattr(recipe, part)))
    return (name for name in names if name not in recipe.unused and name not in FILLED_IN)


def check_shape(model: ModelRecipe) -> None:
    """What the numbers of a model must be to each other. model: every number filled in."""
    assert model.heads and model.kv_heads and model.head_dim and model.width and model.context
    _refuse(
        set(model.windows) - set("SL") != set() or not model.windows,
        f"model.windows is a pattern of S (short) and L (long), such as SSSL, not '{model.windows}'",
    )
    _refuse(model.head_dim % 2 != 0, f"model.head-dim must be even for rotary embeddings, not {model.head_dim}")
    divisors = [n for n in range(1, model.heads + 1) if model.heads % n == 0]
    _refuse(
        model.kv_heads not in divisors,
        f"model.kv-heads must divide the {model.heads} heads: one of {divisors}, not {model.kv_heads}",
    )
    _refuse(model.context < 2, f"model.context must be at least 2 tokens, not {model.context}")
    _refuse(
        model.dropout is not None and not 0 <= model.dropout < 1,
        f"model.dropout must be at least 0 and below 1, not {model.dropout}",
    )


def check_rows(train: TrainRecipe, sft: SftRecipe, context: int) -> None:
    """Batches are made of whole rows: any other number of tokens would not be what is trained on."""
    for name, tokens in [("train.batch-tokens", train.batch_tokens), ("sft.batch-tokens", sft.batch_tokens)]:
        if tokens is None or tokens % context == 0:
            continue
        below, above = tokens // context * context, -(-tokens // context) * context
        instead = f"{below} or {above}" if below else f"at least {above}"
        raise ValueError(
            f"{name} must be a multiple of model.context, since rows have {context} tokens: {instead}, not {tokens}"
        )
    micro: Any = train.micro_batch_tokens
    _refuse(
        micro is not None and micro < context,
        f"train.micro-batch-tokens must hold a row of model.context: at least {context}, not {micro}",
    )


def _refuse(wrong: bool, message: str) -> None:
    if wrong:
        raise ValueError(message)
