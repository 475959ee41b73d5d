"""Reads the flags of a dataclass, and gives an error of one line for each mistake.

It knows numbers, choices, switches, texts, and tuples of these, and one positional argument. tyro, whose rules these
are, prints the help: its parser of a recipe takes a fifth of a second to build.
"""

from __future__ import annotations

import inspect
import shutil
import textwrap
from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass, replace
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
    """name: with dashes, such as --train.log-every; path: the names of its parts and its field; kind: the type of its
    value; required: it has no default; appended: given again, it adds values; annotation: that of its field, with the
    range."""

    name: str
    path: tuple[str, ...]
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
        SystemExit: After the help (code 0).
    """
    if HELP_FLAGS in arguments:
        print(*(name for _, names in _flags(kind) for name in names if name.startswith("--")), sep="\n")
        raise SystemExit(0)
    if HELP.isdisjoint(arguments):
        return _made(kind, default, check(kind, arguments, prog, complete=default is None))
    width = shutil.get_terminal_size().columns  # tyro does not wrap it
    for part in [*(description or inspect.getdoc(kind) or "").split("\n\n"), *filter(None, [more])]:
        print(part if part.startswith("example: ") else textwrap.fill(part, width), end="\n\n")
    instead: dict[str, Any] = {} if default is None else {"default": default}
    with VALUES:
        return tyro.cli(kind, prog=prog, args=["--help"], description="", config=(tyro.conf.DisallowNone,), **instead)


def check(kind: type, arguments: Sequence[str], prog: str, complete: bool = False) -> dict[str, Any]:
    """Reads the values of flags, by field; those of a part are a dict.

    complete: also refuse a command line that lacks a required flag. Raises ValueError for the first unknown flag and
    the first value that cannot be read.
    """
    known = {spelling: flag for flag, spellings in _flags(kind) for spelling in spellings}
    positional = next(_positionals(kind), None)
    given: set[str] = set()
    read: dict[str, Any] = {}
    at = 0
    while at < len(arguments):
        argument = arguments[at]
        typed, equals, value = argument.partition("=")
        at += 1
        if not typed.startswith("-") or typed == "-":
            if positional is None or (not positional.many and "" in given):
                run = "; the name of a run follows the verb at once" if "--run" in known else ""
                text = ", a text follows -p" if "-p" in known else ""
                raise ValueError(f"'{typed}' belongs to no option: see {prog} --help{run}{text}")
            _put(read, positional, _converted(positional, "the argument", [argument]))
            given.add("")
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
            _put(read, flag, [_dashed(typed) == flag.name])
            continue
        values = [value] if equals else _values(arguments[at:], known, flag.many)
        at += 0 if equals else len(values)
        values = [_whole(value) if flag.number is int else value for value in values]
        _put(read, flag, _converted(flag, typed, values))
    needed = [*known.values(), *([positional] if positional else [])]
    missing = [flag.name or flag.path[-1].upper() for flag in needed if flag.required and flag.name not in given]
    if complete and missing:
        raise ValueError(f"{missing[0]} is missing: see {prog} --help")
    return read


def _put(read: dict[str, Any], flag: Flag, values: list[Any]) -> None:
    """Adds the values of a flag. A list follows what the flag or the positional argument gave before."""
    *parts, own = flag.path
    for part in parts:
        read = read.setdefault(part, {})
    read[own] = (*read.get(own, ()), *values) if flag.many else values[0]


def _made(kind: type[T], default: T | None, given: dict[str, Any]) -> T:
    """An instance with the values that `check` has read."""
    values, hints = dict[str, Any](), get_type_hints(kind)
    for f in fields(kind):  # type: ignore[arg-type]
        if isinstance(value := given.get(f.name), dict):
            made = None if f.default_factory is MISSING else f.default_factory()
            part: Any = made if default is None else getattr(default, f.name)
            value = _made(hints[f.name] if part is None else type(part), part, value)
        if value is not None:
            values[f.name] = value
    return kind(**values) if default is None else replace(default, **values)  # type: ignore[type-var]


def _positionals(kind: type) -> Iterator[Flag]:
    hints = get_type_hints(kind, include_extras=True)
    for f in fields(kind):
        if _is(hints[f.name], POSITIONAL):
            required = f.default is MISSING and f.default_factory is MISSING
            yield Flag("", (f.name,), _bare(hints[f.name]), required)


def _flags(kind: type, prefix: str = "", path: tuple[str, ...] = ()) -> Iterator[tuple[Flag, list[str]]]:
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
            yield from _flags(bare, f"{prefix}{own}." if own else prefix, (*path, f.name))
            continue
        required = f.default is MISSING and f.default_factory is MISSING
        flag = Flag(_dashed(f"--{prefix}{own}"), (*path, f.name), bare, required, _is(hint, APPENDED), hint)
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


def _converted(flag: Flag, typed: str, values: list[str]) -> list[Any]:
    kind = next(kind for kind in flag.choices if kind is not type(None))
    names = {str(choice): choice for choice in get_args(kind)} if get_origin(kind) is Literal else {}
    takes = f"one of {', '.join(names)}" if names else NUMBERS.get(kind, "a value")
    if not values and not flag.many:
        raise ValueError(f"{typed} takes {takes}: none was given")
    found: list[Any] = []
    for value in values:
        if (names and value not in names) or (kind in NUMBERS and not _reads(kind, value)):
            raise ValueError(f"{typed} takes {takes}, not '{value}'")
        if flag.number is not None:
            refuse_outside(flag.annotation, flag.number(value), flag.name)
        if hasattr(kind, "parse"):
            try:
                found.append(kind.parse(value))
            except ValueError as error:
                raise ValueError(f"{typed} {error}") from error
        else:
            found.append(names[value] if names else kind(value))
    return found


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
