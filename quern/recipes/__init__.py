"""The recipes that come with quern, one file each, and the search for a recipe by its name or file."""

from __future__ import annotations

import importlib
import pkgutil
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quern.flags.recipe_flags import Arguments
    from quern.recipe import Recipe


def recipe_names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def chosen_recipe(verb: str, arguments: Arguments) -> tuple[Recipe, str | None]:
    """The one recipe that a command line begins with, by default gpt; as `load_recipe`."""
    if len(arguments.recipes) > 1:
        raise ValueError(f"'{arguments[1]}' belongs to no option: see quern {verb} --help")
    return load_recipe(arguments.recipes[0] if arguments.recipes else "gpt")


def load_recipe(name: str) -> tuple[Recipe, str | None]:
    """The recipe called so, or in that file, and the file's source.

    Raises ValueError: naming what there is, or where the file goes wrong.
    """
    if name in recipe_names():
        return importlib.import_module(f"quern.recipes.{name}").RECIPE, None
    path = Path(name)
    if path.suffix != ".py" or not path.is_file():
        text = f"; a text needs --data before it: --data {shlex.quote(name)}" if path.exists() else ""
        names = ", ".join(recipe_names())
        raise ValueError(f"there is no recipe '{name}': use {names}, or the path of a .py file{text}")
    from quern.flags.recipe_file import read_recipe_file  # the list of names is printed without it

    return read_recipe_file(path)
