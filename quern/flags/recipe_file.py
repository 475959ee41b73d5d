"""Reads a constant of a Python file (`RECIPE = …`, `TASK = …` or `ENVIRONMENT = …`). Executes the file's code.

`map_paths` changes the paths that a recipe names.
"""

from __future__ import annotations

import os.path
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from quern.process import own_place
from quern.recipe import Made, Recipe
from quern.validate import check

T = TypeVar("T")


def read_recipe_file(path: Path, name: str | None = None) -> tuple[Recipe, str]:
    """The RECIPE of a file, with ~ expanded in its paths, and the file's source. Raises as `read_object`, and
    ValueError for a wrong value."""
    recipe, source = read_object(path, "RECIPE", Recipe, name)
    check(recipe)
    return map_paths(recipe, os.path.expanduser), source


def map_paths(recipe: Made, change: Callable[[str], str]) -> Made:
    """The recipe with `change` applied to its paths; names of data sets are passed to `change` too."""

    def changed(part: Any, *names: str) -> Any:
        values = {name: getattr(part, name) for name in names}
        return replace(part, **{name: change(value) for name, value in values.items() if isinstance(value, str)})

    talks = recipe.conversations and tuple(changed(one, "source") for one in recipe.conversations)
    data = "\n".join(map(change, recipe.data.split("\n")))
    text, sft, rl = changed(recipe.text, "tokenizer"), changed(recipe.sft, "tests"), changed(recipe.rl, "data")
    rl = replace(rl, rewards=tuple(change(name) if name.endswith(".py") else name for name in rl.rewards))
    return replace(changed(recipe, "val"), data=data, conversations=talks, text=text, sft=sft, rl=rl)


def read_object(path: Path, constant: str, kind: type[T], name: str | None = None) -> tuple[T, str]:
    """Executes a Python file; returns one of its constants, of a class, and the file's source. Raises ValueError if the
    file fails, with the line, or does not define the constant. name: the module's; by default the file's."""
    name = name or _free_name(path)
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = str(path.absolute())
    try:  # read once: the text that is kept is the one that runs
        text = path.read_text(encoding="utf-8-sig")
        exec(compile(text, path, "exec", dont_inherit=True), vars(module))  # noqa: S102
    except Exception as error:  # the file's code can raise anything
        reason = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
        raise ValueError(f"{own_place(error) or f'{path}: '}{type(error).__name__}: {reason}") from error
    found = getattr(module, constant, None)
    if not isinstance(found, kind):
        raise ValueError(f"{path} does not end in {constant} = … (a {kind.__module__}.{kind.__name__})")
    return found, text


def _free_name(path: Path) -> str:
    """The file's name without its ending; changed where another module, which others still import, has this name."""
    found = PathFinder.find_spec(path.stem)
    other = found is not None and found.origin not in (None, str(path.resolve()))
    return f"{path.stem}_recipe" if other or path.stem in sys.stdlib_module_names else path.stem
