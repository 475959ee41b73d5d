"""Evidence from paired runs: is an idea better than the baseline, with error rates that hold however often one looks?

Statistics on arrays of scores; nothing here trains or reads a file. A score is a loss (bits per byte): lower is better.
A difference is idea - base of one pair of runs with the same seeds. docs/statistics.md explains the choices.

The test is the Bayes factor of a normal mean with unknown variance; under the alternative the effect, mean / SD of the
differences, is N(0, tau2) (Gönen et al. 2005, "The Bayesian two-sample t test"). If the mean is 0 and the differences
are independent and normal, it is a test martingale: it ever reaches 1/alpha with probability at most alpha (Lai 1976;
Hendriksen, de Heide & Grünwald 2021, "Optional stopping with Bayes factors"; Wang & Ramdas 2023, arXiv:2310.03722).
tests/laws/test_verdict_law.py measures the error rates where the differences are not normal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

Floats = NDArray[np.floating[Any]]
Verdict = Literal["better", "worse", "no difference", "undecided"]
VERDICTS: tuple[Verdict, ...] = ("undecided", "better", "worse", "no difference")
"""Indexed by the codes that `decide` returns."""
TAU2 = 1.0
"""Variance of the effect under the alternative: about a third of the effects exceed 1 SD of the differences."""
WORST = 8.0
"""Score of a diverged run: 8 bits per byte, what a uniform guess scores. It does not depend on the other runs."""
OUTLYING = 3.5
"""Modified z-score above which a difference is flagged (Iglewicz & Hoaglin 1993)."""
FEWEST_FOR_OUTLIERS = 5
MOST_EXPONENT = 700.0  # exp of more overflows fp64


def score(bpb: float | None) -> float:
    """Bits per byte of a run, finite. One that diverged, with None, counts as `WORST`."""
    return WORST if bpb is None or not bpb < WORST else bpb


def log_bayes_factor(t: ArrayLike, n: ArrayLike, tau2: float = TAU2) -> Floats:
    """Log of the Bayes factor against mean 0, for the t statistic of `n` differences. Arrays broadcast.

    With k = 1 + n tau2 and v = n - 1: -log(k)/2 + n/2 [log(1 + t²/v) - log(1 + t²/(k v))]. It is 0 for n < 2.
    """
    t2, n = np.square(np.asarray(t, float)), np.asarray(n, float)
    k, v = 1 + n * tau2, np.maximum(n - 1, 1)
    with np.errstate(invalid="ignore"):  # inf - inf; the limit for infinite t is log k
        growth = np.where(np.isinf(t2), np.log(k), np.log1p(t2 / v) - np.log1p(t2 / (k * v)))
    return np.where(n < 2, 0.0, (n * growth - np.log(k)) / 2)


def critical_t(n: ArrayLike, alpha: ArrayLike, tau2: float = TAU2) -> Floats:
    """Smallest |t| whose Bayes factor reaches 1/alpha. Infinite where no t does: for few pairs it is bounded by
    k^((n-1)/2). This solves the formula of `log_bayes_factor` for t exactly."""
    n = np.asarray(n, float)
    log_k = np.log1p(n * tau2)
    log_ratio = (log_k - 2 * np.log(alpha)) / np.maximum(n, 1)  # of (1 + t²/v) to (1 + t²/(k v))
    reachable = (n >= 2) & (log_ratio < log_k)
    log_ratio = np.where(reachable, log_ratio, 0.0)
    squares = (n - 1) * np.expm1(log_ratio) / np.where(reachable, -np.expm1(log_ratio - log_k), 1.0)
    return np.where(reachable, np.sqrt(np.maximum(squares, 0.0)), np.inf)


def moments(differences: ArrayLike) -> tuple[Floats, Floats, Floats]:
    """Number, mean and SD of the first 1, 2, … differences along the last axis. The SD of one difference is nan."""
    x = np.asarray(differences, float)
    n = np.arange(1, x.shape[-1] + 1, dtype=float)
    origin = x[..., :1]  # sums about the first value do not cancel
    total, squares = np.cumsum(x - origin, -1), np.cumsum(np.square(x - origin), -1)
    variance = np.maximum(squares - np.square(total) / n, 0.0) / np.where(n > 1, n - 1, np.nan)
    return n, origin + total / n, np.sqrt(variance)


def t_statistic(n: ArrayLike, mean: ArrayLike, sd: ArrayLike) -> Floats:
    """mean / (sd / √n); for equal differences (SD 0) it is infinite, or 0 if all of them are 0. For n < 2 it is 0."""
    n, mean, sd = (np.asarray(values, float) for values in (n, mean, sd))
    spread = np.where((sd > 0) & (n > 1), sd, 1.0)
    t = np.where((sd == 0) & (mean != 0), np.inf, np.abs(mean) * np.sqrt(n) / spread)
    return np.where(n < 2, 0.0, np.copysign(t, mean))


def interval(
    n: ArrayLike, mean: ArrayLike, sd: ArrayLike, alpha: ArrayLike, tau2: float = TAU2
) -> tuple[Floats, Floats]:
    """Lower and upper end of the confidence sequence: every mean whose Bayes factor is below 1/alpha.

    Over all n together, it misses the true mean with probability at most alpha.
    """
    t = critical_t(n, alpha, tau2)
    with np.errstate(invalid="ignore"):  # infinite t times SD 0
        half = np.where(np.isinf(t), np.inf, t * np.asarray(sd, float) / np.sqrt(n))
    return np.asarray(mean, float) - half, np.asarray(mean, float) + half


def e_value(differences: ArrayLike, tau2: float = TAU2) -> float:
    """Evidence against "the true mean is 0": at most 1 on average if it is, at any stopping time."""
    n, mean, sd = moments(differences)
    t = t_statistic(n[-1], mean[-1], sd[-1])
    return math.exp(min(float(log_bayes_factor(t, n[-1], tau2)), MOST_EXPONENT))


@dataclass(frozen=True)
class Paired:
    """An idea against the baseline after `n` pairs."""

    n: int
    mean: float
    """Mean of idea - base; below 0 the idea is better."""
    sd: float
    """Standard deviation of the differences; nan for one pair."""
    alpha: float
    tau2: float
    interval: tuple[float, float]
    """Anytime-valid, of the mean, at level alpha. Verdicts follow from it and the e-value alone."""
    fixed_interval: tuple[float, float]
    """For display: the interval of a single look at a number of pairs that was fixed in advance."""
    method: Literal["paired t", "Welch t"]
    """Of `fixed_interval`: Welch's where the correlation is not positive."""
    correlation: float
    """Pearson's, between base and idea over the seeds; nan for fewer than three pairs or constant scores."""
    e_value: float
    """Evidence against a mean of 0."""
    outliers: tuple[int, ...]
    """Pairs (from 0) whose difference is far from the others. They count like all others."""
    diverged: tuple[int, int]
    """Diverged runs of base and idea."""


def compare_pairs(
    base: Sequence[float | None],
    idea: Sequence[float | None],
    alpha: float,
    tau2: float = TAU2,
) -> Paired:
    """Compares runs of the baseline and of an idea.

    Args:
        base: Score of each run; None, a number that is not finite, or one above `WORST` means that the run diverged.
        idea: The scores of the runs with the same seeds, in the same order.
        alpha: Share of studies that may be wrong.

    Raises:
        ValueError: There are no pairs, or the arms differ in length.
    """
    if len(base) != len(idea) or not base:
        raise ValueError(f"{len(base)} runs of the baseline and {len(idea)} of the idea: give one or more whole pairs")
    (base_scores, base_diverged), (idea_scores, idea_diverged) = _scores(base), _scores(idea)
    differences = idea_scores - base_scores
    n, mean, sd = (float(values[-1]) for values in moments(differences))
    low, high = interval(n, mean, sd, alpha, tau2)
    correlation = _correlation(base_scores, idea_scores)
    method, fixed = _one_look(base_scores, idea_scores, correlation, alpha)
    return Paired(
        n=len(base),
        mean=mean,
        sd=sd,
        alpha=alpha,
        tau2=tau2,
        interval=(float(low), float(high)),
        fixed_interval=fixed,
        method=method,
        correlation=correlation,
        e_value=e_value(differences, tau2),
        outliers=outliers(differences),
        diverged=(base_diverged, idea_diverged),
    )


def _scores(runs: Sequence[float | None]) -> tuple[Floats, int]:
    """The scores of an arm with `WORST` for diverged runs, and the number of those."""
    scores = np.array([math.nan if score is None else score for score in runs], float)
    diverged = ~(np.isfinite(scores) & (scores <= WORST))
    return np.where(diverged, WORST, scores), int(diverged.sum())


def _correlation(base: Floats, idea: Floats) -> float:
    if len(base) < 3 or np.ptp(base) == 0 or np.ptp(idea) == 0:
        return math.nan
    return float(np.corrcoef(base, idea)[0, 1])


def _one_look(
    base: Floats, idea: Floats, correlation: float, alpha: float
) -> tuple[Literal["paired t", "Welch t"], tuple[float, float]]:
    """The t interval of the mean difference, paired, or Welch's if the correlation is not positive."""
    n, differences = len(base), idea - base
    if n < 2:
        return "paired t", (-math.inf, math.inf)
    error, degrees = differences.std(ddof=1) / math.sqrt(n), n - 1.0
    welch = correlation <= 0  # false for nan
    if welch:
        parts = np.array([base.var(ddof=1), idea.var(ddof=1)]) / n
        error, degrees = math.sqrt(parts.sum()), parts.sum() ** 2 * (n - 1) / np.square(parts).sum()
    half = error * stats.t.ppf(1 - alpha / 2, degrees)
    mean = differences.mean()
    return "Welch t" if welch else "paired t", (float(mean - half), float(mean + half))


def outliers(differences: ArrayLike) -> tuple[int, ...]:
    """Positions of differences further than 3.5 SD from the median, with the SD estimated from the median absolute
    deviation (Iglewicz & Hoaglin 1993). None among fewer than five differences."""
    x = np.asarray(differences, float)
    if len(x) < FEWEST_FOR_OUTLIERS:
        return ()
    distances = np.abs(x - np.median(x))
    far = distances > OUTLYING * stats.norm.ppf(0.75) ** -1 * np.median(distances)
    return tuple(int(position) for position in np.flatnonzero(far))


def _rejected(e_values_K: Floats, alpha: float) -> NDArray[np.bool_]:
    """e-BH along the last axis (Wang & Ramdas 2022, "False discovery rate control with e-values"), for e-values that
    may depend on each other in any way: reject the j largest, for the largest j whose j-th is at least K/(alpha j)."""
    ranked = -np.sort(-e_values_K, -1)
    ranks = np.arange(1, ranked.shape[-1] + 1)
    count = (ranks * (ranked * ranks * alpha >= len(ranks))).max(-1, keepdims=True)
    least = np.take_along_axis(ranked, np.maximum(count - 1, 0), -1)
    return (count > 0) & (e_values_K >= least)


def decide(
    n: ArrayLike, mean: ArrayLike, sd: ArrayLike, delta: float, alpha: float, tau2: float = TAU2
) -> NDArray[np.intp]:
    """Codes of the verdicts on all ideas of a study, which are the last axis of the arrays; see `verdicts`."""
    n, mean, sd = np.broadcast_arrays(*(np.asarray(values, float) for values in (n, mean, sd)))
    low, high = interval(n, mean, sd, alpha / mean.shape[-1], tau2)
    same = (low >= -delta) & (high <= delta)
    logs = log_bayes_factor(t_statistic(n, mean, sd), n, tau2)
    # An e-value that is lowered is still one, so e-BH stays valid without the ideas that are "no difference".
    differ = _rejected(np.where(same, 0.0, np.exp(np.minimum(logs, MOST_EXPONENT))), alpha)
    return np.select([same, differ & (mean < 0), differ], [3, 1, 2], 0)


def verdicts(ideas: Sequence[Paired], delta: float, alpha: float) -> list[Verdict]:
    """The verdict on each idea of one study, corrected for the number of ideas.

    `no difference`: the idea's confidence sequence at level alpha / ideas is within [-delta, delta]. `better` and
    `worse`: of the others, e-BH rejects that the mean is 0. `undecided`: neither. Ideas that stopped earlier are given
    as they were when they stopped.
    """
    if not ideas:
        return []
    n, mean, sd = np.array([(idea.n, idea.mean, idea.sd) for idea in ideas]).T
    return [VERDICTS[code] for code in decide(n, mean, sd, delta, alpha, ideas[0].tau2)]


def verdict(paired: Paired, delta: float, alpha: float) -> Verdict:
    """The verdict on one idea by itself. alpha: for one of several ideas, divide it by their number."""
    return verdicts([paired], delta, alpha)[0]


@dataclass(frozen=True)
class Slope:
    """Change of the baseline's score for each unit of log horizon (a factor e), with its standard error."""

    mean: float
    error: float
    degrees: int

    def interval(self, alpha: float) -> tuple[float, float]:
        """Student's t interval; unbounded without degrees of freedom."""
        half = self.error * float(stats.t.ppf(1 - alpha / 2, self.degrees)) if self.degrees > 0 else math.inf
        return self.mean - half, self.mean + half


def local_slope(curves: Sequence[Sequence[tuple[float, float]]]) -> Slope:
    """Fits parallel lines, one for each seed, to the baseline's scores at horizons near the one of interest.

    Args:
        curves: For each seed, pairs of (log of the horizon, score). A horizon is a run's length in steps, FLOPs or
            seconds. Horizons within a factor of about two keep the curve close to a line; the misfit of the lines
            widens the standard error.

    Raises:
        ValueError: No seed has scores at two horizons.
    """
    centred = [np.array(curve, float) - np.mean(curve, axis=0) for curve in curves if len(curve)]
    x, y = np.concatenate(centred).T if centred else np.empty((2, 0))
    if not np.any(x):
        raise ValueError("no seed of the baseline has runs of two lengths: train it at two or more horizons")
    slope, degrees = float(x @ y / (x @ x)), len(x) - len(centred) - 1
    error = math.sqrt(float(np.square(y - slope * x).sum()) / degrees / float(x @ x)) if degrees > 0 else math.inf
    return Slope(slope, error, degrees)


@dataclass(frozen=True)
class Saved:
    """Share of the baseline's horizon that the idea saves at the same score; negative: it needs more."""

    share: float
    interval: tuple[float, float]


def share_saved(paired: Paired, slope: Slope, alpha: float) -> Saved:
    """Turns a difference of scores at a horizon h into the share of h that the idea saves.

    If both curves have this slope, the idea at horizon h exp(-difference / slope) scores what the baseline scores at h.
    The interval is anytime-valid: the difference's and the slope's, each at level alpha/2, combined. It does not cover
    the error of replacing a curve by a line: where the loss above its limit falls as h^-a, a share s is estimated as
    about s (1 - a s / 2).

    Returns:
        The share, nan where the slope is not negative. Where the slope's interval includes 0, any share up to 1.
    """

    def share(difference: float, fall: float) -> float:
        with np.errstate(over="ignore"):  # infinitely many times the horizon
            return 1 - float(np.exp(-difference / fall))

    low, high = interval(paired.n, paired.mean, paired.sd, alpha / 2, paired.tau2)
    falls = slope.interval(alpha / 2)
    ends = [share(float(end), fall) for end in (low, high) for fall in falls] if falls[1] < 0 else [-math.inf, 1.0]
    return Saved(share(paired.mean, slope.mean) if slope.mean < 0 else math.nan, (min(ends), max(ends)))


STUDIES, SEED = 10_000, 13


def detectable_effect(most_pairs: int, alpha: float, power: float = 0.8, tau2: float = TAU2) -> float:
    """Smallest effect, in SDs of the differences, that a share `power` of simulated studies finds.

    Infinite if so few pairs cannot decide at all. For one of several ideas, divide alpha by their number.
    """
    n, mean, sd = moments(np.random.default_rng(SEED).standard_normal((STUDIES, most_pairs)))
    with np.errstate(invalid="ignore"):  # the SD of one difference
        needed = critical_t(n, alpha, tau2) * sd / np.sqrt(n) + mean  # the improvement with which each look decides
    least = np.where(np.isnan(needed), math.inf, needed).min(-1)
    return float(np.quantile(least, power, method="higher"))
