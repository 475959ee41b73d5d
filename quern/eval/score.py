"""A score, with the settings that reproduce it: a line of evaluate.jsonl.

A score moves with the prompt's wording, the BOS, the number of shots and the number of questions, so each is
written beside it. Intervals are Wilson's, which hold near 0% and 100% and at small counts, where the usual
normal interval leaves the unit range.
What it is not: a reader or writer of files. Units: `value`, `low`, `high`, `chance` are in the metric's own
unit (a share from 0 to 1 for accuracy, bits per byte for bpb).
Source: Wilson (1927), "Probable inference, the law of succession, and statistical inference", JASA 22.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist

import numpy as np

from quern.terminal import counted

CONFIDENT = NormalDist().inv_cdf(0.975)
"""1.96, standard errors on each side of a value: an interval of 95%."""


@dataclass(frozen=True)
class Score:
    """`count` is the questions asked (bytes for bpb); `chance` is what guessing scores on the same questions.

    prompt_hash: of the token ids the model was given; equal hashes mean the same questions, in the same
    words, through the same tokenizer. bos: every prompt began with it. cropped: prompts cut to fit the
    context. skipped: questions that did not fit and were not asked; where that is all of them, there is no value.
    contaminated: the share of the questions that are in the training text (quern.eval.contamination); None: unknown.
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

    def to_json(self) -> dict[str, str | int | float | bool | None]:
        return asdict(self)

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
    """The 95% Wilson interval (low, high) of the share `correct` / `count`; (0, 1) if count is 0."""
    if not 0 <= correct <= count:
        raise ValueError(f"correct must lie between 0 and count, got {correct} of {count}")
    if count == 0:
        return 0.0, 1.0
    z = CONFIDENT
    share = correct / count
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    # The ends are exact at 0 and at count; rounding must not push them past the share itself.
    return (0.0 if correct == 0 else max(0.0, centre - half)), (1.0 if correct == count else min(1.0, centre + half))


def accuracy(
    task: str,
    correct: Sequence[bool],
    chances: Sequence[float],
    prompts: Sequence[Sequence[int]],
    *,
    bos: int,
    shots: int = 0,
    cropped: int = 0,
) -> Score:
    """The share of `correct`, its 95% interval, the mean chance, and the hash of the prompts (token ids)."""
    if not correct:
        raise ValueError(f"{task}: no questions to score; ask for at least one")
    right, count = sum(map(bool, correct)), len(correct)
    low, high = wilson(right, count)
    return Score(
        task=task,
        metric="accuracy",
        value=right / count,
        low=low,
        high=high,
        count=count,
        chance=sum(chances) / count,
        prompt_hash=prompt_hash(prompts),
        bos=all(len(ids) > 0 and ids[0] == bos for ids in prompts),
        shots=shots,
        cropped=cropped,
    )


def none_asked(task: str, skipped: int) -> Score:
    """The score of a task if no question fits the context."""
    return Score(task, "accuracy", None, None, None, 0, None, skipped=skipped)


def prompt_hash(prompts: Iterable[Sequence[int]]) -> str:
    """16 hex digits over the token ids of the prompts, in order; each is preceded by its length."""
    digest = hashlib.sha256()
    for ids in prompts:
        digest.update(np.asarray([len(ids), *ids], dtype="<i8").tobytes())
    return digest.hexdigest()[:16]
