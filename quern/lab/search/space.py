"""Search spaces over the fields of a recipe, from text such as `optim.matrix-lr=0.005..0.08:log`.

docs/sweeps.md has the forms. Values are checked against the types and ranges of the recipe's fields, and
quern/validate.py. A combination of values that no run can have is found only when its trial starts.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from quern.field_types import range_of
from quern.flags.check_flags import read_value
from quern.flags.recipe_flags import Refusal, field_names, why_none
from quern.lab.options import OF_TEXT, TRIALS
from quern.recipe import OPERATIONAL, Recipe
from quern.validate import annotation_of, check, flag, nearest

FORMS = (
    "write optim.matrix-lr=0.005..0.08:log or train.warmdown-share=0.3..0.9 (a range), "
    "train.batch-tokens=4096..16384:4096 (a range with a step), or model.windows=SSSL,L (choices)"
)
REFUSED = (
    *TRIALS,
    Refusal(f"{OF_TEXT} text.tokenizer", "changes the text or the validation text, so trials could not be compared"),
    Refusal("seed", "is what pairs the trials: set how many seeds with --seeds"),
    Refusal(" ".join(OPERATIONAL), "does not change what is learned"),
)
WORDS = {"true": True, "false": False, "none": None}
EDGE_SHARE = 0.05  # a value within this share of a range from its end is at the edge


@dataclass(frozen=True)
class Dimension:
    """The values of one field. text: as they were written; distribution: Optuna's over them."""

    name: str
    text: str
    distribution: Any

    @property
    def choices(self) -> tuple[Any, ...]:
        return getattr(self.distribution, "choices", ())

    @property
    def log(self) -> bool:
        """Whether a range is uniform in the logarithm."""
        return getattr(self.distribution, "log", False)

    def values(self) -> tuple[Any, ...]:
        """All values, for a grid; empty for a range without a step, such as one with :log."""
        of = self.distribution
        if self.choices or self.log or ":" not in self.text:
            return self.choices
        found = (of.low + index * of.step for index in range(round((of.high - of.low) / of.step) + 1))
        # 0.2 + 2 · 0.2 is above 0.6, which Optuna refuses.
        return tuple(one if isinstance(one, int) else min(of.high, float(f"{one:.12g}")) for one in found)

    def edge(self, value: Any) -> str | None:
        """Whether a value is at the "lower" or "upper" edge, beyond which the field could go: no limit of its range.
        Choices have edges only if they are at least three numbers."""
        known = (one for one in self.choices if not isinstance(one, bool))
        numbers, within = [one for one in known if isinstance(one, int | float)], 0.0
        if not self.choices:
            numbers, within = [self.distribution.low, self.distribution.high], EDGE_SHARE
        elif len(numbers) < 3 or value not in numbers:
            return None
        low, high = min(numbers), max(numbers)
        start, at, end = (math.log(one) if self.log else one for one in (low, value, high))
        share = (at - start) / (end - start)
        allowed = range_of(annotation_of(self.name))
        if share <= within and (allowed is None or low > allowed.ends[0]):
            return "lower"
        return "upper" if share >= 1 - within and (allowed is None or high < allowed.ends[1]) else None


Space = dict[str, Dimension]  # the dimensions of a search, by the names of their fields


def distributions(space: Space) -> dict[str, Any]:
    return {name: one.distribution for name, one in space.items()}


def point(space: Space, recipe: Recipe) -> dict[str, Any] | None:
    """The values of a resolved recipe, or None if the space does not contain them."""
    from optuna.trial import create_trial

    found = {name: attrgetter(name)(recipe) for name in space}
    try:
        create_trial(value=0.0, params=found, distributions=distributions(space))
    except ValueError:
        return None
    return found


def apply(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """The recipe with other values of some fields."""
    for name, value in values.items():
        part, _, own = name.rpartition(".")
        change: dict[str, Any] = {own: value}
        recipe = replace(recipe, **({part: replace(getattr(recipe, part), **change)} if part else change))
    return recipe


def read_space(entries: Sequence[str], recipe: Recipe) -> Space:
    """Reads entries, or the names of TOML files (.toml). Raises ValueError, with the right form, for a wrong one."""
    texts = [line for entry in entries for line in (_file(Path(entry)) if entry.endswith(".toml") else [entry])]
    if not texts:
        raise ValueError(f"the space is empty: give --space a .toml file or entries; {FORMS}")
    found: Space = {}
    for text in texts:
        one = _dimension(text, recipe)
        if one.name in found:
            raise ValueError(f"{flag(one.name)} is in the space twice: leave one of its entries out")
        found[one.name] = one
    return found


def _file(path: Path) -> list[str]:
    """The entries of a TOML file: a table for each part of the recipe, values as text or as a list of choices."""
    try:
        body = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    entries = []
    for name, value in body.items():
        for own, values in value.items() if isinstance(value, dict) else [("", value)]:
            words = map(str, values if isinstance(values, list) else [values])
            entries.append(f"{name}{own and '.'}{own}={','.join(words)}")
    return entries


def _dimension(entry: str, recipe: Recipe) -> Dimension:
    from optuna.distributions import CategoricalDistribution  # of an extra, without which the log shows records

    given, equals, text = (part.strip() for part in entry.partition("="))
    name = given.replace("-", "_")
    if not equals or not text:
        raise ValueError(f"'{entry}' has no values: {FORMS}")
    _refuse_field(name, recipe)
    part, _, own = name.rpartition(".")
    kind = get_type_hints(type(getattr(recipe, part) if part else recipe))[own]
    kinds = (str,) if get_origin(kind) is Literal else get_args(kind) or (kind,)  # (float, NoneType) for float | None
    body, _, how = text.partition(":")
    low, dots, high = body.partition("..")
    if dots:
        return _range(name, text, (low, high, how), kinds, recipe)
    choices = tuple(_value(word.strip(), kinds, entry) for word in text.split(","))
    if len(set(choices)) < max(2, len(choices)):
        raise ValueError(f"'{entry}' needs at least two choices, all different: {FORMS}")
    _check_values(name, choices, recipe)
    return Dimension(name, text, CategoricalDistribution(choices))


def _check_values(name: str, values: Sequence[Any], recipe: Recipe) -> None:
    for value in values:
        check(apply(recipe, {name: value}))


def _refuse_field(name: str, recipe: Recipe) -> None:
    known = list(field_names(recipe))
    why = partial(why_none, recipe=recipe, refusals=REFUSED, names=known)
    if reason := why(name):
        raise ValueError(f"{flag(name)} cannot be in the space: it {reason}")
    if name not in known:
        hint = nearest(flag(name), [flag(one) for one in known if why(one) is None])
        raise ValueError(f"the recipe has no field '{flag(name)}'{hint}: {FORMS}")


def _range(name: str, text: str, parts: tuple[str, str, str], kinds: tuple[type, ...], recipe: Recipe) -> Dimension:
    from optuna.distributions import FloatDistribution, IntDistribution

    whole, (low, high, how) = float not in kinds, parts
    wrong = f"'{flag(name)}={text}' is not a range"
    if int not in kinds and float not in kinds:
        raise ValueError(f"{wrong} that {flag(name)} could have, which is no number: {FORMS}")
    kind = int if whole else float
    try:
        ends = read_value(kind, low), read_value(kind, high)
        step = None if how == "log" or ":" not in text else read_value(kind, how)
    except ValueError as error:
        numbers = "whole numbers" if whole else "numbers"
        raise ValueError(f"{wrong}: LOW..HIGH, LOW..HIGH:log or LOW..HIGH:STEP, in {numbers}; {FORMS}") from error
    _check_values(name, ends, recipe)
    if ends[0] >= ends[1]:
        raise ValueError(f"{wrong}: its low end must be below its high end")
    if how == "log" and ends[0] <= 0:
        raise ValueError(f"{wrong}: with :log both ends must be above 0")
    steps = (ends[1] - ends[0]) / step if step and step > 0 else 0.0
    if step is not None and (steps < 1 or not math.isclose(steps, round(steps), rel_tol=1e-9)):
        raise ValueError(f"{wrong}: a whole number of steps of {how} must lead from {low} to {high}")
    make: Any = IntDistribution if whole else FloatDistribution
    return Dimension(name, text, make(*ends, how == "log", step or (1 if whole else None)))


def shown(value: Any, digits: int = 4) -> str:
    """A value of a field as text."""
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def _value(word: str, kinds: tuple[type, ...], entry: str) -> Any:
    named = WORDS.get(word.lower(), word)
    if type(named) in kinds:
        return named
    for kind in (int, float, str):
        with suppress(ValueError):
            if kind in kinds:
                return read_value(kind, word)
    names = {int: "a whole number", float: "a number", bool: "true or false", type(None): "none"}
    raise ValueError(f"'{word}' in '{entry}' must be {' or '.join(names[kind] for kind in kinds)}: {FORMS}")
