"""The answers to a task's items on disk, NAME.answers.jsonl, and the comparison of two models' answers, item by item.

The first line has the settings; "task" is the score's name. Each further line is an item: its number, the hash of its
question and answer, the model's answer, the right one, and its score: 1 if it is right, else 0, or a share. CORE's
files (core/run.py) have the pick and the losses instead.

Right or wrong: McNemar's exact test, of the items that only one model got right. Other scores: the interval of the mean
difference by the paired bootstrap.

Sources: McNemar (1947), "Note on the sampling error of the difference between correlated proportions or percentages",
Psychometrika 12; Efron (1979), "Bootstrap methods: another look at the jackknife", Annals of Statistics 7.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quern.eval.run_task import Answered
from quern.eval.task import Item
from quern.records import read_lines
from quern.temporaries import write_whole

ENDING = ".answers.jsonl"
RESAMPLES = 10_000
CELLS = 1 << 22
"""Random indices in memory at a time."""
AGAIN = "evaluate both with the same files, --limit and --questions"

Key = tuple[str, int]
"""An item: its hash or number, and how many equal ones are before it."""


@dataclass(frozen=True)
class Answers:
    """The scores of one task's items. data: what the items were made from, where they are known by their number."""

    task: str
    data: str | None
    scores: dict[Key, float]


@dataclass(frozen=True)
class Comparison:
    """Two models on one task.

    Args:
        task: The task.
        count: Items.
        first, second: Mean scores.
        only_first, only_second: Items with a higher score of this model.
        p: The p value of McNemar's exact test, two-sided; None where scores are not 0 or 1.
        low, high: The 95 % interval of first − second.
    """

    task: str
    count: int
    first: float
    second: float
    only_first: int
    only_second: int
    p: float | None
    low: float
    high: float


def item_hash(item: Item) -> str:
    """16 hex digits over the conversation and the answer of an item; the model's tokenizer plays no part."""
    content = json.dumps([item.messages, item.answer, item.choices], sort_keys=True)
    return hashlib.sha256(content.encode("utf-8")).hexdigest()[:16]


def write_answers(folder: Path, task: str, settings: dict[str, Any], replies: Sequence[Answered]) -> None:
    """Writes the answers to FOLDER/TASK/KIND.answers.jsonl. An earlier evaluation's are replaced."""
    for kind in dict.fromkeys(reply.item.kind for reply in replies):
        own = [(reply.item, reply.text, int(reply.correct)) for reply in replies if reply.item.kind == kind]
        write_items(folder / _plain(task) / f"{_plain(kind)}{ENDING}", {**settings, "task": f"{task}/{kind}"}, own)


def write_items(path: Path, header: dict[str, Any], scored: Sequence[tuple[Item, str, float]]) -> None:
    """Writes one file. scored: (item, answer, score) of each item."""
    items = [
        {"item": number, "prompt": item_hash(item), "answer": answer, "gold": item.answer, "score": score}
        for number, (item, answer, score) in enumerate(scored)
    ]
    write_lines(path, [header, *items])


def write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Writes a whole file of JSON lines; makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "".join(json.dumps(line) + "\n" for line in lines))


def _plain(name: str) -> str:
    """The name as a file's: a task file may choose any."""
    return re.sub(r"[^\w.-]+", "_", name).lstrip(".") or "_"


def read_answers(*folders: Path) -> dict[str, Answers]:
    """The answers in files *.answers.jsonl below folders, by task. Folders may be missing.

    Raises:
        ValueError: A file is damaged.
    """
    paths = sorted(path for folder in folders for path in folder.rglob(f"*{ENDING}"))
    return {own.task: own for own in map(_read, paths)}


def _read(path: Path) -> Answers:
    seen: Counter[str] = Counter()
    scores: dict[Key, float] = {}
    try:
        lines = read_lines(path)
        task, data = str(lines[0]["task"]), lines[0].get("data")
        for line in lines[1:]:
            # CORE's hash is of token ids, which another tokenizer changes; its numbers are of the file's rows.
            name = f"item {line['item']}" if data else str(line["prompt"])
            scores[name, seen[name]] = float(line["score"] if "score" in line else line["correct"])
            seen[name] += 1
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error!r}): remove it and evaluate again") from None
    return Answers(f"core/{task}" if data else task, data, scores)


def mcnemar(only_first: int, only_second: int) -> float:
    """The exact two-sided p value: how likely such an uneven split is, if each model is as likely to be the only one
    that is right."""
    from scipy.stats import binomtest

    count = only_first + only_second
    return float(binomtest(only_first, count).pvalue) if count else 1.0


def paired_bootstrap(differences: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """The 95% percentile interval of the mean of `differences`, one per item, under drawing items with replacement."""
    from scipy.stats import bootstrap

    values = np.asarray(differences, dtype=np.float64)
    if len(values) == 1:
        return float(values[0]), float(values[0])
    at_once, draw = max(1, CELLS // len(values)), np.random.default_rng(0)
    found = bootstrap((values,), np.mean, n_resamples=RESAMPLES, batch=at_once, method="percentile", rng=draw)
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def compare(first: Answers, second: Answers, names: tuple[str, str]) -> Comparison:
    """Compares two models on one task.

    Args:
        first, second: Their answers.
        names: Their names, for messages.

    Raises:
        ValueError: The items are not the same; the message says how many are missing.
    """
    task = first.task
    if first.data != second.data:
        raise ValueError(f"{task}: {names[0]} and {names[1]} were asked from files that differ: {AGAIN}")
    only = [len(one.scores.keys() - other.scores.keys()) for one, other in ((first, second), (second, first))]
    if any(only):
        parts = [f"{count:,} items only of {name}" for count, name in zip(only, names, strict=True) if count]
        raise ValueError(f"{task}: {' and '.join(parts)}: {AGAIN}")
    a, b = (np.array([one.scores[key] for key in first.scores]) for one in (first, second))
    if not a.size:
        raise ValueError(f"{task}: none of its items was asked: {AGAIN}")
    wins, losses = int((a > b).sum()), int((a < b).sum())
    p = mcnemar(wins, losses) if set(np.unique([a, b])) <= {0.0, 1.0} else None
    low, high = paired_bootstrap(a - b)
    return Comparison(task, a.size, float(a.mean()), float(b.mean()), wins, losses, p, low, high)
