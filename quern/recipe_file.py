"""Reads a recipe from a Python file that ends in `RECIPE = …`. The file's code is executed."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path

from quern.recipe import Recipe


def read_recipe_file(path: Path, name: str | None = None) -> tuple[Recipe, str]:
    """Executes the file and returns its recipe.

    Args:
        path: A Python file.
        name: The module's name; by default the file name without its extension.

    Returns:
        The recipe and the text of the file.

    Raises:
        ValueError: The file fails (the message names the line), or defines no RECIPE.
    """
    name = name or path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the file's code can raise anything
        raise ValueError(f"{_place(path, error)}: {type(error).__name__}: {_reason(error)}") from error
    recipe = getattr(module, "RECIPE", None)
    if not isinstance(recipe, Recipe):
        raise ValueError(f"{path} does not end in RECIPE = … (a quern.recipe.Recipe)")
    return recipe, path.read_text(encoding="utf-8")


def _place(path: Path, error: Exception) -> str:
    """The file and the line that raised the error."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).name == path.name]
    if isinstance(error, SyntaxError) and Path(error.filename or "").name == path.name:
        lines.append(error.lineno)
    return f"{path}, line {lines[-1]}" if lines and lines[-1] else str(path)


def _reason(error: Exception) -> str:
    return " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
