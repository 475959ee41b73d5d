"""The built-in environments, one file for each source of questions, and how one is found: by name, or in a file.

A new environment is one Python file that ends in `ENVIRONMENT = Environment(…)`; `quern rl --rl.rewards FILE` uses it.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from quern.flags.recipe_file import read_object
from quern.rl.environment import Environment


def built_in() -> dict[str, Any]:
    """For each built-in environment, its module: it has NAMES and `environment(name, folder)`."""
    modules = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    return {name: module for module in modules for name in module.NAMES}


def load_environment(name: str, folder: Path | None = None) -> Environment:
    """The built-in environment of this name, or the ENVIRONMENT of this Python file.

    Args:
        name: A name, or a path that ends in .py.
        folder: Where built-in environments find their files (`rl.data`).

    Raises:
        ValueError: There is no such environment, its file is missing or damaged, or the Python file fails.
    """
    known = built_in()
    if name in known:
        return known[name].environment(name, folder)
    path = Path(name)
    if path.suffix != ".py" or not path.is_file():
        raise ValueError(f"rl.rewards: there is no '{name}': use {', '.join(known)}, or the path of a .py file")
    found = read_object(path, "ENVIRONMENT", Environment)[0]
    return replace(found, files=(*found.files, path))
