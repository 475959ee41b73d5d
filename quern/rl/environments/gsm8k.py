"""GSM8K's training problems. The reward is 1 if the last number of the reply is the answer, else 0."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

from quern.eval.gsm8k import find_gsm8k, is_right, read_gsm8k
from quern.eval.task import Item
from quern.rl.environment import Environment

NAMES = ("gsm8k",)


def environment(name: str, folder: Path | None) -> Environment:
    """Raises FileNotFoundError or ValueError if the folder has no file train.jsonl, or a damaged one."""
    if folder is None:
        raise ValueError(f"rl.rewards {name}: name the folder with its train.jsonl by --rl.data")
    notes: list[str] = []
    items = read_gsm8k(folder, "train", notes.append)
    return Environment(name, partial(_ask, items), _reward, (find_gsm8k(folder, "train"),), tuple(notes))


def _ask(items: list[Item], seed: str) -> Item:
    return random.Random(seed).choice(items)


def _reward(item: Item, reply: str) -> float:
    return float(is_right(item, reply))
