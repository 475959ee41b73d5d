"""The built-in world's held-out questions: facts, sums, word problems, spelling, counting, multiple choice, small talk.

The model answers in its own words, with tools. The questions depend only on (seed, count), so every stage of a run is
asked the same questions.
"""

from quern.eval.task import CHAT_STAGES, Item, Task
from quern.recipe import Resolved
from quern.text.tinyworld.corpus import QUESTION_KINDS, Question, check, questions

BASE_PROMPTS = {"spelling": "{}", "counting": "{}", "choice": "{}\nAnswer:"}
"""The form in which the documents of the world ask for these kinds."""


def items(seed: int, count: int) -> list[Item]:
    return [Item(**vars(question)) for kind in QUESTION_KINDS for question in questions(seed, kind, count)]


def grade(item: Item, reply: str) -> bool:
    return check(Question(item.kind, item.messages, item.answer, item.chance), reply)


def base_prompt(item: Item) -> str:
    return BASE_PROMPTS.get(item.kind, "Question: {}\nAnswer:").format(item.question)


def suits(recipe: Resolved, stage: str) -> bool:
    """Whether the stage's model has learned from the built-in world: its documents, or then its conversations."""
    return recipe.data == "tinyworld" or (stage in CHAT_STAGES and recipe.has_built_in_conversations)


TASK = Task("tinyworld", items, grade, base_prompt, suits=suits)
