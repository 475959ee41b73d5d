"""The recipes that come with quern, one file each, and how one is found: by its name, or in a file of one's own."""

from __future__ import annotations

import importlib.util
import pkgutil
import sys
import traceback
from pathlib import Path

from quern.recipe import Recipe


def recipe_names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load_recipe(name: str) -> tuple[Recipe, str | None]:
    """The recipe called so, or in that file, and the file's source.

    Raises ValueError: naming what there is, or where the file goes wrong.
    """
    if name in recipe_names():
        return importlib.import_module(f"quern.recipes.{name}").RECIPE, None
    path = Path(name)
    if path.suffix != ".py" or not path.is_file():
        raise ValueError(f"there is no recipe '{name}': use {', '.join(recipe_names())}, or the path of a .py file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the file's code can raise
        raise ValueError(f"{_place(path, error)}: {type(error).__name__}: {_reason(error)}") from error
    recipe = getattr(module, "RECIPE", None)
    if not isinstance(recipe, Recipe):
        raise ValueError(f"{path} does not end in RECIPE = … (a quern.recipe.Recipe)")
    return recipe, path.read_text(encoding="utf-8")


def _place(path: Path, error: Exception) -> str:
    """The file and the line of it at which the error came about."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).name == path.name]
    if isinstance(error, SyntaxError) and Path(error.filename or "").name == path.name:
        lines.append(error.lineno)
    return f"{path}, line {lines[-1]}" if lines and lines[-1] else str(path)


def _reason(error: Exception) -> str:
    return " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
