"""An evaluation task: its questions, how a model is asked, which replies are right; which questions were trained on.

A new evaluation is one Python file that ends in `TASK = Task(…)`; experiments/task_capitals.py is an example.
`quern evaluate --tasks FILE` runs it. The built-in task asks held-out questions of the built-in world: facts, sums,
word problems, spelling, counting, multiple choice, small talk. The model answers in its own words, with tools. The
questions depend only on (seed, count), so every stage of a run is asked the same questions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quern.flags.recipe_file import read_object
from quern.generate.sandbox import SandboxError
from quern.process import own_place
from quern.recipe import Resolved
from quern.text.chat import Message
from quern.text.clean.steps import Passages
from quern.text.tinyworld.corpus import QUESTION_KINDS, check, questions

if TYPE_CHECKING:
    from quern.eval.likelihood import Example
    from quern.mesh import ProcessGroup
    from quern.text.tokenizer import Tokenizer

CHAT_STAGES = ("sft", "rl")
"""The stages after which a model answers."""


@dataclass(frozen=True)
class Item:
    """One question.

    Args:
        kind: Items of one kind share a score, which is named "<task>/<kind>".
        messages: The conversation so far. It ends in the user's question.
        answer: The reference answer. With `choices`, it is one of them.
        choices: The options, of which the model picks the one of least loss per byte. None: the model answers in its
            own words.
        chance: The accuracy of the best blind guess. With `choices`, the score uses 1 / len(choices) instead.
        number: Which of the task's rows it is, for `Task.example`.
    """

    kind: str
    messages: list[Message]
    answer: str
    choices: tuple[str, ...] | None = None
    chance: float = 0.0
    number: int = 0

    @property
    def question(self) -> str:
        """The text of the last message."""
        return str(self.messages[-1]["content"])


def question(
    text: str, answer: str, choices: tuple[str, ...] | None = None, kind: str = "questions", chance: float = 0.0
) -> Item:
    """An item with a single user message. Raises ValueError for one that is no text, or empty."""
    if not isinstance(text, str) or not text.strip():
        raise ValueError("the question is no text, or empty")
    return Item(kind, [{"role": "user", "content": text}], answer, choices, chance)


def contains_answer(item: Item, reply: str) -> bool:
    """Whether the reply contains the reference answer as whole words. Case is ignored."""
    return re.search(rf"(?<!\w){re.escape(item.answer)}(?!\w)", reply, re.IGNORECASE) is not None


@dataclass(frozen=True)
class Task:
    """An evaluation."""

    name: str  # the first part of the names of its scores
    items: Callable[[int, int], Sequence[Item]]
    """(seed, count) → the items, at most `count` of each kind. A kind has choices in all its items or in none."""
    grade: Callable[[Item, str], bool] = contains_answer
    """(item, reply) → whether the text of a reply is right. Not used for items with choices."""
    base_prompt: Callable[[Item], str] = lambda item: f"Question: {item.question}\nAnswer:"
    """The text that a base model continues to answer the item."""
    max_tokens: int = 96  # the largest number of tokens of a reply
    base_stop: tuple[str, ...] = ("\n",)  # a base model's reply ends before any of these texts
    grade_all: Callable[[Sequence[Item], Sequence[str]], Sequence[bool]] | None = None
    """(items, replies) → whether each reply is right, where they are graded together, such as programs that a sandbox
    runs. Replaces `grade`."""
    example: Callable[[Item, Tokenizer, int], Example | None] | None = None
    """(item, tokenizer, context) → the rows of tokens by whose likelihoods the model answers, or None where they do not
    fit; in place of its prompt and choices."""
    data: str = ""
    """The fingerprint of all that the rows of `example` come from. Their answers are kept: a later evaluation of the
    same weights does not ask again. Empty: every evaluation asks."""


# The built-in world -----------------------------------------------------------------------------------------


BASE_PROMPTS = {"spelling": "{}", "counting": "{}", "choice": "{}\nAnswer:"}
"""The form in which the documents of the world ask for these kinds."""


def world_items(seed: int, count: int, kinds: Sequence[str] = QUESTION_KINDS) -> list[Item]:
    asked = (one for kind in kinds for one in questions(seed, kind, count))
    return [question(one.question, one.answer, kind=one.kind, chance=one.chance) for one in asked]


def world_grade(item: Item, reply: str) -> bool:
    return check(item.kind, item.question, item.answer, reply)


def world_prompt(item: Item) -> str:
    return BASE_PROMPTS.get(item.kind, "Question: {}\nAnswer:").format(item.question)


TINYWORLD = Task("tinyworld", world_items, world_grade, world_prompt)


def knows_world(recipe: Resolved, stage: str) -> bool:
    """Whether the stage's model has learned from the built-in world: its documents, or then its conversations."""
    return recipe.data == "tinyworld" or (stage in CHAT_STAGES and recipe.has_built_in_conversations)


@contextmanager
def own_code(function: str, again: str = "evaluate again") -> Iterator[None]:
    """Raises ValueError for any error of a function that the user wrote. again: what to do once it is corrected."""
    try:
        yield
    except SandboxError:
        raise
    except Exception as error:
        what = f"{own_place(error)}{function} fails with {type(error).__name__}: {error}"
        raise ValueError(f"{what}; correct it and {again}") from error


def load_task(name: str) -> Task:
    """The built-in task of this name, or the TASK of this Python file.

    Raises:
        ValueError: There is no such task, or the file fails; the message names the tasks or the line.
    """
    if name == TINYWORLD.name:
        return TINYWORLD
    path = Path(name)
    if path.suffix != ".py" or not path.is_file():
        raise ValueError(f"there is no task '{name}': use {TINYWORLD.name}, core, chat, or the path of a .py file")
    return read_object(path, "TASK", Task)[0]


# Contamination ----------------------------------------------------------------------------------------------


_OPTION = re.compile(r"^([A-Z])\) (.*)$", re.MULTILINE)


def find_contaminated(texts: Sequence[str], documents: Iterable[str]) -> list[bool]:
    """Whether each question, a text with its answer, shares a run of `WORDS` words with a document."""
    known, found = Passages(texts), [False] * len(texts)
    for document in documents:
        for number in known.found_in(document):
            found[number] = True
    return found


def passage(item: Item) -> str:
    """The text to look for in documents: an item's question, without lettered options, and its answer."""
    options = dict(_OPTION.findall(item.question))
    return f"{_OPTION.sub('', item.question)} {options.get(item.answer, item.answer)}"


def contaminated_shares(
    passages: Mapping[str, Sequence[str]], documents: Iterable[str], group: ProcessGroup
) -> dict[str, float]:
    """The share of each task's questions that share a run of words with the training text.

    Args:
        passages: Task → the texts of its questions.
        documents: This rank's part of the training text; read once, for all tasks.
        group: The ranks that read a part each.
    """
    own = find_contaminated([text for texts in passages.values() for text in texts], documents)
    found = map(any, zip(*group.gather_objects(own), strict=True))
    shares = {task: [next(found) for _ in texts] for task, texts in passages.items()}
    return {task: sum(own) / len(own) for task, own in shares.items() if own}
