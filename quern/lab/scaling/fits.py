"""Fits of scaling laws: power laws, and the parabolas of IsoFLOP budgets with their envelope.

Pure NumPy and SciPy. N: parameters, by any convention; D: tokens; C: FLOPs; a loss may have any unit. Logarithms are
natural. A fit that its data cannot support carries the reason in `refusal` instead of numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

Array = NDArray[Any]  # an array of float64

FEWEST_CELLS = 4  # points of a parabola: its three coefficients and one more
FEWEST_BUDGETS = 3
LEVEL = 0.95  # confidence of the intervals


@dataclass(frozen=True)
class Estimate:
    """A value with the limits of its interval."""

    value: float
    low: float
    high: float

    def exp(self) -> Estimate:
        """The estimate of e^x, for an estimate of x."""
        with np.errstate(over="ignore"):
            return Estimate(*(float(np.exp(value)) for value in (self.value, self.low, self.high)))

    def __str__(self) -> str:
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


def estimate(value: float, samples: Array, dof: int, inflation: float = 1.0) -> Estimate:
    """The expanded percentile interval of a bootstrap (Hesterberg 2015, arXiv 1411.5279): plain percentiles are too
    narrow for few runs, so the tails follow Student's t.
    """
    lost = float(np.isnan(samples).mean())
    tail = float(special.ndtr(-special.stdtrit(dof, (1 + LEVEL) / 2) * inflation)) - lost
    if tail <= 0:
        return Estimate(float(value), -np.inf, np.inf)
    low, high = np.quantile(samples[~np.isnan(samples)], [tail, 1 - tail])
    return Estimate(float(value), float(low), float(high))


# Parabolas --------------------------------------------------------------------------------------------------


def parabola(n: ArrayLike, loss: ArrayLike) -> tuple[float, float] | str:
    """Fits loss = a (ln N)² + b ln N + c by least squares (arXiv 2203.15556, approach 2). Returns N and the loss at the
    minimum, or why there is none: a maximum, a vertex outside the measured sizes, fewer than `FEWEST_CELLS` sizes."""
    n, loss = np.asarray(n, float), np.asarray(loss, float)
    distinct = len(np.unique(n))
    if distinct < FEWEST_CELLS:
        return f"{distinct} of at least {FEWEST_CELLS} different values of the size have a loss"
    centre, projection = _parabola(n)
    a, b, c = projection @ loss
    if a <= 0:
        return "the parabola has a maximum: the loss has no minimum in the size"
    vertex = float(np.exp(np.clip(centre - b / (2 * a), -700, 700)))
    if not n.min() <= vertex <= n.max():
        end, more, limit = ("below", "smaller", n.min()) if vertex < n.min() else ("above", "larger", n.max())
        reason = f"the minimum, {vertex:.3g}, is {end} the measured range of the size, which ends at {limit:.3g}"
        return f"{reason}: measure {more} values"
    return vertex, float(c - b * b / (4 * a))


def _parabola(x: Array) -> tuple[float, Array]:
    """The mean of ln x, and the matrix (3, cells) that turns losses into the coefficients in ln x − mean."""
    centre = float(np.log(x).mean())
    return centre, np.linalg.pinv(np.vander(np.log(x) - centre, 3))


def lack_of_fit(budget: ArrayLike, n: ArrayLike, loss: ArrayLike) -> float:
    """The p of an F test of a cubic term beside the parabolas of all budgets, which is small where the losses are no
    parabolas; nan for too few sizes."""
    budget, n, loss = (np.asarray(values, float) for values in (budget, n, loss))
    rests, terms, dof = np.zeros(2), 0, 0
    for flops in np.unique(budget):
        x, y = np.log(n[budget == flops]), loss[budget == flops]
        if len(np.unique(x)) > FEWEST_CELLS:
            designs = (np.vander(x - x.mean(), order) for order in (3, 4))
            rests += [float(np.sum((y - design @ np.linalg.pinv(design) @ y) ** 2)) for design in designs]
            terms, dof = terms + 1, dof + len(x) - 4
    if not dof or rests[1] <= 0:
        return float("nan")
    return float(special.fdtrc(terms, dof, (rests[0] - rests[1]) / terms / (rests[1] / dof)))


# The envelope of IsoFLOP budgets ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Optimum:
    """The best size of one budget, or a refusal. ratio: tokens per parameter; outside: share of the resamples whose
    vertex is a maximum or outside the measured sizes."""

    flops: float
    cells: int
    refusal: str = ""
    parameters: Estimate | None = None
    tokens: Estimate | None = None
    ratio: Estimate | None = None
    loss: Estimate | None = None
    outside: float = 0.0


@dataclass(frozen=True)
class Envelope:
    """The optima of all budgets, ascending, and the exponents of the power laws N*(C), D*(C) through them, or a
    refusal. ratio: tokens per parameter, the geometric mean; leave_out: (FLOPs, exponents of N* and of D*) without each
    budget; misfit: see `lack_of_fit`; samples: (resamples, accepted budgets, 2): ln N* and ln D*."""

    optima: tuple[Optimum, ...]
    refusal: str = ""
    parameters: Estimate | None = None
    tokens: Estimate | None = None
    ratio: Estimate | None = None
    leave_out: tuple[tuple[float, float, float], ...] = ()
    misfit: float = float("nan")
    samples: Array = field(default_factory=lambda: np.empty((0, 0, 2)), repr=False, compare=False)
    _dof: int = field(default=1, repr=False)

    @property
    def accepted(self) -> list[Optimum]:
        return [optimum for optimum in self.optima if not optimum.refusal]

    def predict(self, flops: float) -> dict[str, Estimate]:
        """The optimum at another budget: parameters, tokens, and their ratio."""
        point, samples = _points(self.accepted), self.samples
        logs = np.log([optimum.flops for optimum in self.accepted])
        centre = logs.mean()
        row = np.array([np.log(flops) - centre, 1.0]) @ np.linalg.pinv(np.vander(logs - centre, 2))
        values, drawn = row @ point, np.einsum("b,sbk->sk", row, samples)
        columns = {"parameters": [1, 0], "tokens": [0, 1], "ratio": [-1, 1]}
        return {
            name: estimate(float(values @ column), drawn @ column, self._dof).exp() for name, column in columns.items()
        }


def _points(optima: Sequence[Optimum]) -> Array:
    """(budgets, 2): ln N* and ln D*."""
    return np.log([[one.parameters.value, one.tokens.value] for one in optima if one.parameters and one.tokens])


def envelope(budget: ArrayLike, n: ArrayLike, d: ArrayLike, loss: ArrayLike, *, resamples: int = 1000) -> Envelope:
    """Fits a parabola to each budget, and power laws to their minima.

    The sizes are chosen, so the bootstrap draws the runs' deviations from the parabolas, not the sizes: residuals are
    divided by √(1 − leverage) and drawn from the pool of all budgets.

    Args:
        budget: The planned FLOPs of each run: runs with equal values form a parabola.
        n, d, loss: Parameters, tokens and loss of each run.
        resamples: Number of resamples of the bootstrap.
    """
    budget, n, d, loss = (np.asarray(values, float) for values in (budget, n, d, loss))
    rng = np.random.default_rng(0)
    groups = {float(flops): budget == flops for flops in np.unique(budget)}
    fitted = [group for group in groups.values() if len(np.unique(n[group])) >= FEWEST_CELLS]
    pool = np.concatenate([_residuals(n[group], loss[group]) for group in fitted] or [np.zeros(1)])
    pool, dof = pool - pool.mean(), max(1, sum(int(group.sum()) - 3 for group in fitted))
    optima, samples = [], []
    for flops, group in groups.items():
        drawn = rng.choice(pool, (resamples, int(group.sum())))  # also if it is refused: conventions draw alike
        optimum, logs = _optimum(flops, n[group], d[group], loss[group], drawn, dof)
        optima.append(optimum)
        samples += [] if optimum.refusal else [logs]
    return replace(_laws(tuple(optima), samples, dof), misfit=lack_of_fit(budget, n, loss))


def _optimum(flops: float, n: Array, d: Array, loss: Array, deviations: Array, dof: int) -> tuple[Optimum, Array]:
    """The optimum of one budget, and ln N* and ln D* (resamples, 2) with these deviations (resamples, cells) of the
    losses; NaN where the parabola has a maximum."""
    vertex = parabola(n, loss)
    if isinstance(vertex, str):
        return Optimum(flops, len(n), vertex), np.empty((0, 2))
    centre, projection = _parabola(n)
    x = np.log(n) - centre
    a, b, c = ((np.vander(x, 3) @ (projection @ loss) + deviations) @ projection.T).T
    with np.errstate(divide="ignore", invalid="ignore"):
        at = np.where(a > 0, -b / (2 * a), np.nan)
    inside = (at >= x.min()) & (at <= x.max())
    curve = np.polyfit(x, np.log(d), 2)  # at one budget, ln D is a smooth function of ln N
    size, loss_there = vertex
    best = np.log(size) - centre
    log_n, log_d = np.append(at, best) + centre, np.polyval(curve, np.append(at, best))  # the optimum is the last one
    parameters, tokens, ratio = (estimate(one[-1], one[:-1], dof).exp() for one in (log_n, log_d, log_d - log_n))
    lowest, outside = estimate(loss_there, c + b * at / 2, dof), float(1 - inside.mean())
    found = Optimum(flops, len(n), "", parameters, tokens, ratio, lowest, outside)
    return found, np.stack([log_n, log_d], axis=1)[:-1]


def _laws(optima: tuple[Optimum, ...], samples: Sequence[Array], dof: int) -> Envelope:
    accepted = [one for one in optima if not one.refusal]
    if len(accepted) < FEWEST_BUDGETS:
        return Envelope(optima, f"{len(accepted)} of at least {FEWEST_BUDGETS} budgets have an optimum", _dof=dof)
    drawn, logs, points = np.stack(samples, axis=1), np.log([one.flops for one in accepted]), _points(accepted)
    slope = np.linalg.pinv(np.vander(logs - logs.mean(), 2))[0]
    slopes = np.einsum("b,sbk->sk", slope, drawn)
    ratio = estimate(np.diff(points).mean(), np.diff(drawn)[..., 0].mean(1), dof)
    leave_out = []
    for left in range(len(logs)) if len(logs) > FEWEST_BUDGETS else ():
        kept = np.arange(len(logs)) != left
        n_exponent, d_exponent = np.polyfit(logs[kept], points[kept], 1)[0]
        leave_out.append((accepted[left].flops, float(n_exponent), float(d_exponent)))
    return Envelope(
        optima,
        parameters=estimate(slope @ points[:, 0], slopes[:, 0], dof),
        tokens=estimate(slope @ points[:, 1], slopes[:, 1], dof),
        ratio=ratio.exp(),
        leave_out=tuple(leave_out),
        samples=drawn,
        _dof=dof,
    )


def _residuals(n: Array, loss: Array) -> Array:
    """Deviations from the parabola, scaled to the variance of the runs' own."""
    centre, projection = _parabola(n)
    hat = np.vander(np.log(n) - centre, 3) @ projection
    left = 1 - np.diag(hat)
    return ((loss - hat @ loss) / np.sqrt(np.maximum(left, 1e-12)))[left > 1e-6]
