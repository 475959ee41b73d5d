"""The built-in environments, one file for each source of questions, and how one is found: by name, or in a file.

A new environment is one Python file that ends in `ENVIRONMENT = Environment(…)`; `quern rl --rl.rewards FILE` uses it.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

from quern.recipe_file import read_object
from quern.rl.environment import Environment


def built_in() -> dict[str, Environment]:
    """The environments of this folder, by name. Each of its files has a list ENVIRONMENTS."""
    modules = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    return {environment.name: environment for module in modules for environment in module.ENVIRONMENTS}


def load_environment(name: str) -> Environment:
    """The built-in environment of this name, or the ENVIRONMENT of this Python file.

    Raises:
        ValueError: There is no such environment, or the file fails.
    """
    known = built_in()
    if name in known:
        return known[name]
    path = Path(name)
    if path.suffix != ".py" or not path.is_file():
        raise ValueError(f"rl.rewards: there is no '{name}': use {', '.join(known)}, or the path of a .py file")
    return read_object(path, "ENVIRONMENT", Environment)[0]
