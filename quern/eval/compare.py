"""Compares the answers of two models to the same items, item by item.

Right or wrong: McNemar's exact test, of the items that only one model got right. Other scores: the interval of the mean
difference by the paired bootstrap. Answers are files of quern.eval.answers and of CORE.

Sources: McNemar (1947), "Note on the sampling error of the difference between correlated proportions or percentages",
Psychometrika 12; Efron (1979), "Bootstrap methods: another look at the jackknife", Annals of Statistics 7.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.stats import binom

from quern.eval.answers import ENDING
from quern.records import read_lines

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
        p: Of McNemar's exact test, two-sided; None where scores are not 0 or 1.
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


def mcnemar(only_first: int, only_second: int) -> float:
    """The exact two-sided p value: how likely such an uneven split is, if each model is as likely to be the only one
    that is right."""
    count = only_first + only_second
    return min(1.0, 2 * float(binom.cdf(min(only_first, only_second), count, 0.5)))


def paired_bootstrap(differences: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """The 95% percentile interval of the mean of `differences`, one per item, under drawing items with replacement.

    Raises:
        ValueError: There are no differences.
    """
    values = np.asarray(differences, dtype=np.float64)
    if not values.size:
        raise ValueError("there are no items to compare: evaluate at least one")
    draw = np.random.default_rng(0)
    at_once = max(1, CELLS // values.size)
    means = [
        values[draw.integers(0, values.size, (min(at_once, RESAMPLES - first), values.size))].mean(axis=1)
        for first in range(0, RESAMPLES, at_once)
    ]
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975])
    return float(low), float(high)


def read_answers(*folders: Path) -> dict[str, Answers]:
    """The answers in files *.answers.jsonl below folders, by task. Folders may be missing.

    Raises:
        ValueError: A file is damaged.
    """
    found = {}
    for path in sorted(path for folder in folders for path in folder.rglob(f"*{ENDING}")):
        own = _read(path)
        found[own.task] = own
    return found


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


def compare(first: Answers, second: Answers, names: tuple[str, str]) -> Comparison:
    """Compares two models on one task.

    Args:
        first, second: Their answers.
        names: Of the models, for messages.

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
