"""Verdicts on all ideas of one study together, from runs over seeds that may be looked at after every pair.

Statistics on scores; nothing here trains or reads a file. A score is a loss (bits per byte): lower is better. A
difference is idea - baseline of two runs with the same seed. docs/statistics.md explains the choices.

- The variances of the ideas are moderated (Smyth 2004, "Linear models and empirical Bayes methods"): what the ideas
  have in common tells about each, which saves pairs.
- The boundary is constant in normal scores over the looks (Pocock 1977), exact for the registered most pairs
  (Armitage, McPherson & Rowe 1969).
- The false discovery rate is bounded among the ideas called better or worse, and among those called "no difference"
  (Benjamini & Hochberg 1995); intervals are widened as much (Benjamini & Yekutieli 2005). A verdict follows from its
  interval alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats

Floats = NDArray[np.floating[Any]]
Runs = Mapping[int, float | None]
"""The score of each run by its seed; None for a run that failed."""
Verdict = Literal["undecided", "better", "better, small", "worse", "worse, small", "no difference", "fails"]
VERDICTS: tuple[Verdict, ...] = (
    "undecided",
    "better",
    "better, small",
    "worse",
    "worse, small",
    "no difference",
    "fails",
)
"""Indexed by the codes of `Decision`."""
FIRST_LOOK = 3
"""Pairs before which nothing is decided."""
FAILURES = 0.05
"""Share of failed runs that an idea may have; or the baseline's share, if that is larger."""


@dataclass(frozen=True)
class Rules:
    """What a study registers before its first run.

    Args:
        delta: Bits per byte. A smaller difference does not matter.
        most_pairs: Pairs after which an idea stays undecided.
        alpha: Expected share of false verdicts among those of each kind, and the probability of any "better" or
            "worse" where no idea makes a difference.
    """

    delta: float
    most_pairs: int
    alpha: float = 0.05

    def __post_init__(self) -> None:
        if self.most_pairs < FIRST_LOOK:
            raise ValueError(f"{self.most_pairs} pairs decide nothing: give at least {FIRST_LOOK}")
        if not self.delta >= 0 or not 0 < self.alpha < 0.5:
            raise ValueError(f"delta {self.delta:g} must be at least 0, and alpha {self.alpha:g} between 0 and 0.5")


@dataclass(frozen=True)
class Finding:
    """An idea against the baseline.

    Args:
        verdict: "small": the difference is below delta.
        pairs: Pairs whose runs both finished.
        failed: Runs of the idea that failed.
        difference: Idea - baseline, bits per byte; nan without a pair.
        error: Standard error of the difference.
        degrees: Its degrees of freedom.
        interval: Of the true difference. The verdict, except "fails", follows from it alone.
        correlation: Pearson's, of baseline and idea over the seeds; nan for fewer than three pairs.
    """

    verdict: Verdict
    pairs: int
    failed: int
    difference: float
    error: float
    degrees: float
    interval: tuple[float, float]
    correlation: float

    @property
    def decided(self) -> bool:
        return self.verdict != "undecided"


@dataclass(frozen=True)
class Judgement:
    """The findings of a study.

    Args:
        findings: By idea.
        floor: The baseline against itself, on the seeds that no idea has; None for fewer than two of those.
        sd: Standard deviation of a pair's difference that the ideas have in common.
        degrees: The weight of `sd` beside an idea's own differences; infinite where all ideas are alike.
    """

    findings: dict[str, Finding]
    floor: Finding | None
    sd: float
    degrees: float


@lru_cache
def _crossings(most_pairs: int) -> tuple[Floats, Floats]:
    """Boundaries c, and the probability that |mean √n / sd| of normal differences without effect reaches c at any look.

    The density of the sum of n differences that have not crossed is integrated from look to look.
    """
    boundaries = np.linspace(0.5, 8, 51)[:, None]
    nodes, weights = np.polynomial.legendre.leggauss(64)
    end = boundaries * math.sqrt(FIRST_LOOK)
    mass = stats.norm.pdf(end * nodes, scale=math.sqrt(FIRST_LOOK)) * weights * end
    for n in range(FIRST_LOOK + 1, most_pairs + 1):
        before, end = end * nodes, boundaries * math.sqrt(n)
        density = np.einsum("bi,bij->bj", mass, stats.norm.pdf((end * nodes)[:, None, :] - before[:, :, None]))
        mass = density * weights * end
    return boundaries[:, 0], np.maximum(1 - mass.sum(-1), 1e-14)


def critical(level: ArrayLike, most_pairs: int) -> Floats:
    """Normal score that the looks together exceed with probability `level`, on either side, without an effect."""
    boundaries, probability = _crossings(most_pairs)
    return np.interp(-np.log(np.asarray(level, float)), -np.log(probability), boundaries)


def moderate(variances: ArrayLike, degrees: ArrayLike) -> tuple[Floats, Floats]:
    """Variance that the ideas of a study (last axis) have in common, and the degrees of freedom that it is worth.

    Moments of the log variances (Smyth 2004, section 6.2). Variances that are 0 or have no degrees of freedom do not
    count; of fewer than two, nothing is in common: 0 degrees.
    """
    v, df = np.broadcast_arrays(np.asarray(variances, float), np.asarray(degrees, float))
    known = (v > 0) & (df > 0)
    half, count = np.where(known, df, 1.0) / 2, known.sum(-1, keepdims=True)
    logs = np.where(known, np.log(np.where(known, v, 1.0)) - special.digamma(half) + np.log(half), 0.0)
    many = np.maximum(count, 2)
    mean = logs.sum(-1, keepdims=True) / np.maximum(count, 1)
    spread = np.where(known, np.square(logs - mean), 0.0).sum(-1, keepdims=True) / (many - 1)
    excess = spread - np.where(known, special.polygamma(1, half), 0.0).sum(-1, keepdims=True) / np.maximum(count, 1)
    prior_half = _inverse_trigamma(np.maximum(excess, 1e-4))
    pooled = np.where(known, df, 0.0).sum(-1, keepdims=True)
    variance = np.exp(mean + special.digamma(prior_half) - np.log(prior_half))
    return variance, np.where(count < 2, 0.0, np.minimum(2 * prior_half, pooled))


def _inverse_trigamma(x: Floats) -> Floats:
    """The y with trigamma(y) = x, by Newton's method on 1 / trigamma, which is convex (Smyth 2004, appendix)."""
    y = 0.5 + 1 / x
    for _ in range(8):
        value = special.polygamma(1, y)
        y = y + value * (1 - value / x) / special.polygamma(2, y)
    return y


class Decision(NamedTuple):
    """Arrays over ideas: codes of the verdicts, and the ends of the intervals."""

    codes: NDArray[np.intp]
    low: Floats
    high: Floats


def decide(difference: ArrayLike, error: ArrayLike, degrees: ArrayLike, looks: ArrayLike, rules: Rules) -> Decision:
    """Decides on all ideas of a study, which are the last axis of the arrays.

    Args:
        difference: Estimates of idea - baseline.
        error: Their standard errors.
        degrees: Degrees of freedom of these.
        looks: Pairs of each idea; fewer than `FIRST_LOOK` decide nothing.
        rules: What was registered.
    """
    m, se, df, n = np.broadcast_arrays(*(np.asarray(value, float) for value in (difference, error, degrees, looks)))
    ideas = m.shape[-1]
    ready = (n >= FIRST_LOOK) & (df > 0) & np.isfinite(m)
    m, se, df = np.where(ready, m, 0.0), np.where(ready, se, math.inf), np.where(ready, df, 1.0)
    ranks = np.arange(1, ideas + 1)

    def rejected(distance: Floats, sides: int) -> tuple[NDArray[np.bool_], Floats]:
        """Benjamini & Hochberg's rejections, and the normal score at the level that they leave each idea."""
        with np.errstate(divide="ignore", invalid="ignore"):
            t = np.where(ready, distance / se, -math.inf)
        score = -special.ndtri(special.stdtr(df, -t))
        needed = critical(rules.alpha * ranks / ideas * 2 / sides, rules.most_pairs)
        count = (ranks * (-np.sort(-score, -1) >= needed)).max(-1, keepdims=True)
        least = needed[np.maximum(count, 1) - 1]
        return (count > 0) & (score >= least), least

    def half(score: Floats) -> Floats:
        return np.where(ready, -special.stdtrit(df, special.ndtr(-score)) * se, math.inf)

    differ, score = rejected(np.abs(m), 2)
    same, same_score = rejected(rules.delta - np.abs(m), 1)
    same &= ~differ
    wide, narrow = half(np.where(same | differ, score, np.maximum(score, same_score))), half(same_score)
    low = np.where(same, np.minimum(m - narrow, 0.0), m - wide)
    high = np.where(same, np.maximum(m + narrow, 0.0), m + wide)
    small = np.abs(m) < rules.delta
    codes = np.select([high < 0, low > 0, (-rules.delta <= low) & (high <= rules.delta)], [1 + small, 3 + small, 5], 0)
    return Decision(codes, low, high)


def _scores(runs: Runs) -> dict[int, float]:
    """The runs that finished."""
    return {seed: score for seed, score in runs.items() if score is not None and math.isfinite(score)}


class _Estimate(NamedTuple):
    """Idea - baseline: mean of (idea - share · baseline) over the shared seeds - (1 - share) · mean of the others."""

    difference: float
    share: float
    variance: float
    pairs: int


def judge(base: Runs, ideas: Mapping[str, Runs], rules: Rules, errors: Mapping[str, float] | None = None) -> Judgement:
    """Judges all ideas of a study on one axis. Stateless: call it after every pair, with all runs so far.

    Args:
        base: The baseline's runs. It may have more seeds than the ideas.
        ideas: The runs of each idea. Seeds that the baseline has too are pairs.
        rules: What was registered.
        errors: Standard error of a correction that all pairs of an idea share, in bits per byte, by idea.

    Returns:
        The findings. An idea that is decided needs no further pairs.
    """
    errors = errors or {}
    scores, names = _scores(base), list(ideas)
    runs = [_scores(ideas[name]) for name in names]
    pairs = [sorted(scores.keys() & one.keys()) for one in runs]
    differences = [np.array([one[s] - scores[s] for s in shared]) for one, shared in zip(runs, pairs, strict=True)]
    n = np.array([len(shared) for shared in pairs])
    variances = np.array([one.var(ddof=1) if len(one) > 1 else 0.0 for one in differences])
    degrees = np.maximum(n - 1, 0)
    common, weight = moderate(variances, degrees) if names else (np.zeros(1), np.zeros(1))
    moderated = (weight * common + degrees * variances) / np.maximum(weight + degrees, 1e-300)
    mean = np.array([one.mean() if len(one) else math.nan for one in differences])
    extra = np.array([errors.get(name, 0.0) for name in names])
    error = np.sqrt(moderated / np.maximum(n, 1) + np.square(extra))
    decision = decide(mean, error, weight + degrees, n, rules) if names else Decision(*(np.zeros(0, int),) * 3)
    lost = len(base) - len(scores), len(base)
    findings = {
        name: Finding(
            verdict="fails" if _fails(lost, ideas[name], rules, len(names)) else VERDICTS[int(decision.codes[at])],
            pairs=int(n[at]),
            failed=len(ideas[name]) - len(runs[at]),
            difference=float(mean[at]),
            error=float(error[at]),
            degrees=float((weight + degrees)[at]),
            interval=(float(decision.low[at]), float(decision.high[at])),
            correlation=_correlation([scores[s] for s in pairs[at]], [runs[at][s] for s in pairs[at]]),
        )
        for at, name in enumerate(names)
    }
    return Judgement(findings, None, math.sqrt(float(common[0])), float(weight[0]))


def _fails(base: tuple[int, int], idea: Runs, rules: Rules, ideas: int) -> bool:
    """Whether an idea fails more often than `FAILURES` and the baseline: binomial, at level alpha / (5 ideas)."""
    failed = len(idea) - len(_scores(idea))
    usual = max(FAILURES, base[0] / max(base[1], 1))
    return failed > 0 and float(stats.binom.sf(failed - 1, len(idea), usual)) <= rules.alpha / ideas / 5


def _correlation(base: list[float], idea: list[float]) -> float:
    if len(base) < 3 or np.ptp(base) == 0 or np.ptp(idea) == 0:
        return math.nan
    return float(np.corrcoef(base, idea)[0, 1])


class Reach(NamedTuple):
    """What a study can find, bits per byte, with a probability of 80 %.

    `effect`: the smallest difference of a single idea that ends as better or worse. `delta`: the smallest margin with
    which ideas without effect end as "no difference".
    """

    effect: float
    delta: float


def reach(sd: float, rules: Rules, ideas: int, baseline_seeds: int = 1) -> Reach:
    """Computes what a study can find by its most pairs.

    Args:
        sd: Standard deviation of a pair's difference, bits per byte; where pairs do not correlate, √2 that of a run.
        rules: What is registered.
        ideas: Number of ideas.
        baseline_seeds: Seeds of the baseline for each pair.
    """
    n, power = rules.most_pairs, 0.8
    degrees = (n - 1) * (1 + ideas) / 2  # half of what ideas that are alike would lend each other
    error = sd * math.sqrt((1 + 1 / baseline_seeds) / (2 * n))

    def score(level: float) -> float:
        return -float(special.stdtrit(degrees, special.ndtr(-critical(level, n))))

    return Reach(
        error * (score(rules.alpha / ideas) + special.ndtri(power)),
        error * (score(2 * power * rules.alpha) + special.ndtri((1 + power) / 2)),
    )


def check_reach(sd: float, rules: Rules, ideas: int, baseline_seeds: int = 1) -> Reach:
    """Returns what a study can find.

    Raises:
        ValueError: delta is out of reach.
    """
    found = reach(sd, rules, ideas, baseline_seeds)
    if found.delta > rules.delta:
        raise ValueError(
            f"{rules.most_pairs} pairs whose differences have a standard deviation of {sd:.2g} cannot show that an "
            f"idea changes less than {rules.delta:g} bits per byte: give at least --delta {found.delta:.2g}, or "
            "more pairs with --most-pairs"
        )
    return found
