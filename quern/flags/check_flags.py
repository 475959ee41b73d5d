"""Reads the flags of a dataclass, prints their help, and gives an error of one line for each mistake.

A flag is a switch, or takes a number, a choice, a text or several of these; there may be one positional argument. The
help of a flag is the text below its field. `Mark` says where a field is not a flag like the others.
"""

from __future__ import annotations

import ast
import inspect
import shutil
import sys
import textwrap
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import cache
from itertools import groupby, pairwise, takewhile
from pathlib import Path
from types import NoneType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NamedTuple,
    NoReturn,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from quern.field_types import UNIONS, Threads, annotations_of, refuse_outside
from quern.terminal import listed
from quern.validate import flag as flag_of
from quern.validate import nearest

if TYPE_CHECKING:
    from quern.machine import Machine

T = TypeVar("T")


class Mark(Enum):
    """A mark in the annotation of a field."""

    FLAT = "the fields of this part are flags without a prefix"
    HIDDEN = "no flag"
    POSITIONAL = "an argument without a flag"
    REPEATED = "given again, the flag adds values"
    RARE = "--help does not show the flag"


class Spelled(NamedTuple):
    """Spells the flag of a field differently: its name, and a short form such as -p."""

    name: str
    short: str = ""


HELP_ALL, HELP_FLAGS = "--help-all", "--help-flags"
HELP = frozenset(("-h", "--help", HELP_ALL, HELP_FLAGS))
"""The flags that print instead of running a verb: its help, all of it, the names of its flags."""
NUMBERS = {int: "a whole number", float: "a number"}
VALUES = {int: "INT", float: "FLOAT", Path: "PATH"}
LONGEST = 22
"""Characters of a flag in the help that leave room for its text beside it."""


@dataclass(kw_only=True)
class DeviceOptions:
    """The device that computes."""

    device: Literal["cpu", "cuda", "mps"] | None = None
    """Default: the fastest device available."""
    dtype: Annotated[Literal["bf16", "fp32"] | None, Mark.RARE] = None
    """Default: bf16 on GPUs that have it, on a CPU if it is measured to be faster."""
    threads: Annotated[Threads | None, Mark.RARE] = None
    """CPU threads, which all workers of a study share. Default: one per core."""
    compile: Annotated[bool, Mark.RARE] = True
    """--no-compile runs eagerly, as evaluate, complete and chat always do."""

    def detect(self, threads: int | None = None) -> Machine:
        from quern.machine import detect

        return detect(self.device, self.dtype, self.compile, threads or self.threads)


@dataclass(frozen=True)
class Flag:
    """A flag of a field."""

    name: str  # such as --train.log-every; empty for the positional argument
    part: str  # the part of the options, such as train; empty for none
    path: tuple[str, ...]  # the names of its parts and its field
    owner: type  # the class of its field
    annotation: Any  # the annotation of its field
    kind: Any  # the type of one value
    many: bool  # whether it takes several values
    default: Any  # the field's, or MISSING
    short: str  # another spelling, such as -p
    rare: bool  # whether only --help-all shows it
    repeated: bool  # whether it adds values when it is given again
    told: str | None = None  # the default as --help shows it; None for the value of `default`

    @property
    def spellings(self) -> list[str]:
        return [one for one in (self.name, self.short, negated(self.name) if self.kind is bool else "") if one]

    @property
    def takes(self) -> str:
        """The value in messages."""
        return f"one of {', '.join(map(str, self.choices))}" if self.choices else NUMBERS.get(self.kind, "a value")

    @property
    def choices(self) -> tuple[Any, ...]:
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def has_few_choices(self) -> bool:
        """Whether the choices fit beside the flag in the help."""
        return 0 < len("".join(map(str, self.choices))) < 2 * LONGEST

    @property
    def head(self) -> str:
        """The flag and its value in the help."""
        names, more = ", ".join(self.spellings), " …" if self.many else ""
        if not self.name or self.kind is bool:
            return f"{names or self.path[-1].upper()}{more}"
        value = f"{{{','.join(map(str, self.choices))}}}" if self.has_few_choices else VALUES.get(self.kind, "TEXT")
        return f"{names} {value}{more}"

    @property
    def text(self) -> str:
        """The text below the field, and the default where it does not say it."""
        named = ((one.__module__, one.__name__, self.path[-1]) for one in self.owner.__mro__ if is_dataclass(one))
        text = next((found for module, *of in named if (found := _texts(module).get(tuple(of)))), "")
        if self.choices and not (self.name and self.has_few_choices):
            text = f"{', '.join(map(str, self.choices))}. {text}"
        if "Default" in text or "no default" in text:
            return text
        default = " ".join(map(str, self.default)) if isinstance(self.default, tuple) else self.default
        told = "(required)" if self.default is MISSING else f"(default: {'none' if default in ('', None) else default})"
        return f"{text} {self.told or told}".strip()


@cache
def _texts(module: str) -> Mapping[tuple[str, ...], str]:
    """(class, field) → the text below the field in the source of a module, in one line."""
    found = {}
    for owner in ast.parse(inspect.getsource(sys.modules[module])).body:
        if isinstance(owner, ast.ClassDef):
            for field, below in pairwise(owner.body):
                match field, below:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        found[owner.name, name] = " ".join(text.split())
    return found


def flags_of(kind: type, prefix: str = "", path: tuple[str, ...] = (), **parts: Any) -> Iterator[Flag]:
    """The flags of a dataclass. parts: values of fields, which replace the defaults."""
    plain = get_type_hints(kind)
    for f in fields(kind):
        annotation, own = annotations_of(kind)[f.name], (*path, f.name)
        marks = getattr(annotation, "__metadata__", ())
        default: Any = parts.get(f.name, f.default if f.default_factory is MISSING else f.default_factory())
        spelled = next((mark for mark in marks if isinstance(mark, Spelled)), Spelled(f.name))
        several = get_args(plain[f.name]) if get_origin(plain[f.name]) in UNIONS else (plain[f.name],)
        type_: Any = next(one for one in several if one is not NoneType)
        if Mark.HIDDEN in marks or get_origin(type_) is Callable:  # a recipe's code
            continue
        if is_dataclass(type_):
            within = "" if Mark.FLAT in marks else f"{prefix}{spelled.name}."
            values = {} if default is MISSING else {one.name: getattr(default, one.name) for one in fields(default)}
            part: Any = type(default) if values else type_
            yield from flags_of(part, within, own, **values)
            continue
        many = get_origin(type_) is tuple
        yield Flag(
            "" if Mark.POSITIONAL in marks else f"--{flag_of(prefix + spelled.name)}",
            prefix.removesuffix("."),
            own,
            kind,
            annotation,
            get_args(type_)[0] if many else type_,
            many,
            default,
            spelled.short,
            rare=Mark.RARE in marks,
            repeated=Mark.REPEATED in marks,
        )


def read(kind: type[T], arguments: Sequence[str], *, prog: str, description: str | None = None) -> T:
    """Makes an instance of a dataclass from its flags; see `check` and `show_help`."""
    flags = list(flags_of(kind))
    if not HELP.isdisjoint(arguments):
        show_help(flags, arguments, prog, description or inspect.getdoc(kind) or "")
    return made(kind, check(flags, arguments, prog))


def show_help(flags: Sequence[Flag], arguments: Sequence[str], prog: str, description: str) -> NoReturn:
    """Prints the help that the arguments ask for. Raises SystemExit (code 0)."""
    if HELP_FLAGS in arguments:
        print(*(name for flag in flags for name in flag.spellings if name.startswith("--")), sep="\n")
        raise SystemExit(0)
    width = shutil.get_terminal_size().columns
    parts = description.split("\n\n")
    if not any(part.startswith("usage: ") for part in parts):
        parts.append(f"usage: {prog} {' '.join([*(f'[{flag.head}]' for flag in flags if not flag.name), '[FLAGS]'])}")
    for part in parts:
        print(part if part.startswith(("example: ", "usage: ")) else textwrap.fill(part, width), end="\n\n")
    shown = sorted((flag for flag in flags if not flag.rare or HELP_ALL in arguments), key=lambda flag: flag.part != "")
    for part, found in groupby(shown, lambda flag: flag.part):
        own = list(found)
        print(textwrap.fill(f"{part}: {inspect.getdoc(own[0].owner)}", width) if part else "flags:")
        print(listed({flag.head: flag.text for flag in own}, LONGEST), end="\n\n")
    if HELP_ALL not in arguments and any(flag.rare for flag in flags):
        more = ", ".join(sorted({flag.part for flag in flags if flag.rare and flag.part}))
        print(f"all flags{f', also of {more}' if more else ''}: {prog} {HELP_ALL}")
    raise SystemExit(0)


def check(flags: Iterable[Flag], arguments: Sequence[str], prog: str) -> dict[str, Any]:
    """Reads the values of flags, by field; the values of a part are a dict. Raises ValueError for the first flag that
    is unknown or missing, and the first value that cannot be read."""
    known = {spelling: flag for flag in flags for spelling in flag.spellings or [""]}
    values, given, rest = dict[str, Any](), set[str](), list(arguments)
    while rest:
        argument = rest.pop(0)
        typed, equals, value = argument.partition("=")
        if not typed.startswith("-") or typed == "-":
            flag, found = known.get(""), [argument]
            if flag is None or (not flag.many and "" in given):
                run = "; the name of a run follows the verb at once" if "--run" in known else ""
                text = ", a text follows -p" if "-p" in known else ""
                raise ValueError(f"'{typed}' belongs to no option: see {prog} --help{run}{text}")
            typed = "the argument"
        else:
            flag = known.get(_dashed(typed))
            if flag is None:
                raise ValueError(_unknown(typed, [*known], prog))
            if flag.many and flag.name in given and not flag.repeated:
                raise ValueError(f"{flag.name} is given twice: give all its values after one {flag.name}")
            if flag.kind is bool and equals:
                raise ValueError(f"{flag.name} takes no value: give {flag.name} or {negated(flag.name)}")
            found = [value] if equals else [] if flag.kind is bool else _values(rest, known, flag.many)
            rest = rest if equals else rest[len(found) :]
        given.add(flag.name)
        part = values
        for name in flag.path[:-1]:
            part = part.setdefault(name, {})
        own = flag.path[-1]
        if flag.kind is bool:
            part[own] = _dashed(typed) == flag.name
        elif flag.many and found:
            part[own] = (*part.get(own, ()), *(_converted(flag, typed, one) for one in found))
        elif found:
            part[own] = _converted(flag, typed, found[0])
        else:
            instead = f"; one that begins with - follows {typed}=" if rest and rest[0] not in known else ""
            raise ValueError(f"{typed} takes {flag.takes}: none was given{instead}")
    for flag in known.values():
        if flag.default is MISSING and flag.name not in given:
            raise ValueError(f"{flag.name or flag.path[-1].upper()} is missing: see {prog} --help")
    return values


def made(kind: type[T], given: Mapping[str, Any], **parts: Any) -> T:
    """An instance with the values that `check` has read. parts: fields that replace the defaults."""
    values = dict(parts)
    for f in fields(kind):  # type: ignore[arg-type]
        if f.name in given:
            part = parts.get(f.name) or (f.default if f.default_factory is MISSING else f.default_factory())
            values[f.name] = _changed(part, given[f.name])
    return kind(**values)


def _changed(part: Any, given: Any) -> Any:
    """The value that was given, or the part with the values of a dict."""
    if not isinstance(given, dict):
        return given
    return replace(part, **{name: _changed(getattr(part, name), value) for name, value in given.items()})


def _dashed(typed: str) -> str:
    """The spelling with dashes; underscores are read too."""
    return typed[:2] + typed[2:].replace("_", "-")


def negated(name: str) -> str:
    part, dot, own = name[2:].rpartition(".")
    return f"--{part}{dot}no-{own}"


def _values(rest: Sequence[str], known: Container[str], many: bool) -> list[str]:
    values = takewhile(lambda word: not word or (not word.startswith("--") and word not in known), rest)
    return list(values)[: None if many else 1]


def _converted(flag: Flag, typed: str, value: str) -> Any:
    if hasattr(flag.kind, "parse"):
        try:
            return flag.kind.parse(value)
        except ValueError as error:
            raise ValueError(f"{typed} {error}") from error
    names = flag.kind is str and flag.default is None and not flag.part and flag.name != "--prompt"
    if not value and (names or flag.kind is Path):  # which would be the default, or the current folder
        raise ValueError(f"{typed} is empty: give {'a name' if names else 'a path'}, or leave it out")
    try:
        found = {str(one): one for one in flag.choices}[value] if flag.choices else read_value(flag.kind, value)
    except (ValueError, KeyError) as error:
        raise ValueError(f"{typed} takes {flag.takes}, not '{value}'") from error
    refuse_outside(flag.annotation, found, flag.name)
    return found


def read_value(kind: type, value: str) -> Any:
    """A text as a value of a plain type. Raises ValueError if it is none."""
    if kind is int and not value.isdecimal():
        number = float(value)  # as in 1e3
        return int(number) if number.is_integer() else int(value)
    return kind(value)


def _unknown(typed: str, known: list[str], prog: str) -> str:
    """The message for an unknown flag: --train.steps is suggested for --steps, --depth for --dpeth."""
    own = _dashed(typed)
    same = [name for name in known if name.rpartition(".")[2] == own.lstrip("-")]
    hint = f"; nearest: {', '.join(same)}" if same else nearest(own, known)
    return f"unknown option {typed}{hint}; all of them: {prog} --help"
