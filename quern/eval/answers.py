"""The answers to a task's items on disk, TASK/KIND.answers.jsonl, and the comparison of two models, item by item.

The first line has the settings that the answers depend on, and their score; "task" is the score's name. That of a file
of samples has the model and the task only. Each further line is an item: its number, the hash of its question, answer
and choices, the model's answer, the right one, its score: 1 if it is right, else 0, or a share; and the mean loss of
each of its options, where those were measured.

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

from quern.eval.score import Score
from quern.eval.task import Item
from quern.records import read_lines, typed
from quern.temporaries import write_whole
from quern.text.chat import ContentPart

ENDING = ".answers.jsonl"
RESAMPLES = 10_000
CELLS = 1 << 22
"""Random indices in memory at a time."""
AGAIN = "evaluate both with the same files, --limit and --questions"

Scores = dict[tuple[str, int], float]
"""The score of each item: its hash, and how many equal ones are before it."""


@dataclass(frozen=True)
class Answered:
    """An item with the model's answer. parts: text, tool calls and outputs; text: the reply's, or the option that the
    model picked; number: the item's number within its kind; losses: the mean nats of each option that was scored."""

    item: Item
    parts: list[ContentPart]
    text: str
    correct: bool
    number: int = 0
    losses: tuple[float, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """Two models on one task. first, second: mean scores; only_first, only_second: items with a higher score of that
    model; p: p-value of McNemar's exact test, two-sided, None where scores are not 0 or 1; low, high: 95 % interval of
    first − second, None where all differences are equal."""

    task: str
    count: int
    first: float
    second: float
    only_first: int
    only_second: int
    p: float | None
    low: float | None
    high: float | None


def item_hash(item: Item) -> str:
    """16 hex digits over the conversation, the answer and the choices of an item; the tokenizer plays no part."""
    content = json.dumps([item.messages, item.answer, item.choices], sort_keys=True)
    return hashlib.sha256(content.encode("utf-8")).hexdigest()[:16]


def answers_file(folder: Path, task: str, kind: str) -> Path:
    """The file of the answers to a task's items of one kind."""
    return folder / _plain(task) / f"{_plain(kind)}{ENDING}"


def write_answers(path: Path, header: dict[str, Any], answers: Sequence[tuple[Answered, float]]) -> None:
    """Writes one file, in place of an earlier evaluation's. answers: each with its score."""
    lines = [header]
    for one, score in answers:
        line = {"item": one.number, "prompt": item_hash(one.item), "answer": one.text, "gold": one.item.answer}
        losses = {"losses": [round(loss, 6) for loss in one.losses]} if one.losses else {}
        lines.append({**line, "score": score, **losses})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "".join(json.dumps(line) + "\n" for line in lines))


def kept_score(path: Path, settings: dict[str, Any]) -> Score | None:
    """The score of the answers in a file, if they are whole and have the same settings."""
    try:
        first, *items = read_lines(path)
        score, right = typed(first["score"], Score), sum(line["score"] for line in items)
        whole = len(items) == score.count and (not items or right == round((score.value or 0.0) * score.count))
        return score if whole and {name: first.get(name) for name in settings} == settings else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None  # missing or damaged: the items are asked again


def _plain(name: str) -> str:
    """A file name for the name of a task or a kind, which may have any characters: C++ and C# get different ones."""
    plain = re.sub(r"[^\w.-]+", "_", name).lstrip(".")[:50]
    if plain and plain == name:
        return plain
    return f"{plain}_{hashlib.sha256(name.encode('utf-8', 'replace')).hexdigest()[:8]}"


def read_answers(folder: Path) -> dict[str, Scores]:
    """The scores by task in files *.answers.jsonl below a folder, which may be missing. ValueError: one is damaged."""
    return dict(map(_read, sorted(folder.rglob(f"*{ENDING}"))))


def _read(path: Path) -> tuple[str, Scores]:
    seen, scores = Counter[str](), Scores()
    try:
        first, *lines = read_lines(path)
        for line in lines:
            name = str(line["prompt"])
            scores[name, seen[name]] = float(line["score"])
            seen[name] += 1
        return str(first["task"]), scores
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error!r}): remove it and evaluate again") from None


def paired_bootstrap(differences: Sequence[float] | np.ndarray) -> tuple[float, float] | tuple[None, None]:
    """The 95% percentile interval of the mean of `differences`, one per item, under drawing items with replacement.
    Equal differences, such as 0, have none: they say nothing about the spread."""
    from scipy.stats import bootstrap

    values = np.asarray(differences, dtype=np.float64)
    if np.allclose(values, values[0]):
        return None, None
    at_once, draw = max(1, CELLS // len(values)), np.random.default_rng(0)
    found = bootstrap((values,), np.mean, n_resamples=RESAMPLES, batch=at_once, method="percentile", rng=draw)
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def compare(task: str, first: Scores, second: Scores, names: tuple[str, str]) -> Comparison:
    """Compares two models on one task, given their scores. task, names: for messages. Raises ValueError if the items
    are not the same; the message says how many are missing."""
    only = [len(one.keys() - other.keys()) for one, other in ((first, second), (second, first))]
    if any(only):
        parts = [f"{count:,} items only of {name}" for count, name in zip(only, names, strict=True) if count]
        raise ValueError(f"{task}: {' and '.join(parts)}: {AGAIN}")
    a, b = (np.array([one[key] for key in first]) for one in (first, second))
    if not a.size:
        raise ValueError(f"{task}: none of its items was asked: {AGAIN}")
    wins, losses = int((a > b).sum()), int((a < b).sum())
    p = None
    if set(np.unique([a, b])) <= {0.0, 1.0}:
        from scipy.stats import binomtest

        p = float(binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0
    low, high = paired_bootstrap(a - b)
    return Comparison(task, a.size, float(a.mean()), float(b.mean()), wins, losses, p, low, high)
