"""A recipe's fields as flags: those that a command uses, and a clear line for those that it doesn't.

tyro makes the flags; what has no flag (callables, fields that the recipe or the command does not use) is left out of
its help, and named on the command line it is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import field, fields, is_dataclass, make_dataclass
from typing import Annotated, Any, Protocol, TypeVar, get_type_hints

import tyro

from quern.flags import check_flags
from quern.recipe import Recipe
from quern.resolve import resolve
from quern.validate import flag, unused

FOR_ALL: Mapping[str, str] = {
    "name": "comes with the recipe: to name the run, use --run",
    "unused": "comes with the recipe's file",
}


class HasRecipe(Protocol):
    @property
    def recipe(self) -> Any: ...


F = TypeVar("F", bound=HasRecipe)


def parse(
    flags: type[F],
    recipe: Recipe,
    arguments: Sequence[str],
    *,
    prog: str,
    without: Mapping[str, str] | None = None,
    description: str | None = None,
    **defaults: Any,
) -> F:
    """An instance of `flags`, a dataclass whose field `recipe` starts as this one.

    without: names of fields (train.steps) that have no flag, and why; defaults: other fields of `flags`. Raises
    ValueError for a flag among those, and what `typed.read` raises.
    """
    reasons = {name: unused(recipe, name).partition(" ")[2] for name in recipe.unused} | {**FOR_ALL, **(without or {})}
    for name in named(arguments):
        if name in reasons:
            raise ValueError(f"--{flag(name)} {reasons[name]}")
    shown = _offered(recipe, reasons, _filled(recipe))
    shape = [("recipe", _as_flags(flags, type(shown)))]
    unchecked = {"__post_init__": lambda self: None}  # what `flags` refuses is said below, in a line of its own
    frozen = flags.__dataclass_params__.frozen  # type: ignore[attr-defined]
    kind = make_dataclass(flags.__name__, shape, bases=(flags,), namespace=unchecked, frozen=frozen)
    default = kind(recipe=shown, **defaults)
    parsed = check_flags.read(kind, arguments, prog=prog, description=description, default=default)
    values = {f.name: getattr(parsed, f.name) for f in fields(flags)}  # type: ignore[arg-type]
    return flags(**values | {"recipe": _plain(parsed.recipe, recipe)})


def field_names(part: Any, prefix: str = "") -> Iterator[str]:
    """Every field of a recipe that a flag could set, such as train.steps."""
    for f in fields(part):
        value = getattr(part, f.name)
        if is_dataclass(value):
            yield from field_names(value, f"{prefix}{f.name}.")
        elif not callable(value):
            yield prefix + f.name


def named(arguments: Sequence[str]) -> Iterator[str]:
    """The fields that flags name: train.log_every for --train.log-every=5; the switch --no-x names x."""
    for argument in arguments:
        if argument.startswith("--"):
            part, dot, name = argument[2:].partition("=")[0].replace("-", "_").rpartition(".")
            yield part + dot + name.removeprefix("no_")


def repeated(arguments: Sequence[str], names: Collection[str]) -> list[str]:
    """Those of the flags that have these names, with their values; of one without a value, its name alone."""
    found: list[str] = []
    for argument, following in zip(arguments, [*arguments[1:], "--"], strict=True):
        typed_name, equals, _ = argument.partition("=")
        if typed_name.replace("_", "-").removeprefix("--") in names:
            found += [argument] if equals or following.startswith("--") else [argument, following]
    return found


def value_of(arguments: Sequence[str], name: str) -> str | None:
    """The value that follows --name or --name=; the last one counts, as for tyro."""
    found = None
    for argument, following in zip(arguments, [*arguments[1:], None], strict=True):
        typed_name, equals, value = argument.partition("=")
        if typed_name.replace("_", "-") == f"--{name}":
            found = value if equals else following
    return found


def _as_flags(flags: type, kind: type) -> Any:
    """The annotation of `flags.recipe`, for another type."""
    markers = getattr(get_type_hints(flags, include_extras=True)["recipe"], "__metadata__", ())
    return Annotated[(kind, *markers)]


def _offered(part: Any, without: Mapping[str, str], filled: Any, prefix: str = "") -> Any:
    """An equal object of a class derived from its own, in which tyro finds no flags for some fields.

    filled: the same part, resolved: what its help shows where a field is None.
    """
    hints = get_type_hints(type(part))
    offered, values = [], {}
    for f in fields(part):
        name, kind, value = prefix + f.name, hints[f.name], getattr(part, f.name)
        hidden = name in without or callable(value)
        if is_dataclass(value):
            hidden = all(inner in without for inner in field_names(value, name + "."))
            value = _offered(value, without, getattr(filled, f.name), name + ".")
            kind = type(value)
        elif value is None:
            kind = Annotated[kind, tyro.conf.arg(help_behavior_hint=_follows(getattr(filled, f.name)))]
        offered.append((f.name, tyro.conf.Suppress[kind] if hidden else kind, field(default=value)))
        values[f.name] = value
    made = make_dataclass(type(part).__name__, offered, bases=(type(part),), frozen=True, kw_only=True)
    made.__doc__ = type(part).__doc__
    return made(**values)


def _filled(recipe: Recipe) -> Recipe:
    """The recipe resolved; a file's recipe that would be refused later stays as it is."""
    try:
        return resolve(recipe)
    except ValueError:
        return recipe


def _follows(value: Any) -> str:
    if value is None:
        return "(default: unset)"
    return f"(default: {value:,.4g}; follows)" if isinstance(value, float) else f"(default: {value:,}; follows)"


def _plain(offered: Any, like: Any) -> Any:
    """The same values in the classes of `like`."""
    values = {f.name: (getattr(offered, f.name), getattr(like, f.name)) for f in fields(like)}
    return type(like)(**{n: _plain(new, old) if is_dataclass(old) else new for n, (new, old) in values.items()})
