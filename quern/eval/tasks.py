"""The built-in evaluation task, held-out questions of the built-in world; how a task is found, by name or in a file.

The model answers in its own words, with tools: facts, sums, word problems, spelling, counting, multiple choice, small
talk. The questions depend only on (seed, count), so every stage of a run is asked the same questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quern.eval.task import CHAT_STAGES, Item, Task, question
from quern.flags.recipe_file import read_object
from quern.recipe import Resolved
from quern.text.tinyworld.corpus import QUESTION_KINDS, check, questions

BASE_PROMPTS = {"spelling": "{}", "counting": "{}", "choice": "{}\nAnswer:"}
"""The form in which the documents of the world ask for these kinds."""


def world_items(seed: int, count: int, kinds: Sequence[str] = QUESTION_KINDS) -> list[Item]:
    asked = (one for kind in kinds for one in questions(seed, kind, count))
    return [question(one.question, one.answer, kind=one.kind, chance=one.chance) for one in asked]


def world_grade(item: Item, reply: str) -> bool:
    return check(item.kind, item.question, item.answer, reply)


def world_prompt(item: Item) -> str:
    return BASE_PROMPTS.get(item.kind, "Question: {}\nAnswer:").format(item.question)


def _suits(recipe: Resolved, stage: str) -> bool:
    """Whether the stage's model has learned from the built-in world: its documents, or then its conversations."""
    return recipe.data == "tinyworld" or (stage in CHAT_STAGES and recipe.has_built_in_conversations)


TINYWORLD = Task("tinyworld", world_items, world_grade, world_prompt, suits=_suits)
BUILT_IN = {TINYWORLD.name: TINYWORLD}


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
