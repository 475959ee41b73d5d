"""A score, with the settings that reproduce it: a line of evaluate.jsonl; sampling errors; and the work of many ranks.

A score moves with the prompt's wording, the BOS, the number of shots and the number of questions, so each is written
beside it. Intervals of accuracies are Wilson's, which hold near 0% and 100% and at small counts, where the usual normal
interval leaves the unit range. Values, intervals and chances are in the metric's own unit: a share from 0 to 1 for
accuracy, bits per byte for bpb.
Source: Wilson (1927), "Probable inference, the law of succession, and statistical inference", JASA 22.

Ranks: the batches are the same as in one process, and one rank computes each whole. So a result does not depend on the
number of ranks: with equal threads and dtype its bits are the same. Every rank gets all results.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import NormalDist
from typing import Any, TypeVar

import numpy as np

from quern.mesh import ProcessGroup, alone
from quern.terminal import counted

CONFIDENT = NormalDist().inv_cdf(0.975)
"""1.96, standard errors on each side of a value: an interval of 95%."""
SINGLE = alone().world
"""The group of a single process."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class Score:
    """The value of a metric on the questions of a task.

    Args:
        count: Questions asked; bytes for bpb.
        chance: The score of guessing on the same questions.
        prompt_hash: Hash of the token ids that the model was given; equal hashes mean the same questions, in the same
            words, through the same tokenizer.
        bos: Whether every prompt began with it.
        cropped: Prompts cut to fit the context.
        skipped: Questions that did not fit and were not asked; where that is all of them, there is no value.
        contaminated: The share of the questions that are in the training text (`contaminated_shares`).
    """

    task: str
    metric: str
    value: float | None
    low: float | None
    high: float | None
    count: int
    chance: float | None
    prompt_hash: str | None = None
    bos: bool | None = None
    shots: int = 0
    cropped: int = 0
    skipped: int = 0
    contaminated: float | None = None

    def described(self, context: int) -> str:
        """The score as text. context: the model's, in tokens."""
        if self.value is None:
            return f"not measured: none of its {counted(self.skipped, 'question')} fits a context of {context} tokens"
        interval = f" ({self.low:.3f} to {self.high:.3f})" if self.low is not None else ""
        chance = f", chance {self.chance:.3f}" if self.chance is not None else ""
        of = f"asked {self.count} of {counted(self.count + self.skipped, 'question')}"
        left_out = f"; {of}, the others do not fit a context of {context} tokens" if self.skipped else ""
        return f"{self.metric} {self.value:.3f}{interval}{chance}{left_out}"


def wilson(correct: int, count: int) -> tuple[float, float]:
    """The 95% Wilson interval (low, high) of the share `correct` / `count`; count: above 0."""
    z = CONFIDENT
    share = correct / count
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    # The ends are exact at 0 and at count; rounding must not push them past the share itself.
    return (0.0 if correct == 0 else max(0.0, centre - half)), (1.0 if correct == count else min(1.0, centre + half))


def interval(
    value: float, error: float, least: float = -math.inf, most: float = math.inf
) -> tuple[float, float] | tuple[None, None]:
    """Returns the 95% interval (low, high) of a value with a standard error, cut off at `least` and `most`. An error of
    0 has no interval: where all questions have the same score, nothing is known about the spread."""
    ends = max(least, value - CONFIDENT * error), min(most, value + CONFIDENT * error)
    return ends if error else (None, None)


def accuracy(task: str, correct: Sequence[bool], chances: Sequence[float], **settings: Any) -> Score:
    """The share of `correct` with its interval and the mean chance. Without questions it has no value."""
    if not correct:
        return Score(task, "accuracy", None, None, None, 0, None, **settings)
    right, count = sum(map(bool, correct)), len(correct)
    return Score(task, "accuracy", right / count, *wilson(right, count), count, sum(chances) / count, **settings)


def mean_score(name: str, parts: Sequence[tuple[Score, float]]) -> Score:
    """The mean centred accuracy (p − b) / (1 − b) of the tasks that have a value, given p and b of each task.

    The interval takes the tasks as independent, although two of CORE's ask the same questions, with and without shots.
    """
    known = [(score.value, score.count, base) for score, base in parts if score.value is not None]
    if not known:
        return Score(name, "centred accuracy", None, None, None, 0, None)
    mean = sum((p - base) / (1 - base) for p, _, base in known) / len(known)
    error = math.sqrt(sum(p * (1 - p) / count / (1 - base) ** 2 for p, count, base in known)) / len(known)
    return Score(name, "centred accuracy", mean, *interval(mean, error, most=1.0), sum(n for _, n, _ in known), 0.0)


def suite_score(
    suite: str, total: int, parts: Sequence[tuple[Score, float]], whole: bool, version: str = "", limited: str = ""
) -> Score:
    """The `mean_score` of a suite of `total` tasks. It has the suite's name only if all their questions were asked.

    whole: No task was limited; version: version of the baselines; limited: how tasks were limited, for the name.
    """
    measured, skipped = sum(score.value is not None for score, _ in parts), sum(score.skipped for score, _ in parts)
    name = f"{suite} {version}".rstrip()
    if measured < total or skipped or not whole:
        left_out = f"{counted(skipped, 'question')} left out" if skipped else ""
        name = ", ".join(filter(None, [f"mean of {measured} of {suite}'s {total} tasks", version, limited, left_out]))
    return mean_score(name, parts)


class Prompts:
    """The settings of a score that follow from its prompts, which are added in order.

    hash: SHA-256 over the token ids of each prompt, preceded by their number; bos: the token that begins each.
    """

    def __init__(self, bos: int, prompts: Iterable[Sequence[int]] = ()) -> None:
        self._bos, self._digest, self._begin = bos, hashlib.sha256(), True
        self.add(prompts)

    def add(self, prompts: Iterable[Sequence[int]]) -> None:
        for ids in prompts:
            self._begin &= len(ids) > 0 and ids[0] == self._bos
            self._digest.update(np.asarray([len(ids), *ids], dtype="<i8").tobytes())

    def settings(self) -> dict[str, Any]:
        return {"prompt_hash": self._digest.hexdigest()[:16], "bos": self._begin}


def own_part(work: Sequence[Result] | Iterator[Result], group: ProcessGroup) -> Iterator[Result]:
    """Every size-th piece of work, from this rank's on."""
    return islice(work, group.rank, None, group.size)


def on_ranks(
    batches: Sequence[Sequence[int]],
    compute: Callable[[Sequence[int]], Sequence[Result]],
    group: ProcessGroup,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Result]:
    """Computes the results of numbered items, each batch on one rank. All ranks call this, and get all results.

    Args:
        batches: The numbers of the items; each from 0 on is in one batch. Equal on all ranks.
        compute: Takes a batch, and returns a result for each of its items.
        progress: Called with about how many items all ranks have done.
    """
    found: list[tuple[int, Result]] = []
    total = sum(map(len, batches))
    for batch in own_part(batches, group):
        found += zip(batch, compute(batch), strict=True)
        progress(min(total, len(found) * group.size))
    pairs = (pair for part in group.gather_objects(found) for pair in part)
    return [result for _, result in sorted(pairs, key=lambda pair: pair[0])]
