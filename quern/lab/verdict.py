"""Verdicts on all ideas of one study together, from runs over seeds that may be looked at after every pair.

Statistics on scores; nothing here trains or reads a file. A score is a loss (bits per byte): lower is better. A
difference is idea - baseline of two runs with the same seed. docs/statistics.md explains the choices and has the
sources: moderated variances (Smyth 2004), a boundary over the looks (Wang & Tsiatis 1987) that is integrated (Armitage,
McPherson & Rowe 1969), false discovery rates (Benjamini & Hochberg 1995) and intervals as wide (Benjamini & Yekutieli
2005). A verdict follows from its interval alone, except "fails".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeGuard, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats

Floats = NDArray[np.floating[Any]]
Runs = Mapping[int, float | None]  # the score of each run by its seed; None for a run that failed
Verdict = Literal["undecided", "better", "better, small", "worse", "worse, small", "no difference", "fails"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)  # indexed by the codes of `Decision`
FIRST_LOOK = 3  # pairs before which nothing is decided
SHAPE = 0.25  # exponent of the boundary (Wang & Tsiatis 1987): 1/2 is Pocock's, 0 is O'Brien & Fleming's
WORST = 8.0  # bits per byte of a uniform guess; a run that ends there or above has failed
LEAST_VARIANCE = 1e-24  # the variance of equal differences; far below the rounding of a score
FAILURES = 0.05  # share of failed runs that an idea may have; or the baseline's share, if that is larger


@dataclass(frozen=True)
class Rules:
    """The rules that a study registers before its first run. delta: a smaller difference, in bits per byte, does not
    matter; most_pairs: an idea stays undecided after them; alpha: expected share of false verdicts among those of each
    kind, and the probability of any "better" or "worse" where no idea makes a difference."""

    delta: float
    most_pairs: int
    alpha: float = 0.05


@dataclass(frozen=True)
class Finding:
    """An idea against the baseline, in bits per byte; nan without a pair. pairs: runs of both that finished; failed:
    runs of the idea; difference, error, degrees: idea - baseline, with its standard error and degrees of freedom;
    interval: interval of the true difference, from which the verdict follows, except "fails"; correlation: Pearson's,
    of the runs of a pair, for three pairs or more."""

    verdict: Verdict
    pairs: int
    failed: int
    difference: float
    error: float
    degrees: float
    interval: tuple[float, float]
    correlation: float


class Judgement(NamedTuple):
    """The findings by idea. floor: the baseline against itself, on the seeds that no idea has; None for fewer than two;
    sd: SD of a pair's difference, common to the ideas, or nan; shared: degrees of freedom that it counts for."""

    findings: dict[str, Finding]
    floor: Finding | None
    sd: float
    shared: float


@lru_cache
def _crossings(most_pairs: int) -> tuple[Floats, Floats]:
    """Boundaries c, and the probability that |mean √n / sd| of normal differences without effect reaches c at any look:
    the density of the sum of n differences that have not crossed is integrated from look to look."""
    boundaries = np.linspace(0.5, 8, 51)[:, None]
    # A quadrature must resolve the density of one difference on a range that grows with the root of their number.
    nodes, weights = np.polynomial.legendre.leggauss(max(64, math.ceil(13 * math.sqrt(most_pairs))))
    end = boundaries * math.sqrt(FIRST_LOOK) * (FIRST_LOOK / most_pairs) ** (SHAPE - 0.5)
    mass = stats.norm.pdf(end * nodes, scale=math.sqrt(FIRST_LOOK)) * weights * end
    for n in range(FIRST_LOOK + 1, most_pairs + 1):
        before, end = end * nodes, boundaries * math.sqrt(n) * (n / most_pairs) ** (SHAPE - 0.5)
        density = np.einsum("bi,bij->bj", mass, stats.norm.pdf((end * nodes)[:, None, :] - before[:, :, None]))
        mass = density * weights * end
    return boundaries[:, 0], np.maximum(1 - mass.sum(-1), 1e-14)


def critical(level: ArrayLike, most_pairs: int) -> Floats:
    """Normal score that the looks together exceed with probability `level`, on either side, without an effect."""
    boundaries, probability = _crossings(most_pairs)
    return np.interp(-np.log(np.asarray(level, float)), -np.log(probability), boundaries)


def moderate(variances: ArrayLike, degrees: ArrayLike) -> tuple[Floats, Floats]:
    """Computes what the variances of the ideas of a study (last axis) have in common, and the degrees of freedom that
    it counts for in each. Unstable ideas would hide what the others have in common (Phipson et al. 2016), so they share
    nothing: those with a variance that the largest of K ordinary ones exceeds in one study of 20. Ordinary ones are
    first taken to be equal, then to differ as far as the first estimate says."""
    v, df = np.broadcast_arrays(np.asarray(variances, float), np.asarray(degrees, float))
    known = (v > LEAST_VARIANCE) & (df > 0)
    seldom = 0.05 / v.shape[-1]
    half, at = np.unique(np.where(known, df, 1.0) / 2, return_inverse=True)  # few: they are numbers of pairs
    at = at.reshape(v.shape)
    logs = np.log(np.where(known, v, 1.0)) - (special.digamma(half) - np.log(half))[at]
    errors = special.polygamma(1, half)[at]
    scaled = np.where(known, v * (half / special.gammaincinv(half, 0.5))[at], math.inf)
    median = np.take_along_axis(np.sort(scaled, -1), np.maximum(known.sum(-1, keepdims=True) - 1, 0) // 2, -1)
    most = median * (special.gammainccinv(half, seldom) / half)[at]
    common, weight = _common(logs, errors, df, known & (v <= most))
    with np.errstate(divide="ignore", invalid="ignore"):
        apart = known & (special.fdtrc(2 * half[at], weight, v / common) < seldom)
    common, weight = _common(logs, errors, df, known & ~apart)
    return common, np.where(apart, 0.0, weight)


def _common(logs: Floats, errors: Floats, df: Floats, known: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Moments of the logarithms of the `known` variances, whose sampling has the variances `errors` (Smyth 2004,
    section 6.2), with less weight, since all differences share the baseline's runs. K ideas, which correlate by up to
    1/4, know no more than K / (1 + (K - 1)/4) independent ones; (K - 3) / (K - 1), as James and Stein's, is for the
    error of the weight."""
    count = known.sum(-1, keepdims=True)
    rest = np.maximum(count - 1, 1)

    def mean(values: Floats) -> Floats:
        return np.where(known, values, 0.0).sum(-1, keepdims=True) / np.maximum(count, 1)

    centre = mean(logs)
    excess = mean(np.square(logs - centre)) * count / rest - mean(errors)
    prior_half = _inverse_trigamma(np.maximum(excess, 1e-4))
    common = np.exp(centre + special.digamma(prior_half) - np.log(prior_half)) * (count > 0)
    most = mean(df) * (count / (1 + (count - 1) / 4) - 1)
    return common, np.minimum(2 * prior_half, most) * np.maximum(count - 3, 0) / rest


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
    """Decides on all ideas of a study, which are the last axis of the arrays."""
    m, se, df, n = np.broadcast_arrays(*(np.asarray(value, float) for value in (difference, error, degrees, looks)))
    ideas = m.shape[-1]
    ready = (n >= FIRST_LOOK) & (df > 0) & np.isfinite(m)
    m, se, df = np.where(ready, m, 0.0), np.where(ready, se, math.inf), np.where(ready, df, 1.0)
    early, ranks = (np.clip(n / rules.most_pairs, 1e-9, 1)) ** (SHAPE - 0.5), np.arange(1, ideas + 1)

    def rejected(distance: Floats, sides: int) -> tuple[NDArray[np.bool_], Floats]:
        """Benjamini & Hochberg's rejections, and the normal score at the level that they leave each idea."""
        with np.errstate(divide="ignore", invalid="ignore"):
            t = np.where(ready, distance / se, -math.inf)
        score = -special.ndtri(special.stdtr(df, -t)) / early
        needed = critical(rules.alpha * ranks / ideas * 2 / sides, rules.most_pairs)
        count = (ranks * (-np.sort(-score, -1) >= needed)).max(-1, keepdims=True)
        least = needed[np.maximum(count, 1) - 1]
        return (count > 0) & (score >= least), least

    def half(score: Floats) -> Floats:
        return np.where(ready, -special.stdtrit(df, special.ndtr(-score * early)) * se, math.inf)

    differ, score = rejected(np.abs(m), 2)
    same, same_score = rejected(rules.delta - np.abs(m), 1)
    same &= ~differ
    wide, narrow = half(np.where(same | differ, score, np.maximum(score, same_score))), half(same_score)
    low = np.where(same, np.minimum(m - narrow, 0.0), m - wide)
    high = np.where(same, np.maximum(m + narrow, 0.0), m + wide)
    small = np.abs(m) < rules.delta
    codes = np.select([high < 0, low > 0, (-rules.delta <= low) & (high <= rules.delta)], [1 + small, 3 + small, 5], 0)
    return Decision(codes, low, high)


class Moments(NamedTuple):
    """Arrays over ideas: means, variances and covariance of both arms over the `pairs` seeds that they share;
    `base_rest`, the mean of the `others` seeds that only the baseline has; `spread`, its variance over all seeds."""

    pairs: Floats
    idea: Floats
    base: Floats
    idea_variance: Floats
    base_variance: Floats
    covariance: Floats
    others: Floats
    base_rest: Floats
    spread: Floats


class Estimate(NamedTuple):
    """Arrays over ideas: idea - baseline, its standard error and degrees of freedom; the variance of a pair's
    difference that they have in common, and the degrees of freedom that it counts for."""

    difference: Floats
    error: Floats
    degrees: Floats
    common: Floats
    weight: Floats


def estimate(found: Moments) -> Estimate:
    """Estimates idea - baseline: mean of (idea - a · baseline) over the pairs, - (1 - a) · mean of the other seeds. a
    is 1 in studies of fewer than four ideas. For runs of equal variance σ² whose differences have the variance τ² the
    best is 1 - (others / all seeds) · τ² / 2σ²; any a is unbiased, and the error is that of the a used."""
    n, degrees = np.maximum(found.pairs, 1.0), np.maximum(found.pairs - 1, 0.0)
    others, seeds = np.maximum(found.others, 1.0), np.maximum(found.pairs + found.others, 2.0)

    def variance(a: ArrayLike) -> tuple[Floats, Floats, Floats]:
        own = found.idea_variance + np.square(a) * found.base_variance - 2 * np.asarray(a) * found.covariance
        common, weight = moderate(own, degrees)
        total = np.maximum(weight + degrees, 1.0)
        return (weight * common + degrees * np.maximum(own, LEAST_VARIANCE)) / total, common, weight

    tau2, common, shared = variance(1.0)
    slope = np.minimum(tau2 / np.maximum(2 * found.spread, LEAST_VARIANCE), 1.0)
    a = 1 - np.where(shared > 0, found.others / seeds * slope, 0.0)
    moderated, _, weight = variance(a)
    parts = moderated / n, np.square(1 - a) * found.spread / others
    total = np.maximum(parts[0] + parts[1], LEAST_VARIANCE)
    # Successive t's of few degrees of freedom correlate less than the boundary supposes: one degree is for that.
    own = np.maximum(weight + degrees - degrees / np.maximum(weight + degrees, 1.0), 1e-9)
    inverse = np.square(parts[0] / total) / own + np.square(parts[1] / total) / (seeds - 1)
    difference = found.idea - a * found.base - (1 - a) * found.base_rest
    return Estimate(difference, np.sqrt(total), 1 / np.maximum(inverse, 1e-9), common, shared)


def is_score(bpb: float | None) -> TypeGuard[float]:
    """Whether a run with these bits per byte is a number; else it has failed."""
    return bpb is not None and bpb < WORST


def score(bpb: float | None) -> float:
    """Bits per byte of a run, finite. A run that failed counts as `WORST`."""
    return bpb if is_score(bpb) else WORST


def _scores(runs: Runs) -> dict[int, float]:
    """The runs that finished."""
    return {seed: bpb for seed, bpb in runs.items() if is_score(bpb)}


def _moments(base: dict[int, float], idea: dict[int, float]) -> list[Any]:
    """The fields of `Moments` for one idea."""
    shared = sorted(base.keys() & idea.keys())
    rest = [score for seed, score in base.items() if seed not in idea]
    pair = np.array([[idea[seed] for seed in shared], [base[seed] for seed in shared]])
    cov = np.cov(pair) if len(shared) > 1 else np.zeros((2, 2))
    means = pair.mean(-1) if shared else [math.nan, math.nan]
    spread = np.var(list(base.values()), ddof=1) if len(base) > 1 else 0.0
    return [len(shared), *means, cov[0, 0], cov[1, 1], cov[0, 1], len(rest), np.mean(rest or [0.0]), spread]


def judge(base: Runs, ideas: Mapping[str, Runs], rules: Rules) -> Judgement:
    """Judges all ideas of a study, each on the seeds that it shares with the baseline. Stateless: call it after every
    pair, with all runs so far."""
    if not ideas:
        return Judgement({}, None, math.nan, 0.0)
    scores, runs = _scores(base), {name: _scores(idea) for name, idea in ideas.items()}
    found = Moments(*np.array([_moments(scores, one) for one in runs.values()], float).T)
    made = estimate(found)
    decision = decide(*made[:3], found.pairs, rules)
    tried = np.array([len(idea) for idea in ideas.values()])
    failed = tried - [len(one) for one in runs.values()]
    lost = fails(failed, tried, len(base) - len(scores), len(base), len(ideas), rules.alpha)
    with np.errstate(divide="ignore", invalid="ignore"):
        correlations = found.covariance / np.sqrt(found.idea_variance * found.base_variance)
    findings = {
        name: Finding(
            verdict="fails" if lost[at] else VERDICTS[int(decision.codes[at])],
            pairs=int(found.pairs[at]),
            failed=int(failed[at]),
            difference=float(made.difference[at]),
            error=float(made.error[at]),
            degrees=float(made.degrees[at]),
            interval=(float(decision.low[at]), float(decision.high[at])),
            correlation=float(correlations[at]) if found.pairs[at] > 2 else math.nan,
        )
        for at, name in enumerate(ideas)
    }
    sd = math.sqrt(made.common[0]) or math.nan
    return Judgement(findings, _floor(scores, runs, rules), sd, float(made.weight.max()))


def _floor(base: dict[int, float], ideas: Mapping[str, dict[int, float]], rules: Rules) -> Finding | None:
    """The baseline on the seeds of no idea, as an idea that is paired with its other seeds."""
    taken = set[int]().union(*ideas.values())
    first = {seed: score for seed, score in base.items() if seed in taken}
    twin = dict(zip(first, (score for seed, score in base.items() if seed not in taken), strict=False))
    return judge(first, {"twin": twin}, rules).findings["twin"] if len(twin) > 1 else None


def fails(
    failed: ArrayLike, runs: ArrayLike, base_failed: ArrayLike, base_runs: ArrayLike, ideas: int, alpha: float
) -> NDArray[np.bool_]:
    """Whether an idea fails more often than `FAILURES` and the baseline: binomial, at level alpha / (5 ideas)."""
    failed = np.asarray(failed)
    usual = np.maximum(FAILURES, np.asarray(base_failed) / np.maximum(base_runs, 1))
    return (failed > 0) & (special.bdtrc(failed - 1.0, runs, usual) <= alpha / ideas / 5)


def reach(sd: float, rules: Rules, ideas: int, shared: float = math.inf) -> tuple[float, float]:
    """Computes what a study can find by its most pairs with a probability of 80 %, in bits per byte: a single effect,
    and the smallest margin (delta) with which ideas without effect end as "no difference". The baseline has twice the
    pairs' seeds, which help where the ideas share a variance. shared: degrees of freedom that the ideas' common
    variance counts for; by default the number for equal variances."""
    n, power = rules.most_pairs, 0.8
    weight = min(shared, float(moderate(np.ones(ideas), n - 1)[1][0]))
    degrees = n - 1 + weight
    # Fewer than four ideas use pairs alone.
    error = sd * math.sqrt((1 + 1 / (2 if weight else 1)) / (2 * n))

    def score(level: float) -> float:
        return -float(special.stdtrit(degrees, special.ndtr(-critical(level, n))))

    effect = error * (score(rules.alpha / ideas) + special.ndtri(power))
    return effect, error * (score(2 * power * rules.alpha) + special.ndtri((1 + power) / 2))
