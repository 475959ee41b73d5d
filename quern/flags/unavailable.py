"""Which flags are refused, and why: one table for all verbs, and the functions that read it.

A rule without `when` removes the flag from the help of its verbs and refuses it on the command line. A rule with `when`
depends on other values: it refuses a field that is set although it has no effect. A recipe adds the fields that its
callables do not read (`Recipe.unused`); no verb has flags for them, and `validate.check` refuses other values than the
defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from quern.recipe import FOR_FINE_TUNING, FOR_RL, IN_FINE_TUNING, Recipe
from quern.validate import flag, is_set, why_unused

ALL = ""
"""Every field of the recipe, or every verb."""


class Rule(NamedTuple):
    """Flags that some verbs refuse.

    Args:
        verbs: Names of verbs, separated by commas.
        names: Fields, parts of the recipe or flags, separated by spaces; a rule with `when` has one field.
        reason: The message after the flag's name.
        but: Exceptions from `names`.
        when: Takes the recipe and whether its data is token files; returns whether the field has no effect.
    """

    verbs: str
    names: str
    reason: str
    but: str = ""
    when: Callable[[Recipe, bool], bool] | None = None

    def covers(self, name: str, verb: str, recipe: Recipe) -> bool:
        if self.verbs != ALL and verb not in self.verbs.split(","):
            return False
        return (_has(recipe, name) if self.names == ALL else _within(name, self.names)) and not _within(name, self.but)


FINE_TUNING = " ".join(FOR_FINE_TUNING)
_TRIALS = "lab compare,lab ladder,lab calibrate,lab sweep,lab scaling"
_TRAIN = "pretrain,run,grug train," + _TRIALS
_OTHER_VERB = "does nothing in `quern {verb}`: give it to the verb that trains"
_OF_THE_RUN = "belongs to the run's recipe and cannot change: leave it out"
_TOKENIZED = "is for a tokenizer that is trained on the text, and this one is there already: leave it out"


def _has_tokenizer(recipe: Recipe, tokens: bool) -> bool:
    return tokens or recipe.text.tokenizer is not None


RULES = (
    Rule("pretrain,sft,run,grug train," + _TRIALS, "rl", "is for reinforcement learning: give it to `quern rl`"),
    Rule("prepare,tokenizer", FINE_TUNING, _OTHER_VERB),
    Rule("prepare,tokenizer", ALL, _OTHER_VERB, but="depth data val shards seed text"),
    Rule("tokenizer", "to dir engine ray", "is for `quern prepare`"),
    Rule(
        "tokenizer,sft,rl,evaluate,grug train",
        "workers",
        "does nothing in `quern {verb}`: give it to `quern prepare`, `quern pretrain` or `quern run`, which turn text "
        "into tokens",
    ),
    Rule("tokenizer", "text.tokenizer", "names a tokenizer, and `quern tokenizer` trains one: leave it out"),
    Rule(_TRIALS, FINE_TUNING, "is for fine-tuning, and a study compares pretraining"),
    Rule(
        _TRIALS,
        "train.minutes train.save_every train.keep train.save_in_background train.log_every train.eval_every data_seed",
        "does nothing in a study: its trials run for --train.steps, leave no checkpoints, and have the study's seeds",
    ),
    Rule(_TRAIN + ",lab plan", "model.depth", "follows from --depth"),
    Rule(_TRAIN, "model.vocab_size", "follows from the tokenizer: set --text.vocab-size"),
    Rule(_TRAIN, "model.bos", "follows from the tokenizer"),
    Rule("pretrain", FINE_TUNING, "is for fine-tuning: give it to `quern sft` or `quern run`"),
    Rule("pretrain,sft,rl", "questions", "is for `quern evaluate` and `quern run`"),
    Rule(
        "sft",
        ALL,
        "is decided by the base run, whose model, text and seed `quern sft` takes over: leave it out, "
        "or pretrain another run with it (`quern pretrain --run NAME`) and fine-tune that one",
        but=" ".join((*FOR_FINE_TUNING, *IN_FINE_TUNING)),
    ),
    Rule(
        "rl",
        ALL,
        "is decided by the run, whose model, text and seed `quern rl` takes over: leave it out",
        but=" ".join((*FOR_RL, *IN_FINE_TUNING)),
    ),
    Rule("grug train", FINE_TUNING, "is for fine-tuning: export the model, and give it to `quern sft`"),
    Rule("grug train", "train.minutes", "is for `quern pretrain`: the JAX twin trains for --train.steps"),
    Rule("grug train", "train.fp8", "is for `quern pretrain`: the JAX twin has no FP8"),
    Rule("grug train", "train.recompute", "is for `quern pretrain`: the JAX twin keeps all activations"),
    Rule(
        "grug train", "train.optimizer_memory", "is for `quern pretrain`: the JAX twin keeps all state on its devices"
    ),
    Rule("grug train", "train.grad_dtype", "is for `quern pretrain`: the JAX twin sums gradients in fp32"),
    Rule("grug train", "train.save_in_background", "is not needed: the JAX twin always saves in the background"),
    Rule("evaluate,serve", ALL, _OF_THE_RUN),
    Rule("complete,chat", ALL, _OF_THE_RUN, but="seed"),  # --seed is that of the sampling
    Rule(ALL, "name", "comes with the recipe: to name the run, use --run"),
    Rule(ALL, "unused", "comes with the recipe's file"),
    Rule(
        ALL,
        "text.column",
        "names what holds the text in a --data of your own that is text: leave it out",
        when=lambda recipe, tokens: recipe.data == "tinyworld" or tokens,
    ),
    Rule(
        ALL,
        "text.separator",
        "separates the documents of .txt and .md files of your own: leave it out",
        when=lambda recipe, tokens: recipe.data == "tinyworld" or tokens,
    ),
    Rule(
        ALL,
        "text.split",
        "is the split of a data set of the Hugging Face Hub (--data hf:OWNER/NAME): leave it out",
        when=lambda recipe, tokens: not recipe.data.startswith("hf:"),
    ),
    Rule(
        ALL,
        "shards",
        "is the number of files of a public data set, and --data is none: leave it out",
        when=lambda recipe, tokens: recipe.data == "tinyworld" or Path(recipe.data).exists(),
    ),
    Rule(ALL, "text.vocab_size", _TOKENIZED, when=_has_tokenizer),
    Rule(ALL, "text.digits", _TOKENIZED, when=_has_tokenizer),
    Rule(ALL, "text.tokenizer_megabytes", _TOKENIZED, when=_has_tokenizer),
    Rule(
        ALL,
        "text.tinyworld_megabytes",
        "is the size of the built-in world, and --data names another text: leave one of them out",
        when=lambda recipe, tokens: recipe.data != "tinyworld",
    ),
    Rule(
        ALL,
        "text.tinyworld_conversations",
        "is for the built-in conversations, and --conversations names others: leave one of them out",
        when=lambda recipe, tokens: not recipe.has_built_in_conversations,
    ),
    Rule(
        ALL,
        "val",
        "is for a --data of your own: the built-in world makes its own validation text",
        when=lambda recipe, tokens: recipe.data == "tinyworld",
    ),
    Rule(
        ALL,
        "train.steps",
        "and --train.minutes contradict each other: give one of them",
        when=lambda recipe, tokens: recipe.train.minutes is not None,
    ),
    Rule(
        ALL,
        "train.horizon_ratio",
        "does nothing where the length of the run is given: leave it out",
        when=lambda recipe, tokens: (
            recipe.train.minutes is not None or None not in (recipe.train.steps, recipe.train.batch_tokens)
        ),
    ),
    Rule(
        ALL,
        "sft.epochs",
        "and --sft.steps contradict each other: give one of them",
        when=lambda recipe, tokens: recipe.sft.steps is not None,
    ),
)


def why_no_flag(name: str, verb: str, recipe: Recipe) -> str | None:
    """The reason why a verb has no flag of this name; None if no rule refuses it."""
    for rule in RULES:
        if rule.when is None and rule.covers(name, verb, recipe):
            return rule.reason.format(verb=verb)
    return why_unused(name, recipe) if name in recipe.unused else None


def refuse_idle(recipe: Recipe, verb: str, named: Collection[str], tokens: bool, saved: bool = False) -> None:
    """Refuses a field that is set and has no effect because of the values of other fields.

    Args:
        recipe: The recipe that the flags resulted in.
        verb: The verb.
        named: The fields that flags name.
        tokens: The recipe's data is token files.
        saved: The recipe was saved with a run, where every field is set: only `named` fields count.

    Raises:
        ValueError: Naming the first such field.
    """
    for rule in RULES:
        if rule.when is None or not rule.covers(rule.names, verb, recipe):
            continue
        set_here = rule.names in named or (not saved and is_set(recipe, rule.names))
        if set_here and rule.when(recipe, tokens):
            raise ValueError(f"--{flag(rule.names)} {rule.reason}")


def _has(recipe: Recipe, name: str) -> bool:
    part, _, own = name.rpartition(".")
    return own in getattr(getattr(recipe, part, None) if part else recipe, "__dataclass_fields__", ())


def _within(name: str, parts: str) -> bool:
    """Whether the name is one of these, or a field of one of these parts."""
    return any(f"{name}.".startswith(f"{part}.") for part in parts.split())
