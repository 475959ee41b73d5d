"""The built-in evaluation tasks, one file each, and how a task is found: by its name, or in a file."""

from __future__ import annotations

from pathlib import Path

from quern.eval.task import Task
from quern.eval.tasks.tinyworld import TASK
from quern.flags.recipe_file import read_object

BUILT_IN = {TASK.name: TASK}


def load_task(name: str) -> Task:
    """The built-in task of this name, or the TASK of this Python file.

    Raises:
        ValueError: There is no such task, or the file fails; the message names the tasks or the line.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    path = Path(name)
    if path.suffix != ".py" or not path.is_file():
        raise ValueError(f"there is no task '{name}': use {', '.join(BUILT_IN)}, core, chat, or the path of a .py file")
    return read_object(path, "TASK", Task)[0]
