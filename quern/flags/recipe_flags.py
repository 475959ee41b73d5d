"""The fields of a recipe as flags.

Fields without a flag (callables, and those that the verb's `refusals` name) are not in the help. On the command line
the latter are refused with the reason, and so are fields that have no effect because of the values of others (`_idle`).
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from functools import cached_property, partial
from itertools import takewhile
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from quern.flags import check_flags
from quern.recipe import FOR_FINE_TUNING, Recipe
from quern.resolve import resolve
from quern.validate import OF_DATA, data_paths, flag, is_set, refuse_missing, why_unused

FIELDS_OF_DATA = {own: field for field, own in OF_DATA.items()}
ALL = ""
"""Every field of the recipe."""


class Refusal(NamedTuple):
    """Flags that a verb refuses and does not show: fields, parts or flags, except those in `but`. reason: the message
    after the flag's name, where {verb} is the verb."""

    names: str
    reason: str
    but: str = ""


EVERYWHERE = (
    Refusal("name", "comes with the recipe: to name the run, use --run"),
    Refusal("unused", "comes with the recipe's file"),
)
FOLLOWING = (
    Refusal("model.depth", "follows from --depth"),
    Refusal("model.vocab_size", "follows from the tokenizer: set --text.vocab-size"),
    Refusal("model.bos", "follows from the tokenizer"),
)
"""Fields of the shape that a verb which trains fills in."""
FINE_TUNING = " ".join(FOR_FINE_TUNING)
RL = Refusal("rl", "is for reinforcement learning: give it to `quern rl`")
OFTEN = "depth data conversations train.steps train.minutes"
"""The fields of a recipe that --help shows, with those of the part that has the verb's name; --help-all shows all."""
WORKERS = Refusal(
    "workers",
    "does nothing in `quern {verb}`: give it to `quern prepare`, `quern pretrain` or `quern run`, which turn text "
    "into tokens",
)
QUESTIONS = Refusal("questions", "is for `quern evaluate` and `quern run`")


def own(*names: str) -> tuple[Refusal, ...]:
    """Refuses fields of `train` that the verb's part of the recipe has too."""
    why = "belongs to pretraining: leave it out, or give --{verb}."
    return tuple(Refusal(f"train.{name}", why + flag(name)) for name in names)


class Arguments(tuple[str, ...]):
    """The words of a command line after its verb: recipes, then flags with their values. They are read once."""

    @cached_property
    def recipes(self) -> tuple[str, ...]:
        """The words before the first flag."""
        return tuple(takewhile(lambda word: not word.startswith("-"), self))

    @cached_property
    def flags(self) -> tuple[str, ...]:
        return self[len(self.recipes) :]

    @cached_property
    def asks_for_help(self) -> bool:
        return not check_flags.HELP.isdisjoint(self)

    @cached_property
    def given(self) -> Mapping[str, list[str]]:
        """Field → the words that give it: train.log_every → --train.log-every=5; no_x → x."""
        found: dict[str, list[str]] = {}
        words: list[str] = []
        for word in self.flags:
            if word.startswith("--"):
                part, dot, name = word[2:].partition("=")[0].replace("-", "_").rpartition(".")
                field = part + dot + name.removeprefix("no_")
                words = found.setdefault(FIELDS_OF_DATA.get(field, field), [])
            words.append(word)
        return found

    def command(self, verb: str) -> str:
        """The command with this verb, as it can be typed again."""
        return shlex.join(["quern", *verb.split(), *self])

    def value(self, field: str) -> str | None:
        """The value of a flag; the last one counts."""
        words = self.given.get(field, [])
        at = max((at for at, word in enumerate(words) if word.startswith("--")), default=0)
        _, equals, value = words[at].partition("=") if words else ("", "", "")
        return value if equals else next(iter(words[at + 1 : at + 2]), None)

    def repeated(self, fields: Collection[str]) -> list[str]:
        """The flags of these fields with their values, to repeat them in another command."""
        return [word for field, words in self.given.items() if field in fields for word in words]


F = TypeVar("F")


def parse(flags: type[F], recipe: Recipe, arguments: Arguments, *, verb: str, description: str = "") -> F:
    """Reads the flags of a verb.

    Args:
        flags: A dataclass with the verb's options; its field `recipe` holds a recipe, and its class attribute
            `refusals`, if it has one, the `Refusal`s of the verb.
        recipe: The recipe whose fields the flags change.
        arguments: The command line after the verb. Its recipes are read already.

    Raises:
        ValueError: A flag is refused; see also `check_flags.check`.
        SystemExit: After the help (code 0).
    """
    why = partial(
        why_none, recipe=recipe, refusals=getattr(flags, "refusals", ()), names=frozenset(field_names(recipe))
    )
    for name in arguments.given:
        if reason := why(name):
            raise ValueError(f"--{flag(name)} {reason.format(verb=verb)}")
    offered = []
    for one in check_flags.flags_of(flags, recipe=recipe):
        part, *own = one.path
        if part == "recipe" and why(name := ".".join(own)) is None:
            text = name == "data"  # names, one in each line
            default = tuple(recipe.data.split("\n")) if text else one.default
            rare = not _within(name, f"{OFTEN} {verb.replace(' ', '-')}")
            offered.append(replace(one, many=one.many or text, default=default, rare=rare))
        elif part != "recipe":
            offered.append(one)
    if arguments.asks_for_help:
        filled = recipe
        with suppress(ValueError):  # which the command without --help refuses
            filled = resolve(recipe)
        offered = [replace(one, told=_default(one, filled, verb in ("sft", "rl"))) for one in offered]
        check_flags.show_help(offered, arguments, f"quern {verb}", description)
    given = check_flags.check(offered, arguments.flags, f"quern {verb}")
    if "data" in given.get("recipe", ()):
        given["recipe"]["data"] = "\n".join(given["recipe"]["data"])
    return check_flags.made(flags, given, recipe=recipe)


def why_none(name: str, recipe: Recipe, refusals: Iterable[Refusal], names: Collection[str]) -> str | None:
    """The reason why a verb with these refusals has no flag of this name, or None. names: all fields of the recipe."""
    for rule in (*EVERYWHERE, *refusals):
        covered = name in names if rule.names == ALL else _within(name, rule.names)
        if covered and not _within(name, rule.but):
            return rule.reason
    return why_unused(name, recipe) if name in recipe.unused else None


def _within(name: str, parts: str) -> bool:
    """Whether the name is one of these, or a field of one of these parts."""
    return any(f"{name}.".startswith(f"{part}.") for part in parts.split())


def field_names(part: Any, prefix: str = "") -> Iterator[str]:
    """The names of all fields of a recipe that a flag could set, such as train.steps."""
    for f in fields(part):
        value = getattr(part, f.name)
        if is_dataclass(value):
            yield from field_names(value, f"{prefix}{f.name}.")
        elif not (callable(value) or f.name.startswith("make_")):
            yield prefix + f.name


def _default(one: check_flags.Flag, filled: Recipe, of_the_run: bool) -> str | None:
    """The default of a recipe's field that is None, as the help shows it."""
    if one.path[0] != "recipe" or one.default is not None:
        return None
    value = attrgetter(".".join(one.path[1:]))(filled)
    if value is None:
        return "(default: unset)"
    shown = str(value) if isinstance(value, bool) else f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"
    return "(default: derived from the run)" if of_the_run else f"(default: {shown}; follows)"


REWARDS_OF_FILES = ("gsm8k", "programs")
"""The environments of rl/environment.py that read the files of `rl.data`."""
PATHS = ("rl.data", "sft.tests", "val")
"""Fields that must name a file or a folder."""


def refuse_idle(recipe: Recipe, named: Collection[str], tokens: bool, saved: bool = False) -> None:
    """Raises ValueError for a field that is set and has no effect, FileNotFoundError for one that names no file.

    tokens: the data is token files; saved: the recipe was saved with a run, where every field is set, so that only
    `named` fields count.
    """
    begun = "from" in named  # by another run, which has a tokenizer
    for names, reason in _idle(recipe, tokens, begun):
        for name in names.split():
            if name in named or (not (saved or begun) and is_set(recipe, name)):
                raise ValueError(f"--{flag(name)} {reason}")
    for name in set(PATHS).intersection(named):
        refuse_missing(name, attrgetter(name)(recipe))


def _idle(recipe: Recipe, tokens: bool, begun: bool) -> Iterator[tuple[str, str]]:
    """Fields that have no effect because of the values of others, and the message after their names."""
    train, data, is_tinyworld = recipe.train, recipe.data, recipe.data == "tinyworld"
    if is_tinyworld or tokens:
        of_files = "text.column text.separator text.encoding include exclude"
        yield of_files, "is for files of text in a --data of your own: leave it out"
    there = data_paths(data)
    if not any(map(Path.is_dir, there or ())):
        yield "include exclude", "chooses files in folders, and --data names none that exist: name one, or leave it out"
    if tokens or begun or recipe.text.tokenizer is not None:
        trained = "is for a tokenizer that is trained on the text, and this one is there already: leave it out"
        yield "text.vocab_size text.digits text.tokenizer_megabytes", trained
    if not data.startswith("hf:"):
        yield "text.split", "is the split of a data set of the Hugging Face Hub (--data hf:OWNER/NAME): leave it out"
    if recipe.shards and (is_tinyworld or "\n" in data or there):
        yield "shards", "is the number of files of a public data set, and --data is none: leave it out"
    if is_tinyworld:
        yield "val", "is for a --data of your own: the built-in world makes its own validation text"
    else:
        built_in = "is the size of the built-in world, and --data names another text: leave one of them out"
        yield "text.tinyworld_megabytes", built_in
    if not recipe.has_built_in_conversations:
        built_in = "is for the built-in conversations, and --conversations names others: leave one of them out"
        yield "text.tinyworld_conversations", built_in
    if train.minutes is not None:
        yield "train.steps", "and --train.minutes contradict each other: give one of them"
    if train.minutes is not None or None not in (train.steps, train.batch_tokens):
        yield "train.horizon_ratio", "does nothing where the length of the run is given: leave it out"
    if recipe.sft.steps is not None:
        yield "sft.epochs", "and --sft.steps contradict each other: give one of them"
    if not {*REWARDS_OF_FILES} & {*recipe.rl.rewards}:
        yield "rl.data", f"is for --rl.rewards {' and '.join(REWARDS_OF_FILES)}: name one of them, or leave it out"
