"""Types of fields: numbers with their ranges (`steps: Count`), sources of conversations, functions of quern by name.

Flags, recipes, saved files and HTTP read the ranges in the annotations. The ranges exclude values that no run could use
(NaN, infinity, values that overflow later); limits that depend on other fields are in `validate.py`. A text beside the
interval ends the message about a value outside it.
"""

from __future__ import annotations

import math
import pkgutil
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from types import UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from annotated_types import Interval

Count = Annotated[int, Interval(ge=1, le=10**12)]
"""Steps and tokens."""
Few = Annotated[int, Interval(ge=1, le=10**6)]
"""Processes, devices, questions."""
Seed = Annotated[int, Interval(ge=0, le=10**18)]
Threads = Annotated[int, Interval(ge=1, le=4096)]
Port = Annotated[int, Interval(ge=0, le=2**16 - 1)]
Positive = Annotated[float, Interval(gt=0, le=1e9)]
Amount = Annotated[float, Interval(gt=0, le=1e6)]
"""Megabytes, minutes, epochs."""
Rate = Annotated[float, Interval(ge=0, le=1000)]
Share = Annotated[float, Interval(ge=0, le=1)]
SHOWN_CHARACTERS = 40
UNIONS = (Union, UnionType)


@dataclass(frozen=True)
class Range:
    """A range of numbers. whole: only whole numbers; instead: what to do instead of a value outside the range."""

    interval: Interval
    whole: bool
    instead: str = ""

    @property
    def ends(self) -> tuple[Any, Any]:
        """The lowest and the highest number, or the open ends."""
        low, high = self.interval.ge, self.interval.le
        return self.interval.gt if low is None else low, self.interval.lt if high is None else high

    def __contains__(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return False
        low, high = self.ends
        over = value >= low if self.interval.gt is None else value > low
        return over and (value <= high if self.interval.lt is None else value < high)

    def __str__(self) -> str:
        low, high = (f"{int(end):,}" if end == int(end) < 2**53 or self.whole else f"{end:g}" for end in self.ends)
        kind = "a whole number" if self.whole else "a number"
        if self.interval.gt is not None:
            return f"{kind} above {low} and at most {high}"
        return f"{kind} of at least {low} and below {high}" if self.interval.lt else f"{kind} between {low} and {high}"


@cache
def annotations_of(kind: type) -> Mapping[str, Any]:
    """The annotations of a dataclass's fields, with their ranges."""
    return get_type_hints(kind, include_extras=True)


def range_of(annotation: Any) -> Range | None:
    """The range in the annotation of a number, an optional number, or several numbers."""
    marks = getattr(annotation, "__metadata__", ())
    if interval := next((mark for mark in marks if isinstance(mark, Interval)), None):
        instead = next((mark for mark in marks if isinstance(mark, str)), "")
        return Range(interval, get_args(annotation)[0] is int, instead)
    inside = get_args(annotation)[: 1 if get_origin(annotation) is Annotated else None]
    return next(filter(None, map(range_of, inside)), None)


def refuse_outside(annotation: Any, value: Any, shown_name: str) -> None:
    """Raises ValueError for a value outside the range in a field's annotation, with this name of the field. Without a
    range, any finite number is in range."""
    allowed = range_of(annotation)
    if allowed is None and isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{shown_name} must be a finite number, not {value}")
    if allowed is not None and value not in allowed:
        given = repr(value)
        given = given if len(given) <= SHOWN_CHARACTERS else f"{given[:SHOWN_CHARACTERS]}…"
        instead = f": {allowed.instead}" if allowed.instead else ""
        raise ValueError(f"{shown_name} must be {allowed}, not {given}{instead}")


@dataclass(frozen=True)
class ConversationSource:
    """A source of conversations, and how many of them an epoch has. As text: NAME, NAME,repeats=4 or NAME,limit=1000.

    Args:
        source: One of `BUILT_IN_CONVERSATIONS`, a public data set, or a file or a folder.
        repeats: How often an epoch has each conversation; of 2.5, a random half of them has a third turn.
        limit: Only the first so many conversations are read; None reads all.
        split: The split of a data set of the Hugging Face Hub.
        column: The column or key of the list of messages; None for the known shapes. In WhatsApp's export, the person
            whom the model learns to write as.
    """

    source: str
    repeats: Annotated[float, Interval(gt=0, le=10**4)] = 1.0
    limit: Count | None = None
    split: str = "train"
    column: str | None = None

    @staticmethod
    def parse(text: str) -> ConversationSource:
        """Raises ValueError for an unknown or repeated option, or a wrong value."""
        values: dict[str, Any] = {}
        rest = text
        while match := re.fullmatch(r"(.*),(\w+)=([^,=]*)", rest, re.DOTALL):
            rest, name, value = match.groups()
            if name not in SOURCE_OPTIONS or name in values:
                raise ValueError(f"{text!r} sets {name}: give {', '.join(SOURCE_OPTIONS)} as NAME=VALUE, each once")
            try:
                values[name] = SOURCE_OPTIONS[name](value)
            except ValueError as error:
                raise ValueError(
                    f"{text!r}: {name} must be {'a whole number' if name == 'limit' else 'a number'}, not {value!r}"
                ) from error
        return ConversationSource(rest, **values)

    def __str__(self) -> str:
        changed = ((f.name, getattr(self, f.name)) for f in fields(self)[1:] if getattr(self, f.name) != f.default)
        return self.source + "".join(f",{name}={f'{v:g}' if name == 'repeats' else v}" for name, v in changed)


SOURCE_OPTIONS: Mapping[str, Callable[[str], Any]] = {"repeats": float, "limit": int, "split": str, "column": str}


CONSTRUCTORS = frozenset(
    "quern.model.gpt:GPT quern.model.llama:Llama quern.model.unet:UNet quern.optim.groups:table "
    "quern.optim.schedule:warmup_stable_decay quern.recipes.llama:rules quern.recipes.llama_adamw:rules "
    "quern.recipes.unet:rules quern.recipes.unet:schedule".split()
)
"""Callables that a saved recipe may name; all others come from the recipe's own file."""


class Deferred(NamedTuple):
    """A function or class of quern that is imported when it is used, so that a recipe can be read without PyTorch."""

    path: str  # "module:name", one of `CONSTRUCTORS`

    def __call__(self, *arguments: Any) -> Any:
        return imported(self)(*arguments)

    @staticmethod
    def of(code: Callable[..., Any]) -> Callable[..., Any]:
        """Returns one of `CONSTRUCTORS` as its name, and other code itself."""
        known = hasattr(code, "__qualname__") and code_path(code) in CONSTRUCTORS
        return Deferred(code_path(code)) if known else code

    @staticmethod
    def read(path: str) -> Deferred:
        """Returns one of `CONSTRUCTORS`. Raises ValueError for another name."""
        if path not in CONSTRUCTORS:
            raise ValueError(f"'{path}' lives outside quern: hand over the recipe's Python file as well")
        return Deferred(path)


def imported(code: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function or class itself."""
    return pkgutil.resolve_name(code.path) if isinstance(code, Deferred) else code


def code_path(code: Callable[..., Any]) -> str:
    """Returns the name of a function or class, "module:name"."""
    return code.path if isinstance(code, Deferred) else f"{code.__module__}:{code.__qualname__}"
