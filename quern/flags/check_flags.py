"""Checks flags before tyro reads them, so that each mistake gives an error of one line.

It knows the flags of a dataclass (numbers, choices, switches, texts, and tuples of these) and one positional argument.
tyro converts the values and prints the help.
"""

from __future__ import annotations

import inspect
import shutil
import textwrap
from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from quern.field_types import UNIONS, Threads, refuse_outside
from quern.validate import nearest

if TYPE_CHECKING:
    from quern.machine import Machine

T = TypeVar("T")

UNSAID: Any = tyro.conf.arg(help_behavior_hint="")
"""Marks a flag that is None by default and whose help text says what that means ("Default: …")."""
SUPPRESSED, POSITIONAL, APPENDED = (
    get_args(mark[int])[1:] for mark in (tyro.conf.Suppress, tyro.conf.Positional, tyro.conf.UseAppendAction)
)
RARE = "rare"
"""Marks a flag that --help does not show."""
HELP_ALL, HELP_FLAGS = "--help-all", "--help-flags"
HELP = frozenset(("-h", "--help", HELP_ALL, HELP_FLAGS))
"""The flags that print instead of running a verb: its help, all of it, the names of its flags."""
NUMBERS = {int: "a whole number", float: "a number"}


@dataclass(kw_only=True)
class DeviceOptions:
    """The device that computes."""

    device: Annotated[Literal["cpu", "cuda", "mps"] | None, UNSAID] = None
    """Default: the fastest device available."""
    dtype: Annotated[Literal["bf16", "fp32"] | None, UNSAID, RARE] = None
    """Default: bf16 if it is measured to be faster."""
    threads: Annotated[Threads | None, UNSAID, RARE] = None
    """CPU threads, which all workers of a study share. Default: one per core."""
    compile: Annotated[bool, RARE] = True
    """--no-compile runs eagerly."""

    def detect(self, threads: int | None = None) -> Machine:
        from quern.machine import detect

        return detect(self.device, self.dtype, self.compile, threads or self.threads)


VALUES = ConstructorRegistry()


@VALUES.primitive_rule
def _parsed_text(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """A class with a function `parse` is one value, not a group of flags."""
    kind: Any = info.type
    if not (isinstance(kind, type) and hasattr(kind, "parse")):
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="TEXT",
        instance_from_str=lambda given: kind.parse(given[0]),
        is_instance=lambda value: isinstance(value, kind),
        str_from_instance=lambda value: [str(value)],
    )


@dataclass(frozen=True)
class Flag:
    """name: with dashes, such as --train.log-every; kind: the type of its value; required: it has no default; appended:
    given again, it adds values; annotation: that of its field, with the range."""

    name: str
    kind: Any
    required: bool = False
    appended: bool = False
    annotation: Any = None

    @property
    def many(self) -> bool:
        """It takes several values."""
        return get_origin(self.kind) is tuple

    @property
    def choices(self) -> tuple[Any, ...]:
        """The types that one value may have."""
        kind = get_args(self.kind)[0] if self.many else self.kind
        return get_args(kind) if get_origin(kind) in UNIONS else (kind,)

    @property
    def number(self) -> type | None:
        """int or float if the flag takes a number."""
        return next((kind for kind in self.choices if kind in NUMBERS), None)


def rare(kind: type) -> list[tuple[str, Any, Any]]:
    """The fields with the mark RARE, as `make_dataclass` takes them, without flags; also those of the parts."""
    found, hints = list[tuple[str, Any, Any]](), get_type_hints(kind, include_extras=True)
    for f in fields(kind):
        hint = hints[f.name]
        if RARE in getattr(hint, "__metadata__", ()):
            found.append((f.name, tyro.conf.Suppress[hint], field(default=f.default)))
        elif isinstance(part := _bare(hint), type) and f.default_factory is part and (own := rare(part)):
            frozen = part.__dataclass_params__.frozen  # pyright: ignore[reportAttributeAccessIssue]
            made = make_dataclass(part.__name__, own, bases=(part,), frozen=frozen)
            found.append((f.name, Annotated[(made, *hint.__metadata__)], field(default_factory=made)))
    return found


def read(
    kind: type[T],
    arguments: Sequence[str],
    *,
    prog: str,
    description: str | None = None,
    default: T | None = None,
    more: str = "",
) -> T:
    """Makes an instance of a dataclass from its flags.

    more: Text at the end of --help.

    Raises:
        ValueError: Naming the wrong flag and its valid values.
        SystemExit: After the help (code 0), or for what only tyro refuses (code 2).
    """
    arguments = check(kind, arguments, prog, complete=default is None)
    instead: dict[str, Any] = {} if default is None else {"default": default}
    if HELP_FLAGS in arguments:
        print(*(name for _, names in _flags(kind) for name in names if name.startswith("--")), sep="\n")
        raise SystemExit(0)
    if not HELP.isdisjoint(arguments):  # tyro does not wrap it
        width = shutil.get_terminal_size().columns
        for part in [*(description or inspect.getdoc(kind) or "").split("\n\n"), *filter(None, [more])]:
            print(part if part.startswith("example: ") else textwrap.fill(part, width), end="\n\n")
        arguments = ["--help"]
    with VALUES:
        return tyro.cli(kind, prog=prog, args=arguments, description="", config=(tyro.conf.DisallowNone,), **instead)


def check(kind: type, arguments: Sequence[str], prog: str, complete: bool = False) -> list[str]:
    """Checks the names and the values of flags, and returns the arguments for tyro: a value that begins with a dash is
    joined to its flag.

    complete: also refuse a command line that lacks a required flag. Raises ValueError for the first unknown flag and
    the first value that cannot be read.
    """
    if not HELP.isdisjoint(arguments):
        return list(arguments)
    known = {spelling: flag for flag, spellings in _flags(kind) for spelling in spellings}
    hints = get_type_hints(kind, include_extras=True).values()
    positional = next((Flag("", _bare(hint)) for hint in hints if _is(hint, POSITIONAL)), None)
    given: set[str] = set()
    read: list[str] = []
    at = 0
    while at < len(arguments):
        argument = arguments[at]
        typed, equals, value = argument.partition("=")
        at += 1
        read.append(argument)
        if not typed.startswith("-") or typed == "-":
            if positional is None:
                run = "; the name of a run follows the verb at once" if "--run" in known else ""
                text = ", a text follows -p" if "-p" in known else ""
                raise ValueError(f"'{typed}' belongs to no option: see {prog} --help{run}{text}")
            _check_values(positional, "the argument", [argument])
            continue
        flag = known.get(_dashed(typed))
        if flag is None:
            raise ValueError(_unknown(typed, list(known), prog))
        if flag.many and not flag.appended and flag.name in given:
            raise ValueError(f"{flag.name} is given twice: give all its values after one {flag.name}")
        given.add(flag.name)
        if flag.kind is bool:
            if equals:
                raise ValueError(f"{flag.name} takes no value: give {flag.name} or {negated(flag.name)}")
            continue
        values = [value] if equals else _values(arguments[at:], known, flag.many)
        at += 0 if equals else len(values)
        values = [_whole(value) if flag.number is int else value for value in values]
        _check_values(flag, typed, values)
        if equals or (not flag.many and values[0].startswith("-")):
            read[-1] = f"{flag.name}={values[0]}"
        else:
            read += values
    missing = [flag.name for flag in known.values() if flag.required and flag.name not in given]
    if complete and missing:
        raise ValueError(f"{missing[0]} is missing: see {prog} --help")
    return read


def _flags(kind: type, prefix: str = "") -> Iterator[tuple[Flag, list[str]]]:
    """Every flag of a dataclass with all its spellings."""
    hints, plain = get_type_hints(kind, include_extras=True), get_type_hints(kind)
    for f in fields(kind):
        hint = hints[f.name]
        if _is(hint, SUPPRESSED) or _is(hint, POSITIONAL):
            continue
        bare, marks = plain[f.name], getattr(hint, "__metadata__", ())
        if get_origin(bare) in UNIONS:  # several values, or None
            bare = next((kind for kind in get_args(bare) if get_origin(kind) is tuple), bare)
        own = next((mark.name for mark in marks if getattr(mark, "name", None) is not None), f.name)
        if is_dataclass(bare):
            assert isinstance(bare, type)
            yield from _flags(bare, f"{prefix}{own}." if own else prefix)
            continue
        required = f.default is MISSING and f.default_factory is MISSING
        flag = Flag(_dashed(f"--{prefix}{own}"), bare, required, _is(hint, APPENDED), hint)
        aliases = [alias for mark in marks for alias in getattr(mark, "aliases", None) or ()]
        yield flag, [flag.name, *aliases, *([negated(flag.name)] if bare is bool else [])]


def _is(hint: Any, marks: tuple[Any, ...]) -> bool:
    return any(mark in getattr(hint, "__metadata__", ()) for mark in marks)


def _bare(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _dashed(typed: str) -> str:
    """The spelling with dashes; tyro accepts underscores too."""
    return typed[:2] + typed[2:].replace("_", "-")


def negated(name: str) -> str:
    part, dot, own = name[2:].rpartition(".")
    return f"--{part}{dot}no-{own}"


def _values(rest: Sequence[str], known: Container[str], many: bool) -> list[str]:
    values: list[str] = []
    for argument in rest if many else rest[:1]:
        if argument.startswith("--") or argument in known:
            break
        values.append(argument)
    return values


def _check_values(flag: Flag, typed: str, values: list[str]) -> None:
    kind = next(kind for kind in flag.choices if kind is not type(None))
    names = [str(choice) for choice in get_args(kind)] if get_origin(kind) is Literal else None
    takes = f"one of {', '.join(names)}" if names else NUMBERS.get(kind, "a value")
    if not values and not flag.many:
        raise ValueError(f"{typed} takes {takes}: none was given")
    for value in values:
        if (names and value not in names) or (kind in NUMBERS and not _reads(kind, value)):
            raise ValueError(f"{typed} takes {takes}, not '{value}'")
        if flag.number is not None:
            refuse_outside(flag.annotation, flag.number(value), flag.name)
        if hasattr(kind, "parse"):
            try:
                kind.parse(value)
            except ValueError as error:
                raise ValueError(f"{typed} {error}") from error


def _whole(value: str) -> str:
    """A whole number that is written as 1e3 or 2.0, in digits; anything else as it is."""
    with suppress(ValueError):
        if not value.isdecimal() and float(value).is_integer():
            return str(int(float(value)))
    return value


def _reads(kind: type, value: str) -> bool:
    try:
        kind(value)
    except ValueError:
        return False
    return True


def _unknown(typed: str, known: list[str], prog: str) -> str:
    """The message for an unknown flag: --train.steps is suggested for --steps, --depth for --dpeth."""
    own = _dashed(typed)
    same = [name for name in known if name.rpartition(".")[2] == own.lstrip("-")]
    hint = f"; nearest: {', '.join(same)}" if same else nearest(own, known)
    return f"unknown option {typed}{hint}; all of them: {prog} --help"
