"""Flags as they were typed, checked before tyro reads them: what is wrong with one is said in one line.

Known are the flags of a dataclass (numbers, choices, switches and texts, and tuples of these) and one positional
argument. Conversion and the help are tyro's.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Container, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro

from quern.bounds import refuse_outside

T = TypeVar("T")

UNSAID: Any = tyro.conf.arg(help_behavior_hint="")
"""For a flag that is None by default: its help says what that means, so that "default: None" is left out."""
SUPPRESSED, POSITIONAL = (get_args(mark[int])[1:] for mark in (tyro.conf.Suppress, tyro.conf.Positional))
NUMBERS = {int: "a whole number", float: "a number"}
NEAREST = 3
ALIKE = 0.7
"""How many names are offered for one that there is not, and how alike (difflib's ratio) they must be."""


@dataclass(frozen=True)
class Flag:
    """name: as typed, such as --train.log-every; kind: the type of its value; required: it must be given."""

    name: str
    kind: Any
    required: bool

    @property
    def field(self) -> str:
        """train.log_every, for --train.log-every."""
        return self.name[2:].replace("-", "_")

    @property
    def switch(self) -> bool:
        return self.kind is bool


def read(
    kind: type[T], arguments: Sequence[str], *, prog: str, description: str | None = None, default: T | None = None
) -> T:
    """An instance of a dataclass from its flags. Raises ValueError naming the flag that is wrong, and what it takes;
    what tyro refuses ends the process with exit code 2, as its help does with 0."""
    arguments = check(kind, arguments, prog, complete=default is None)
    instead: dict[str, Any] = {} if default is None else {"default": default}
    return tyro.cli(kind, prog=prog, args=arguments, description=description, **instead)


def check(kind: type, arguments: Sequence[str], prog: str, complete: bool = False) -> list[str]:
    """The arguments as tyro reads them: a value that begins with a dash is joined to its flag.

    Raises ValueError for the first flag that `kind` does not have or whose value it could not read.

    complete: also where a required flag is missing.
    """
    if any(argument in ("-h", "--help") or argument.startswith("--tyro-") for argument in arguments):
        return list(arguments)
    known = {spelled: flag for flag, spellings in _flags(kind) for spelled in spellings}
    hints = get_type_hints(kind, include_extras=True).values()
    positional = next((Flag("", _bare(hint), False) for hint in hints if _is(hint, POSITIONAL)), None)
    given: set[str] = set()
    read: list[str] = []
    at = 0
    while at < len(arguments):
        typed, equals, value = arguments[at].partition("=")
        at += 1
        read.append(arguments[at - 1])
        if not typed.startswith("-") or typed == "-":
            if positional is None:
                raise ValueError(f"'{typed}' belongs to no option: see {prog} --help")
            _check_values(positional, "the argument", [arguments[at - 1]])
            continue
        flag = known.get(_spelled(typed))
        if flag is None:
            raise ValueError(_unknown(typed, list(known), prog))
        given.add(flag.name)
        if flag.switch:
            if equals:
                raise ValueError(f"{flag.name} takes no value: give {flag.name} or {_negated(flag.name)}")
            continue
        values = [value] if equals else _values(arguments[at:], known, many=get_origin(flag.kind) is tuple)
        at += 0 if equals else len(values)
        _check_values(flag, typed, values)
        joined = get_origin(flag.kind) is not tuple and values[0].startswith("-")
        if equals or joined:
            read[-1] = f"{flag.name}={values[0]}"
        else:
            read += values
    missing = [flag.name for flag in known.values() if flag.required and flag.name not in given]
    if complete and missing:
        raise ValueError(f"{missing[0]} is missing: see {prog} --help")
    return read


def _flags(kind: type, prefix: str = "") -> Iterator[tuple[Flag, list[str]]]:
    """Every flag of a dataclass, with the ways to spell it."""
    hints = get_type_hints(kind, include_extras=True)
    for f in fields(kind):
        hint = hints[f.name]
        if _is(hint, SUPPRESSED) or _is(hint, POSITIONAL):
            continue
        bare, marks = _bare(hint), getattr(hint, "__metadata__", ())
        names = [mark.name for mark in marks if getattr(mark, "name", None) is not None]
        own = names[0] if names else f.name
        if is_dataclass(bare):
            assert isinstance(bare, type)
            yield from _flags(bare, f"{prefix}{own}." if own else prefix)
            continue
        required = f.default is MISSING and f.default_factory is MISSING
        flag = Flag(_spelled(f"--{prefix}{own}"), bare, required)
        aliases = [alias for mark in marks for alias in getattr(mark, "aliases", None) or ()]
        yield flag, [flag.name, *aliases, *([_negated(flag.name)] if flag.switch else [])]


def _is(hint: Any, marks: tuple[Any, ...]) -> bool:
    return any(mark in getattr(hint, "__metadata__", ()) for mark in marks)


def _bare(hint: Any) -> Any:
    """The type itself, of one that is annotated."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _spelled(typed: str) -> str:
    """With dashes, as tyro also reads underscores."""
    return typed[:2] + typed[2:].replace("_", "-")


def _negated(name: str) -> str:
    part, dot, own = name[2:].rpartition(".")
    return f"--{part}{dot}no-{own}"


def _values(rest: Sequence[str], known: Container[str], many: bool) -> list[str]:
    values: list[str] = []
    for argument in rest if many else rest[:1]:
        if argument.startswith("--") or argument in known:
            break
        values.append(argument)
    return values


def numbers(kind: type) -> list[str]:
    """The flags of a dataclass that take a number, as in the table of ranges (quern/bounds.py)."""
    return [flag.field for flag, _ in _flags(kind) if _number(_choices(flag)) is not None]


def _choices(flag: Flag) -> tuple[Any, ...]:
    """What one value of a flag may be: a type, or the members of a union."""
    kind = get_args(flag.kind)[0] if get_origin(flag.kind) is tuple else flag.kind
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _number(choices: tuple[Any, ...]) -> type | None:
    return next((kind for kind in choices if kind in NUMBERS), None)


def _check_values(flag: Flag, typed: str, values: list[str]) -> None:
    choices = _choices(flag)
    taken, readable = _takes(choices)
    if not values and get_origin(flag.kind) is not tuple:
        raise ValueError(f"{typed} takes {taken}: none was given")
    for value in values:
        if not readable(value):
            raise ValueError(f"{typed} takes {taken}, not '{value}'")
        if (number := _number(choices)) is not None and value != "None":
            refuse_outside(flag.field, number(value), flag.name)


def _takes(kinds: tuple[Any, ...]) -> tuple[str, Any]:
    """What to say of the values, and whether one is readable."""
    optional = type(None) in kinds
    kind = next(kind for kind in kinds if kind is not type(None))
    if get_origin(kind) is Literal:
        names = [str(choice) for choice in get_args(kind)]
        return f"one of {', '.join(names)}", lambda value: value in names or (optional and value == "None")
    if kind in NUMBERS:
        return NUMBERS[kind], lambda value: _reads(kind, value) or (optional and value == "None")
    return "a value", lambda value: True


def _reads(kind: type, value: str) -> bool:
    try:
        kind(value)
    except ValueError:
        return False
    return True


def _unknown(typed: str, known: list[str], prog: str) -> str:
    """--steps is near to --train.steps, and --dpeth to --depth."""
    own = _spelled(typed)
    same = [name for name in known if name.rpartition(".")[2] == own.lstrip("-")]
    near = same or difflib.get_close_matches(own, known, NEAREST, ALIKE)
    hint = f"; nearest: {', '.join(near)}" if near else ""
    return f"unknown option {typed}{hint}; all of them: {prog} --help"
