"""Compute multipliers: how much less compute an idea needs than the baseline for the same loss, and how that changes.

The baseline's loss over compute C is L(C) = E + A / C^α, fitted to its mean loss on each rung (Hestness et al. 2017,
arXiv 1712.00409). An idea that at a rung spends c and is better by d than the baseline there has the multiplier
m = C(L(C₀) + d) / c, where C₀ is what the baseline spends and C(·) inverts L. Intervals are quantiles over draws of the
baseline's means and of d; they do not cover the error of the law itself, which matters little close to C₀.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from quern.lab.verdict import Finding, Floats

DRAWS, SEED, LEVEL = 2_000, 7, 0.95
LIMITS = 64
"""Values of E that are tried, from 0 to 98 % of the lowest loss."""
STEP = math.log(4)
"""Distance of two rungs in ln C."""
MOST = math.log(1000)
"""Largest |ln m|: the baseline may never reach a loss."""
HOLDS = 0.02
"""A multiplier that changes by less than this share from rung to rung holds."""
SMALL = 0.05
LEAST_SPREAD = 0.35 / STEP
"""Least standard deviation of the slopes: ln m changes by a third from rung to rung. It is assumed, not measured."""
Trend = Literal["grows", "holds", "fades", "unclear"]


class Mean(NamedTuple):
    """A mean loss, with its standard error, at a compute (FLOPs or seconds)."""

    compute: float
    loss: float
    error: float


class Estimate(NamedTuple):
    """A value with the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


class Curve:
    """The baseline's loss over compute: a fit, and DRAWS fits of redrawn means, whose first is the fit itself.

    Two rungs give a straight line in logarithms (E = 0), three or more the whole law. means: of at least two rungs.
    """

    def __init__(self, means: Sequence[Mean]) -> None:
        noise = np.random.default_rng(SEED).standard_normal((DRAWS, len(means))) * (np.arange(DRAWS) > 0)[:, None]
        compute_R, loss_R, error_R = np.array(sorted((one.compute, one.loss, one.error) for one in means)).T
        losses_DR, x_R = loss_R + noise * error_R, np.log(compute_R)
        shares = np.linspace(0, 0.98, LIMITS) if len(means) > 2 else np.zeros(1)
        best = np.full(DRAWS, math.inf)
        self.limit, self.level, self.slope = np.zeros(DRAWS), np.zeros(DRAWS), np.zeros(DRAWS)
        for share in shares:
            limit = share * losses_DR.min(1)
            y_DR = np.log(losses_DR - limit[:, None])
            slope = ((x_R - x_R.mean()) * y_DR).sum(1) / np.square(x_R - x_R.mean()).sum()
            level = y_DR.mean(1) - slope * x_R.mean()
            misfit = np.square(limit[:, None] + np.exp(level[:, None] + slope[:, None] * x_R) - losses_DR).sum(1)
            better = misfit < best
            for kept, value in ((best, misfit), (self.limit, limit), (self.level, level), (self.slope, slope)):
                kept[better] = value[better]

    def loss(self, compute: float) -> Floats:
        """The loss at a compute, by draw."""
        return self.limit + np.exp(self.level + self.slope * math.log(compute))

    def log_compute(self, loss_D: Floats) -> Floats:
        """ln C at which the baseline reaches a loss, by draw; inf for a loss that it never reaches."""
        above = loss_D - self.limit
        with np.errstate(divide="ignore", invalid="ignore"):
            found = (np.log(above) - self.level) / self.slope
        return np.where(above > 0, found, math.inf)


def multiplier(curve: Curve, base: float, own: float, found: Finding, key: str = "") -> Floats:
    """ln of an idea's compute multiplier, by draw; the first is the estimate. base, own: what the baseline and the idea
    spend; key: names the draws of the difference, which differ from those of other ideas and rungs; those of the
    baseline's curve are the same for all."""
    degrees, generator = found.degrees, np.random.default_rng([SEED, *key.encode()])
    noise = generator.standard_t(min(degrees, 1e6), DRAWS) if degrees > 0 else np.full(DRAWS, math.nan)
    noise[0] = 0.0
    logs_D = curve.log_compute(curve.loss(base) + found.difference + found.error * noise) - math.log(own)
    return np.clip(logs_D, -MOST, MOST)


def told(logs_D: Floats) -> Estimate:
    """A multiplier from its logarithms."""
    ends = np.nanquantile(logs_D, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(*(math.exp(min(one, 700.0)) for one in (logs_D[0], *ends)))


class Course(NamedTuple):
    """The change of a multiplier over the rungs. factor: multiplier of one rung over that of the rung below."""

    factor: Estimate
    trend: Trend


def course(computes: Sequence[float], logs_RD: Sequence[Floats]) -> Course | None:
    """Fits a line to ln m over ln C, weighted by the rungs' variances; None for one rung."""
    found = _lines(computes, logs_RD)
    if found is None:
        return None
    factor = told(found[1] * STEP)
    if factor.low > 1 or factor.high < 1:
        return Course(factor, "grows" if factor.low > 1 else "fades")
    return Course(factor, "holds" if factor.low >= 1 - HOLDS and factor.high <= 1 + HOLDS else "unclear")


def _lines(computes: Sequence[float], logs_RD: Sequence[Floats]) -> tuple[Floats, Floats, float] | None:
    """Height at the mean, slope by draw, and the mean of ln C."""
    if len(computes) < 2:
        return None
    x_R, y_RD = np.log(computes), np.array(logs_RD)
    weights_R = 1 / np.maximum(np.nanvar(y_RD, axis=1), 1e-8)
    weights_R /= weights_R.sum()
    middle = float(weights_R @ x_R)
    height_D = weights_R @ y_RD
    slope_D = (weights_R * (x_R - middle)) @ y_RD / (weights_R @ np.square(x_R - middle))
    return height_D, slope_D, middle


def extrapolate(computes: Sequence[float], logs_RD: Sequence[Floats], to: float, spread: float) -> Floats:
    """ln m at a larger compute, predicted from the rungs below, by draw. A slope is shrunk towards 0, the multiplier
    that holds, by a normal prior that is wider for an idea that makes a larger difference."""
    generator = np.random.default_rng(SEED + 2)
    found = _lines(computes, logs_RD)
    height_D, slope_D, middle = found or (logs_RD[0], np.zeros(DRAWS), math.log(computes[0]))
    variance = math.inf if found is None else float(np.var(slope_D))
    prior = spread * (abs(float(height_D[0])) + SMALL)
    trust = prior**2 / (prior**2 + variance)
    noise = generator.standard_normal(DRAWS) * prior * math.sqrt(1 - trust)  # of the slope, given its estimate
    noise[0] = 0.0
    return height_D + (trust * slope_D[0] + noise) * (math.log(to) - middle)


def slope_spread(lines: Sequence[tuple[Sequence[float], Sequence[Floats]]]) -> float:
    """Standard deviation of the true slopes of ln m over ln C among ideas, as a share of |ln m| + SMALL, by moments; at
    least `LEAST_SPREAD`, since few ideas on two rungs tell little."""
    found = [one for computes, logs_RD in lines if (one := _lines(computes, logs_RD)) is not None]
    sizes = [abs(float(height_D[0])) + SMALL for height_D, _, _ in found]
    slopes = [float(slope_D[0]) / size for (_, slope_D, _), size in zip(found, sizes, strict=True)]
    noise = [float(np.var(slope_D)) / size**2 for (_, slope_D, _), size in zip(found, sizes, strict=True)]
    own = float(np.mean(np.square(slopes)) - np.mean(noise)) if found else 0.0
    return max(LEAST_SPREAD, math.sqrt(max(0.0, own)))
