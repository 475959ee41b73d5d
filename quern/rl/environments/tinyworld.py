"""Questions of the built-in world: sums, word problems, spelling, counting. The reward is 1 for a right reply, else 0.

Sums and word problems come from the part of the world that is trained on. Spelling and counting ask for words that no
conversation asks for, so a model that has learnt those by heart has something to practise. What `quern evaluate` asks
for is in no environment.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from quern.eval.task import Item
from quern.rl.environment import Environment
from quern.text.tinyworld.corpus import Question, check
from quern.text.tinyworld.prose import Pen
from quern.text.tinyworld.skills import (
    PRACTICE_WORDS,
    Exercise,
    counting_exercise,
    spelling_exercise,
    sum_exercise,
    word_problem,
)

EXERCISES: dict[str, Callable[[Pen], Exercise]] = {
    "sums": sum_exercise,
    "word_problems": word_problem,
    "spelling": partial(spelling_exercise, words=PRACTICE_WORDS),
    "counting": partial(counting_exercise, words=PRACTICE_WORDS),
}
NAMES = tuple(EXERCISES)


def ask(kind: str, seed: str) -> Item:
    exercise = EXERCISES[kind](Pen(f"rl:{seed}"))
    return Item(kind, [{"role": "user", "content": exercise.question}], exercise.answer, None, exercise.chance)


def reward(item: Item, reply: str) -> float:
    return float(check(Question(item.kind, item.messages, item.answer, item.chance), reply))


def environment(name: str, folder: Path | None) -> Environment:
    return Environment(name, partial(ask, name), reward)
