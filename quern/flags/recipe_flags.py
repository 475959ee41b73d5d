"""The fields of a recipe as flags.

tyro makes the flags. Fields without a flag (callables, and fields that unavailable.py lists for the verb) are
hidden in the help; on the command line they are refused with the reason.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import field, fields, is_dataclass, make_dataclass
from typing import Annotated, Any, Protocol, TypeVar, get_type_hints

import tyro

from quern.flags import check_flags
from quern.flags.unavailable import why_no_flag
from quern.recipe import Recipe
from quern.resolve import resolve
from quern.validate import flag


class HasRecipe(Protocol):
    @property
    def recipe(self) -> Any: ...


F = TypeVar("F", bound=HasRecipe)


def parse(flags: type[F], recipe: Recipe, arguments: Sequence[str], *, verb: str, description: str | None = None) -> F:
    """Reads the flags of a verb.

    Args:
        flags: A dataclass with the verb's options; its field `recipe` holds a recipe.
        recipe: The recipe whose fields the flags change.
        arguments: The command line after the verb.
        verb: The verb, as in `unavailable.RULES`.
        description: Text for the help.

    Returns:
        An instance of `flags`.

    Raises:
        ValueError: A flag is refused; see also `check_flags.read`.
    """
    for name in named(arguments):
        if reason := why_no_flag(name, verb, recipe):
            raise ValueError(f"--{flag(name)} {reason}")
    hidden = {name for name in field_names(recipe) if why_no_flag(name, verb, recipe)}
    shown = _offered(recipe, hidden, _filled(recipe), "derived from the run" if verb == "sft" else None)
    markers = getattr(get_type_hints(flags, include_extras=True)["recipe"], "__metadata__", ())
    kind = make_dataclass(
        flags.__name__,
        [("recipe", Annotated[(type(shown), *markers)])],
        bases=(flags,),
        namespace={"__post_init__": lambda self: None},  # the checks of `flags` run below
        frozen=flags.__dataclass_params__.frozen,  # type: ignore[attr-defined]
    )
    parsed = check_flags.read(
        kind, arguments, prog=f"quern {verb}", description=description, default=kind(recipe=shown)
    )
    values = {f.name: getattr(parsed, f.name) for f in fields(flags)}  # type: ignore[arg-type]
    return flags(**values | {"recipe": _plain(parsed.recipe, recipe)})


def field_names(part: Any, prefix: str = "") -> Iterator[str]:
    """The names of all fields of a recipe that a flag could set, such as train.steps."""
    for f in fields(part):
        value = getattr(part, f.name)
        if is_dataclass(value):
            yield from field_names(value, f"{prefix}{f.name}.")
        elif not _is_code(f.name, value):
            yield prefix + f.name


def named(arguments: Sequence[str]) -> Iterator[str]:
    """The fields that flags name: train.log_every for --train.log-every=5; the switch --no-x names x."""
    for argument in arguments:
        if argument.startswith("--"):
            part, dot, name = argument[2:].partition("=")[0].replace("-", "_").rpartition(".")
            yield part + dot + name.removeprefix("no_")


def repeated(arguments: Sequence[str], names: Collection[str]) -> list[str]:
    """The flags with these names and their values, to repeat them in another command."""
    found: list[str] = []
    keeping = False
    for argument in arguments:
        if argument.startswith("--"):
            keeping = argument.partition("=")[0].replace("_", "-").removeprefix("--") in names
        found += [argument] if keeping else []
    return found


def value_of(arguments: Sequence[str], name: str) -> str | None:
    """The value after --name or --name=; the last one counts, as for tyro."""
    found = None
    for argument, following in zip(arguments, [*arguments[1:], None], strict=False):
        typed, equals, value = argument.partition("=")
        if typed.replace("_", "-") == f"--{name}":
            found = value if equals else following
    return found


def _offered(part: Any, hidden: set[str], filled: Any, derived: str | None, prefix: str = "") -> Any:
    """An equal object of a derived class, in which tyro finds no flags for the hidden fields.

    For a field that is None, the help shows `derived` or the field's value in `filled`, the resolved part.
    """
    hints = get_type_hints(type(part), include_extras=True)
    offered, values = [], {}
    for f in fields(part):
        name, kind, value = prefix + f.name, hints[f.name], getattr(part, f.name)
        hide = name in hidden or _is_code(f.name, value)
        if is_dataclass(value):
            hide = hidden.issuperset(field_names(value, name + "."))
            value = _offered(value, hidden, getattr(filled, f.name), derived, name + ".")
            kind = type(value)
        elif value is None:
            kind = Annotated[kind, tyro.conf.arg(help_behavior_hint=_default(getattr(filled, f.name), derived))]
        offered.append((f.name, tyro.conf.Suppress[kind] if hide else kind, field(default=value)))
        values[f.name] = value
    made = make_dataclass(type(part).__name__, offered, bases=(type(part),), frozen=True, kw_only=True)
    made.__doc__ = type(part).__doc__
    return made(**values)


def _is_code(name: str, value: Any) -> bool:
    """Whether a field holds a function of the recipe's file, or would hold one."""
    return callable(value) or name.startswith("make_")


def _filled(recipe: Recipe) -> Recipe:
    """The resolved recipe; the recipe itself if it is refused, which happens again after parsing."""
    try:
        return resolve(recipe)
    except ValueError:
        return recipe


def _default(value: Any, derived: str | None) -> str:
    if value is None:
        return "(default: unset)"
    shown = f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"
    return f"(default: {derived})" if derived else f"(default: {shown}; follows)"


def _plain(offered: Any, like: Any) -> Any:
    """The same values in the classes of `like`."""
    values = {f.name: (getattr(offered, f.name), getattr(like, f.name)) for f in fields(like)}
    return type(like)(**{n: _plain(new, old) if is_dataclass(old) else new for n, (new, old) in values.items()})
