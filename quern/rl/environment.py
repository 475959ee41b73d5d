"""An environment: where questions come from, and what a reply is worth."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from quern.data.token_file import fingerprint as marks_of
from quern.eval.task import Item
from quern.temporaries import sha256_of
from quern.text.chat import validate
from quern.text.tinyworld.skills import bucket

HELD_OUT_SHARE = 10
"""One question in this many belongs to the split that decides, and is never practised."""
TRIES = 1000


@dataclass(frozen=True)
class Environment:
    """Questions that a program can grade."""

    name: str  # the name of its scores
    ask: Callable[[str], Item]  # (seed) → a question. Equal seeds give equal questions; a seed is any text.
    reward: Callable[[Item, str], float]
    """(item, text of the reply without tool calls) → its reward, a finite number; usually 0 or 1."""
    files: tuple[Path, ...] = ()
    """The files that questions and rewards are read from; a resumed stage must find the same contents."""
    notes: tuple[str, ...] = ()  # lines for the user on how they were read


def fingerprint(environments: Sequence[Environment]) -> str:
    """SHA-256 (hex) of the environments' names and files."""
    return marks_of(*(part for one in environments for part in (one.name, *map(sha256_of, one.files))))


def is_held_out(item: Item) -> bool:
    """Whether a question belongs to the split that decides. Only its text counts, so no seed can mix the splits."""
    return bucket(item.question, HELD_OUT_SHARE) == 0


MISTAKES = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError, ValueError)
"""The exceptions that a slip in a user's file raises."""


@contextmanager
def _own_code(environment: Environment, function: str) -> Iterator[None]:
    try:
        yield
    except MISTAKES as error:
        what = f"{function}() of environment '{environment.name}' fails with {type(error).__name__}: {error}"
        raise ValueError(f"{what}; correct it and begin again, under a new --run if steps were taken") from error


def reward_of(environment: Environment, item: Item, reply: str) -> float:
    """The reward of a reply to a question. Raises ValueError if the environment gives no finite number."""
    with _own_code(environment, "reward"):
        reward = float(environment.reward(item, reply))
    if not math.isfinite(reward):
        raise ValueError(f"environment '{environment.name}' gave the reward {reward}: give a finite number")
    return reward


def draw_item(environment: Environment, seed: str, held_out: bool = False) -> Item:
    """The question of a seed, from one of the two splits.

    Raises:
        ValueError: The environment has no question in that split, or its `ask` fails.
    """
    for attempt in range(TRIES):
        with _own_code(environment, "ask"):
            item = environment.ask(f"{seed}:{attempt}")
            validate(item.messages)
        if is_held_out(item) == held_out:
            return item
    part = "held out" if held_out else "to practise"
    raise ValueError(
        f"environment '{environment.name}': none of the questions of {TRIES} seeds is {part}: it needs more questions"
    )
