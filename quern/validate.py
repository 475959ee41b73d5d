"""Which recipes are refused, each with one line that says what to do instead; `resolve` asks for all of it.

What a model itself refuses (the sizes that its architecture can do without) is not here, nor what a machine lacks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from quern.bounds import BOUNDS, refuse_outside
from quern.recipe import ModelRecipe, Recipe, SftRecipe, TrainRecipe

PARTS = ("text", "model", "optim", "train", "sft")
KINDS: dict[str, tuple[type, str]] = {"str": (str, "a text"), "bool": (bool, "true or false")}
"""A field's annotation, the type of its values, and what a message calls them; the range of numbers is in bounds.py."""
FILLED_IN = ("model.depth", "model.vocab_size", "model.bos")
"""Fields of the shape that are never set by themselves: they follow the dial and the tokenizer."""


def flag(name: str) -> str:
    """train.log_every → train.log-every, as it is typed."""
    return name.replace("_", "-")


def install(extra: str) -> str:
    """The command that installs packages of an extra, for messages: from the clone, since the package index has
    another project under the name quern."""
    return f"in the folder of quern's clone, run .venv/bin/pip install -e '.[{extra}]'"


def check(recipe: Recipe) -> None:
    """Every value by itself, and fields that this recipe does not use. recipe: resolved or not."""
    train, sft = recipe.train, recipe.sft
    for name in recipe.unused:
        part, _, field = name.partition(".")
        body = getattr(recipe, part)
        default = next(f.default for f in fields(body) if f.name == field)
        _refuse(getattr(body, field) != default, unused(recipe, name))
    for part in (None, *PARTS):
        _check_fields(getattr(recipe, part) if part else recipe, f"{part}." if part else "")
    for name in ("data", "val", "conversations"):
        value = getattr(recipe, name)
        _refuse(value is not None and not value.strip(), f"{name} is empty: name a file, a folder or a data set")
    _refuse(not recipe.text.column, "text.column is empty: name the column or the key that holds the text")
    packings = ("best-fit", "greedy-crop", "greedy-pad", "first-fit-decreasing", "stream")
    _refuse(
        train.packing not in packings,
        f"train.packing must be one of {', '.join(packings)}, not {train.packing}",
    )
    _refuse(train.fp8 not in ("off", "head", "all"), f"train.fp8 must be off, head or all, not {train.fp8}")
    _refuse(
        train.grad_dtype not in ("compute", "fp32"), f"train.grad-dtype must be compute or fp32, not {train.grad_dtype}"
    )
    _refuse(sft.too_long not in ("crop", "drop"), f"sft.too-long must be crop or drop, not {sft.too_long}")


def check_body(body: Any) -> None:
    """Raises ValueError where the JSON of a recipe is no recipe at all, or a number in it is none or out of range."""
    _refuse(not isinstance(body, dict), "it holds no JSON object")
    for part in PARTS:
        values = body.get(part, {})
        _refuse(not isinstance(values, dict), f"{part} holds no JSON object")
        for name, value in values.items():
            if value is not None and f"{part}.{name}" in BOUNDS:
                refuse_outside(f"{part}.{name}", value, flag(f"{part}.{name}"))


def _check_fields(part: Any, prefix: str) -> None:
    """The type and the range of every field by itself. part: a recipe, or a part of one."""
    for f in fields(part):
        name, value = prefix + f.name, getattr(part, f.name)
        kind, _, optional = str(f.type).partition(" | ")
        if value is None and optional == "None":
            continue
        if kind in ("int", "float"):
            refuse_outside(name, value, flag(name))
        elif kind in KINDS:
            of, called = KINDS[kind]
            _refuse(not isinstance(value, of), f"{flag(name)} must be {called}, not {value!r}")


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
