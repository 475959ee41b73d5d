"""An evaluation task: its questions, how a model is asked, and which replies are right.

A new evaluation is one Python file that ends in `TASK = Task(…)`; experiments/task_capitals.py is an example.
`quern evaluate --tasks FILE` runs it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quern.recipe import Resolved
from quern.text.chat import Message

if TYPE_CHECKING:
    from quern.eval.likelihood import Example
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
    """

    kind: str
    messages: list[Message]
    answer: str
    choices: tuple[str, ...] | None = None
    chance: float = 0.0

    @property
    def question(self) -> str:
        """The text of the last message."""
        return str(self.messages[-1]["content"])


def question(
    text: str, answer: str, choices: tuple[str, ...] | None = None, kind: str = "questions", chance: float = 0.0
) -> Item:
    """An item with a single user message."""
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
    suits: Callable[[Resolved, str], bool] = lambda recipe, stage: True
    """Whether `quern evaluate` asks this stage of this recipe by default. Built-in tasks only."""
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
