"""Fields that are set and have no effect because of the values of other fields: the reasons, and the refusal."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from quern.recipe import Recipe
from quern.validate import flag, is_set

_TOKENIZED = "is for a tokenizer that is trained on the text, and this one is there already: leave it out"


def _has_tokenizer(recipe: Recipe, tokens: bool) -> bool:
    return tokens or recipe.text.tokenizer is not None


IDLE: Mapping[str, tuple[str, Callable[[Recipe, bool], bool]]] = {
    "text.column": (
        "names what holds the text in a --data of your own that is text: leave it out",
        lambda recipe, tokens: recipe.data == "tinyworld" or tokens,
    ),
    "text.separator": (
        "separates the documents of .txt and .md files of your own: leave it out",
        lambda recipe, tokens: recipe.data == "tinyworld" or tokens,
    ),
    "text.split": (
        "is the split of a data set of the Hugging Face Hub (--data hf:OWNER/NAME): leave it out",
        lambda recipe, tokens: not recipe.data.startswith("hf:"),
    ),
    "shards": (
        "is the number of files of a public data set, and --data is none: leave it out",
        lambda recipe, tokens: recipe.data == "tinyworld" or Path(recipe.data).exists(),
    ),
    "text.vocab_size": (_TOKENIZED, _has_tokenizer),
    "text.digits": (_TOKENIZED, _has_tokenizer),
    "text.tokenizer_megabytes": (_TOKENIZED, _has_tokenizer),
    "text.tinyworld_megabytes": (
        "is the size of the built-in world, and --data names another text: leave one of them out",
        lambda recipe, tokens: recipe.data != "tinyworld",
    ),
    "text.tinyworld_conversations": (
        "is for the built-in conversations, and --conversations names others: leave one of them out",
        lambda recipe, tokens: not recipe.has_built_in_conversations,
    ),
    "val": (
        "is for a --data of your own: the built-in world makes its own validation text",
        lambda recipe, tokens: recipe.data == "tinyworld",
    ),
    "train.steps": (
        "and --train.minutes contradict each other: give one of them",
        lambda recipe, tokens: recipe.train.minutes is not None,
    ),
    "train.horizon_ratio": (
        "does nothing where the length of the run is given: leave it out",
        lambda recipe, tokens: (
            recipe.train.minutes is not None or None not in (recipe.train.steps, recipe.train.batch_tokens)
        ),
    ),
    "sft.epochs": (
        "and --sft.steps contradict each other: give one of them",
        lambda recipe, tokens: recipe.sft.steps is not None,
    ),
}
"""For a field: the message after its name, and whether it has no effect in a recipe, whose data may be token files."""


def refuse_idle(recipe: Recipe, named: Collection[str], tokens: bool, saved: bool = False) -> None:
    """Refuses a field that is set and has no effect.

    Args:
        recipe: The recipe that the flags resulted in.
        named: The fields that flags name.
        tokens: The recipe's data is token files.
        saved: The recipe was saved with a run, where every field is set: only `named` fields count.

    Raises:
        ValueError: Naming the first such field.
    """
    for name, (reason, is_idle) in IDLE.items():
        if (name in named or (not saved and is_set(recipe, name))) and is_idle(recipe, tokens):
            raise ValueError(f"--{flag(name)} {reason}")
