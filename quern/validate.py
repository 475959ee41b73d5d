"""Checks recipes: each invalid value raises a ValueError of one line that says what to do instead.

`resolve` runs all checks. Models check the limits of their own architecture, and stages the limits of the machine.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from glob import glob
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args, get_origin

from quern.field_types import UNIONS, Deferred, annotations_of, refuse_outside
from quern.recipe import PARTS, ConversationSource, Recipe, Resolved, ResolvedModel, SftRecipe, TrainRecipe
from quern.records import typed

_OTHERS = {"make": str | None, "conversations": list[ConversationSource] | None}  # callables are names
RecipeBody: Any = TypedDict(
    "RecipeBody",
    {name: PARTS.get(name, _OTHERS.get(name.partition("_")[0], kind)) for name, kind in annotations_of(Recipe).items()},  # pyright: ignore[reportGeneralTypeIssues]
    total=False,
)
"""The fields of `Recipe.to_json`."""
KINDS = {str: "a text", bool: "true or false"}
"""Types of fields, and their names in messages."""

NEAREST, ALIKE = 3, 0.65
"""The most suggestions for an unknown name, and the least similarity (difflib's ratio) of a suggestion."""
FILLED_IN = ("model.depth", "model.vocab_size", "model.bos")
"""Fields of the shape that are never set directly: they follow from `depth` and the tokenizer."""


OF_DATA = {"include": "data.include", "exclude": "data.exclude"}
"""Fields whose flags have another name, beside --data."""


def flag(name: str) -> str:
    """train.log_every → train.log-every, the spelling on the command line."""
    return OF_DATA.get(name, name.replace("_", "-"))


def data_paths(data: str) -> list[Path] | None:
    """The files and folders that `--data` names: one in each line, or a pattern such as texts/*.txt. None if a line
    names no file and no folder, as a public data set."""
    found: list[Path] = []
    for name in data.split("\n"):
        matching = [Path(name)] if Path(name).exists() else sorted(map(Path, glob(name, recursive=True)))
        if not matching:
            return None
        found += matching
    return found


def refuse_missing(name: str, path: str | Path | None) -> None:
    """Raises FileNotFoundError, with the name of the flag, for a path at which there is nothing."""
    if path is not None and not Path(path).exists():
        raise FileNotFoundError(f"--{flag(name)} {path}: there is no such file or folder")


def nearest(word: str, known: Collection[str]) -> str:
    """The known names that are most like a word that is none of them, as a part of a message."""
    bare = {name.lstrip("-/"): name for name in known}  # else -- makes short flags alike
    found = difflib.get_close_matches(word.lstrip("-/"), bare, NEAREST, ALIKE)
    return f"; nearest: {', '.join(bare[name] for name in found)}" if found else ""


def install(extra: str) -> str:
    """The command that installs the packages of an extra, for messages.

    It installs from the clone: the package index has another project with the name quern.
    """
    return f"in the folder of quern's clone, run .venv/bin/pip install -e '.[{extra}]'"


@contextmanager
def extra(name: str, needed: str) -> Iterator[None]:
    """The body imports packages of an extra. Without them, ImportError says why they are `needed`, how to get them."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{needed} ({error}): {install(name)}") from error


def check(recipe: Recipe) -> None:
    """Checks every value by itself, and that unused fields have their defaults, unless `resolve` has filled them in."""
    for name, value in recipe.callables().items():
        _refuse(
            not (isinstance(value, Deferred) or hasattr(value, "__qualname__")),
            f"{name} must be a function or a class, so that a saved run finds it again by its name, not {value!r}",
        )
    for part, kind in PARTS.items():
        value = getattr(recipe, part)
        _refuse(not isinstance(value, kind), f"{part} must be a {kind.__name__}, as in replace(BASELINE.{part}, …)")
    _check_fields(recipe, "")
    for name in recipe.unused:
        _refuse(annotation_of(name) is None, f"unused names {name!r}, which is no field of a recipe: leave it out")
        _refuse(not isinstance(recipe, Resolved) and is_set(recipe, name), f"{flag(name)} {why_unused(name, recipe)}")
    for part in PARTS:
        _check_fields(getattr(recipe, part), f"{part}.")
    for name, value in (("data", recipe.data), ("val", recipe.val), ("sft.tests", recipe.sft.tests)):
        _refuse(value is not None and not value.strip(), f"{name} is empty: name a file, a folder or a data set")
        _refuse("" in (value or "x").split("\n"), f"{name} has an empty name among others: leave it out")
    _check_sources(recipe)
    windows, head_dim = recipe.model.windows, recipe.model.head_dim
    _refuse(
        windows is not None and (set(windows) - set("SL") != set() or not windows),
        f"model.windows is a pattern of S (short) and L (long), such as SSSL, not '{windows}'",
    )
    _refuse(bool(head_dim and head_dim % 2), f"model.head-dim must be even for rotary embeddings, not {head_dim}")
    _refuse(
        bool(recipe.model.bigram_dropout) and not recipe.model.bigrams,
        "model.bigram-dropout leaves out pairs: set model.bigrams too, or leave it out",
    )
    _refuse(recipe.text.separator == "", "text.separator is empty: give the mark that ends a document")
    _refuse(
        not is_encoding(recipe.text.encoding),
        f"text.encoding is auto, utf-8, cp1252 or the like, not {recipe.text.encoding}",
    )
    _refuse(not recipe.text.column, "text.column is empty: name the column or the key that holds the text")
    _refuse(not recipe.text.split, "text.split is empty: name a split of the data set, such as train")


def is_encoding(name: str) -> bool:
    """Whether text can have an encoding of this name."""
    try:
        return name == "auto" or bool("a".encode(name))  # hex is a codec, but no encoding of text
    except (LookupError, ValueError):
        return False


def why_unused(name: str, recipe: Recipe) -> str:
    """The reason for a field that the recipe's callables do not read; it lists those that they do read."""
    part = name.rpartition(".")[0]
    names = (f"{part}.{f.name}" for f in (fields(getattr(recipe, part)) if part else ()))
    used = ", ".join(flag(other) for other in names if other not in recipe.unused and other not in FILLED_IN)
    return f"does nothing in the '{recipe.name}' recipe: leave it out{used and f'; of this kind it knows {used}'}"


def is_set(recipe: Recipe, name: str) -> bool:
    part, _, own = name.rpartition(".")
    body = getattr(recipe, part) if part else recipe
    value, default = getattr(body, own), type(body).__dataclass_fields__[own].default
    return value != default and not (value is False and default is None)  # off, where it would be on by itself


def refuse_set(recipe: Recipe, refusals: Iterable[tuple[str, str, str]]) -> None:
    """Raises ValueError if a recipe, such as that of a file, sets a field of `train` or `text` that a verb refuses.
    refusals: as `recipe_flags.Refusal`."""
    for name, reason, _ in refusals:
        if name.startswith(("train.", "text.")) and is_set(recipe, name):
            raise ValueError(f"{flag(name)}, which the recipe '{recipe.name}' sets, {reason}")


def check_body(body: Any) -> None:
    """Checks the JSON of a recipe: the type of each field, and the ranges of its numbers."""
    typed(body, RecipeBody)
    for part, kind in PARTS.items():
        _check_fields(typed(body.get(part, {}), kind), f"{part}.")
    for name, kind in annotations_of(Recipe).items():
        if body.get(name) is not None:
            refuse_outside(kind, body[name], flag(name))


def annotation_of(name: str) -> Any:
    """The annotation of a recipe's field, such as train.steps; None for another name."""
    part, _, own = name.rpartition(".")
    kind = PARTS.get(part) if part else Recipe
    return kind and annotations_of(kind).get(own)


def _check_fields(part: Any, prefix: str) -> None:
    """Checks the type, the range and the choices of every field. part: a recipe or a part of one."""
    for own, kind in annotations_of(type(part)).items():
        name, value, kinds = prefix + own, getattr(part, own), get_args(kind) if get_origin(kind) in UNIONS else (kind,)
        if value is None and type(None) in kinds:
            continue
        refuse_outside(kind, value, flag(name))
        if kinds[0] in KINDS:
            _refuse(not isinstance(value, kinds[0]), f"{flag(name)} must be {KINDS[kinds[0]]}, not {value!r}")
        if get_args(kinds[0]) == (str, ...):
            wrong = not isinstance(value, tuple | list) or not all(isinstance(one, str) for one in value)
            _refuse(wrong, f"{flag(name)} must be a tuple of texts, such as ('a', 'b'), not {value!r}")
        if get_origin(kinds[0]) is Literal:
            choices = get_args(kinds[0])
            _refuse(value not in choices, f"{flag(name)} must be one of {', '.join(choices)}, not {value}")


def _check_sources(recipe: Recipe) -> None:
    _refuse(recipe.conversations == (), "conversations is empty: name a file, a folder or a data set")
    for one in recipe.conversations or ():
        _refuse(not isinstance(one, ConversationSource), f"conversations holds {one!r}: name sources")
        _refuse(not one.source.strip(), "conversations is empty: name a file, a folder or a data set")
        _refuse(not one.split, f"split of {one.source} is empty: name a split of the data set, such as train")
        _refuse(one.column == "", f"column of {one.source} is empty: name what holds the list of messages")
        for name in ("repeats", "limit"):
            if (value := getattr(one, name)) is not None:
                refuse_outside(annotations_of(ConversationSource)[name], value, f"{name} of {one.source}")


def check_shape(model: ResolvedModel) -> None:
    """Checks how the numbers of a resolved model depend on each other."""
    _refuse(
        model.key_offset and model.head_dim % 4 != 0,
        f"model.key-offset shifts quarters of a head: model.head-dim must be a multiple of 4, not {model.head_dim}",
    )
    divisors = [n for n in range(1, model.heads + 1) if model.heads % n == 0]
    _refuse(
        model.kv_heads not in divisors,
        f"model.kv-heads must divide the {model.heads} heads: one of {divisors}, not {model.kv_heads}",
    )


def check_rows(train: TrainRecipe, sft: SftRecipe, context: int, replicas: int) -> None:
    """Checks that batches consist of whole rows, at least one for each replica."""
    for name, tokens in [("train.batch-tokens", train.batch_tokens), ("sft.batch-tokens", sft.batch_tokens)]:
        if tokens is None:
            continue
        below, above = tokens // context * context, -(-tokens // context) * context
        instead = f"{below} or {above}" if below else f"at least {above}"
        _refuse(
            tokens % context != 0,
            f"{name} must be a multiple of model.context, since rows have {context} tokens: {instead}, not {tokens}",
        )
        _refuse(
            tokens < replicas * context,
            f"{name} must hold a row of {context} tokens for each of {replicas} replicas: at least "
            f"{replicas * context}, not {tokens}; or use fewer ranks",
        )
    micro: Any = train.micro_batch_tokens
    _refuse(
        micro is not None and micro < context,
        f"train.micro-batch-tokens must hold a row of model.context: at least {context}, not {micro}",
    )


def _refuse(wrong: bool, message: str) -> None:
    if wrong:
        raise ValueError(message)
