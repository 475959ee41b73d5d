"""The built-in evaluation tasks, one file each, and how a task is found: by its name, or in a file."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

from quern.eval.task import Task
from quern.flags.recipe_file import read_object


def task_names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load_task(name: str) -> Task:
    """The built-in task of this name, or the TASK of this Python file.

    Raises:
        ValueError: There is no such task, or the file fails; the message names the tasks or the line.
    """
    if name in task_names():
        return importlib.import_module(f"quern.eval.tasks.{name}").TASK
    path = Path(name)
    if path.suffix != ".py" or not path.is_file():
        raise ValueError(
            f"there is no task '{name}': use {', '.join(task_names())}, core, chat, or the path of a .py file"
        )
    return read_object(path, "TASK", Task)[0]
