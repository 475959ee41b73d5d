"""Questions of the built-in world: sums, word problems, spelling, counting. The reward is 1 for a right reply, else 0.

They come from the part of the world that is trained on. The held-out words and operands that `quern evaluate` asks for
are in no environment.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from quern.eval.task import Item
from quern.rl.environment import Environment
from quern.text.tinyworld.corpus import Question, check
from quern.text.tinyworld.prose import Pen
from quern.text.tinyworld.skills import EXERCISES

NAMES = ("sums", "word_problems", "spelling", "counting")


def ask(kind: str, seed: str) -> Item:
    exercise = EXERCISES[kind](Pen(f"rl:{seed}"))
    return Item(kind, [{"role": "user", "content": exercise.question}], exercise.answer, None, exercise.chance)


def reward(item: Item, reply: str) -> float:
    return float(check(Question(item.kind, item.messages, item.answer, None, item.chance), reply))


def environment(name: str, folder: Path | None) -> Environment:
    return Environment(name, partial(ask, name), reward)
