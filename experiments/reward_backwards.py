"""A reward in one file: write a number backwards.

Practise it with `quern rl --rl.rewards experiments/reward_backwards.py`.
"""

from quern.eval.task import Item, question
from quern.rl.environment import Environment


def ask(seed: str) -> Item:
    """A question; equal seeds give equal questions."""
    number = sum(map(ord, seed)) % 90 + 10
    return question(f"Write {number} backwards.", str(number)[::-1])


def reward(item: Item, reply: str) -> float:
    return float(item.answer in reply)


ENVIRONMENT = Environment("backwards", ask, reward)
