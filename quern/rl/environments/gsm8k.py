"""GSM8K's training problems. The reward is 1 if the last number of the reply is the answer, else 0."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

from quern.eval.gsm8k import is_right, problem
from quern.eval.task import Item
from quern.rl.environment import Environment
from quern.text.formats import read_rows
from quern.text.sources import find_file

NAMES = ("gsm8k",)


def environment(name: str, folder: Path | None) -> Environment:
    """Raises FileNotFoundError or ValueError if the folder has no file train.jsonl, or a damaged one."""
    if folder is None:
        raise ValueError(f"rl.rewards {name}: name the folder with its train.jsonl by --rl.data")
    notes: list[str] = []
    path = find_file(folder, "train")
    if path is None:
        raise FileNotFoundError(f"{folder} has no GSM8K file train.jsonl: name its folder")
    items = read_rows(path, NAMES[0], ("question", "answer"), problem, notes.append)
    return Environment(name, partial(_ask, items), _reward, (path,), tuple(notes))


def _ask(items: list[Item], seed: str) -> Item:
    return random.Random(seed).choice(items)


def _reward(item: Item, reply: str) -> float:
    return float(is_right(item, reply))
