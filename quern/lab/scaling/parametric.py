"""The parametric fit of the loss, L(N, D) = E + A / N^α + B / D^β (arXiv 2203.15556, approach 3).

The objective is the sum of Huber's loss of the errors of ln L, × 10³, with its analytic gradient. Unlike the paper's
grid of 4,500 starts, the starts come from variable projection: at fixed (α, β) the loss is linear in (E, A, B), which
non-negative least squares finds. Pure NumPy and SciPy. N: parameters; D: tokens; C: FLOPs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize

from quern.lab.scaling.fits import Array, Estimate, estimate

FEWEST_RUNS = 8
"""Runs that differ in N or D: the five constants and three more."""
HUBER_DELTA = 1e-3
SCALE = 1e3
"""Multiplies the objective: L-BFGS stops early without it."""
EXPONENTS = np.geomspace(0.05, 1.6, 8)
"""Of the starts: all pairs."""
STARTS = 3
"""The best ones are optimised."""
LEAST_E = 1e-3
"""Least E of a start, as a share of the lowest loss. The fit may go below; its gradient in ln E vanishes there."""
HIGHEST_SHARE = 0.02
"""Share of the runs that the leave-out row of the highest losses lacks."""


@dataclass(frozen=True)
class Surface:
    """The constants of L(N, D) = E + A / N^alpha + B / D^beta. objective: the sum of Huber's losses × 10³."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float
    objective: float = 0.0

    def loss(self, n: ArrayLike, d: ArrayLike) -> Array:
        return self.E + self.A * np.asarray(n, float) ** -self.alpha + self.B * np.asarray(d, float) ** -self.beta


@dataclass(frozen=True)
class LeftOut:
    """A fit without some runs. share: the exponent a of N* ∝ C^a."""

    label: str
    runs: int
    E: float
    alpha: float
    beta: float
    exponent: float


@dataclass(frozen=True)
class SurfaceFit:
    """A fitted surface with intervals from a bootstrap over runs.

    Args:
        runs: Number of runs.
        surface: The optimum.
        refusal: Why there is none.
        intervals: Of E, A, B, alpha, beta, and of `exponent`: a of N* ∝ C^a.
        leave_out: Fits without each budget, the highest losses, and the most influential run.
        note: What the runs do not determine.
        residual_sd: Standard deviation of ln L around the surface: the noise of one run, and what the form misses.
        kappa, gamma: C = kappa · N^gamma · D on these runs; 6 and 1 by the usual rule.
        samples: (resamples, 5): ln E, ln A, ln B, α, β.
    """

    runs: int
    surface: Surface | None = None
    refusal: str = ""
    note: str = ""
    intervals: dict[str, Estimate] = field(default_factory=dict)
    leave_out: tuple[LeftOut, ...] = ()
    residual_sd: float = 0.0
    kappa: float = 6.0
    gamma: float = 1.0
    samples: Array = field(default_factory=lambda: np.empty((0, 5)), repr=False, compare=False)
    level: float = field(default=0.95, repr=False)

    def predict(self, flops: float) -> dict[str, Estimate]:
        """The best parameters and tokens for a budget, their ratio, and the loss there. The interval of the loss is
        that of the surface; one run deviates by `residual_sd` more."""
        assert self.surface is not None
        s = self.surface
        with np.errstate(divide="ignore"):  # E may be 0
            theta = np.array([[np.log(s.E), np.log(s.A), np.log(s.B), s.alpha, s.beta]])
        points, drawn = (_optimum(one, flops, self.kappa, self.gamma) for one in (theta, self.samples))
        return {name: _estimate(points[name][0], drawn[name], self.runs, self.level).exp() for name in points}


def _optimum(theta: Array, flops: float, kappa: float, gamma: float) -> dict[str, Array]:
    """Logarithms of the optimum under C = κ N^γ D, which for γ = 1 is equation 4 of arXiv 2203.15556.

    theta: (S, 5): ln E, ln A, ln B, α, β.
    """
    e, a, b, alpha, beta = theta.T
    budget = np.log(flops / kappa)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_n = (np.log(alpha) + a - np.log(gamma * beta) - b + beta * budget) / (alpha + gamma * beta)
    log_d = budget - gamma * log_n
    loss = np.logaddexp(np.logaddexp(e, a - alpha * log_n), b - beta * log_d)
    return {"parameters": log_n, "tokens": log_d, "ratio": log_d - log_n, "loss": loss}


def _estimate(value: float, samples: Array, runs: int, level: float) -> Estimate:
    return estimate(value, samples, level, runs - 5, inflation=(runs / (runs - 5)) ** 0.5)


def fit_surface(
    n: ArrayLike,
    d: ArrayLike,
    loss: ArrayLike,
    *,
    budget: ArrayLike | None = None,
    flops: ArrayLike | None = None,
    labels: Sequence[str] | None = None,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> SurfaceFit:
    """Fits the surface to runs.

    Args:
        n: Parameters of each run.
        d: Tokens of each run.
        loss: Final loss of each run, positive.
        budget: The planned FLOPs of each run: the leave-out table drops each budget once.
        flops: FLOPs of each run, for `predict`; 6 N D by default.
        labels: Names of the runs, for the leave-out table.
        resamples: Of the bootstrap, which draws runs with replacement.
        level: Of the intervals.
        seed: Of the bootstrap.
    """
    n, d, loss = (np.asarray(values, float) for values in (n, d, loss))
    runs = len(n)
    if refusal := _too_few(n, d):
        return SurfaceFit(runs, refusal=refusal)
    problem = _Problem.of(n, d, loss)
    best, objective = problem.fit()
    whole = problem.constants(best[None])[0]
    surface = Surface(*map(float, (*np.exp(whole[:3]), *whole[3:])), objective=objective)
    residual_sd = float(np.std(np.log(loss / surface.loss(n, d))) * (runs / (runs - 5)) ** 0.5)
    if refusal := _constant(surface, n, d, 2 * residual_sd * loss.mean()):
        return SurfaceFit(runs, refusal=refusal)
    gamma, log_kappa = (1.0, np.log(6)) if flops is None else np.polyfit(np.log(n), np.log(np.asarray(flops) / d), 1)
    least = np.log(LEAST_E * loss.min())
    at_zero, best[0] = best[0] < least, max(best[0], least)  # the resamples start where the gradient does not vanish
    counts = np.random.default_rng(seed).multinomial(runs, np.full(runs, 1 / runs), resamples)
    samples = problem.constants(problem.descend(np.tile(best, (resamples, 1)), counts.astype(float)))
    values = [*whole, surface.beta / (surface.alpha + surface.beta)]
    drawn = [*samples.T, samples[:, 4] / (samples[:, 3] + samples[:, 4])]
    intervals = {
        name: _estimate(value, one, runs, level)
        for name, value, one in zip(("E", "A", "B", "alpha", "beta", "exponent"), values, drawn, strict=True)
    }
    return SurfaceFit(
        runs,
        surface,
        note="E is 0 at the optimum: these runs do not determine it" if at_zero else "",
        intervals=intervals | {name: intervals[name].exp() for name in "EAB"},
        leave_out=tuple(_leave_out(problem, best, loss, budget, labels)),
        residual_sd=residual_sd,
        kappa=float(np.exp(log_kappa)),
        gamma=float(gamma),
        samples=samples,
        level=level,
    )


def _too_few(n: Array, d: Array) -> str:
    """Why these runs cannot determine the constants; empty if they can."""
    runs, sizes, tokens = len(set(zip(n, d, strict=True))), len(set(n)), len(set(d))
    if runs >= FEWEST_RUNS and min(sizes, tokens) >= 3:
        return ""
    needed = f"needs {FEWEST_RUNS} different runs, of 3 sizes and 3 numbers of tokens"
    return f"the fit {needed}: there are {runs}, of {sizes} and {tokens}"


def _constant(surface: Surface, n: Array, d: Array, noise: float) -> str:
    """Why a term of the surface is none: over these runs it varies by less than the noise."""
    for name, factor, exponent, values in (("N", surface.A, surface.alpha, n), ("D", surface.B, surface.beta, d)):
        if exponent <= 0 or np.ptp(factor * values**-exponent) < noise:
            return f"the loss does not fall with {name} by more than the noise: measure a wider range of {name}"
    return ""


def _leave_out(
    problem: _Problem, best: Array, loss: Array, budget: ArrayLike | None, labels: Sequence[str] | None
) -> Iterator[LeftOut]:
    """Fits that start at the optimum of all runs; of those without one run, the one that differs most."""
    runs, order = len(loss), np.argsort(loss)[::-1]
    few = max(1, round(HIGHEST_SHARE * runs))
    budgets = np.asarray([] if budget is None else budget, float)
    groups = {f"the {few} highest losses" if few > 1 else "the highest loss": order[:few]}
    groups |= {f"budget {flops:.3g}": np.flatnonzero(budgets == flops) for flops in np.unique(budgets)}
    groups = {label: left for label, left in groups.items() if runs - len(left) >= FEWEST_RUNS}
    singles = [np.array([run]) for run in range(runs)]
    names = [*groups, *(labels or [f"run {run + 1}" for run in range(runs)])]
    dropped = [*groups.values(), *singles]
    weights = np.ones((len(dropped), runs))
    for row, left in enumerate(dropped):
        weights[row, left] = 0
    theta = problem.constants(problem.descend(np.tile(best, (len(dropped), 1)), weights))
    fits = [
        LeftOut(name, len(left), float(np.exp(e)), float(alpha), float(beta), float(beta / (alpha + beta)))
        for name, left, (e, _, _, alpha, beta) in zip(names, dropped, theta, strict=True)
    ]
    yield from fits[: len(groups)]
    whole = best[4] / (best[3] + best[4])
    yield max(fits[len(groups) :], key=lambda fit: abs(fit.exponent - whole))


@dataclass(frozen=True)
class _Problem:
    """The objective over batches of theta (S, 5): ln E, ln A', ln B', α, β. A' and B' are the terms at the means of
    ln N and ln D, where they depend less on α and β."""

    x: Array
    y: Array
    target: Array
    means: tuple[float, float]

    @staticmethod
    def of(n: Array, d: Array, loss: Array) -> _Problem:
        x, y = np.log(n), np.log(d)
        return _Problem(x - x.mean(), y - y.mean(), np.log(loss), (float(x.mean()), float(y.mean())))

    def constants(self, theta: Array) -> Array:
        """ln E, ln A, ln B, α, β."""
        shift = np.stack([theta[:, 3] * self.means[0], theta[:, 4] * self.means[1]], axis=1)
        return np.concatenate([theta[:, :1], theta[:, 1:3] + shift, theta[:, 3:]], axis=1)

    def objective(self, theta: Array, weights: Array) -> tuple[Array, Array]:
        """The value (S,) and the gradient (S, 5). weights: (S, runs)."""
        e, a, b, alpha, beta = theta.T[:, :, None]
        terms = np.stack(np.broadcast_arrays(e, a - alpha * self.x, b - beta * self.y))
        top = terms.max(0)
        shares = np.exp(terms - top)
        total = shares.sum(0)
        shares /= total
        error = top + np.log(total) - self.target
        clipped = np.clip(error, -HUBER_DELTA, HUBER_DELTA)
        value = (weights * clipped * (error - clipped / 2)).sum(1)
        slopes = weights * clipped * shares
        sums = slopes.sum(2)
        gradient = np.stack([*sums, -(slopes[1] @ self.x), -(slopes[2] @ self.y)], axis=1)
        return SCALE * value, SCALE * gradient

    def fit(self) -> tuple[Array, float]:
        """The optimum over all starts, by L-BFGS, and its value."""

        def single(theta: Array) -> tuple[float, Array]:
            value, gradient = self.objective(theta[None], np.ones((1, len(self.x))))
            return float(value[0]), gradient[0]

        options = {"maxiter": 5000, "maxfun": 50_000, "maxcor": 30, "ftol": 1e-15, "gtol": 1e-9}
        found = [
            optimize.minimize(single, start, jac=True, method="L-BFGS-B", options=options) for start in self.starts()
        ]
        best = min(found, key=lambda one: one.fun)
        again = optimize.minimize(single, best.x, jac=True, method="L-BFGS-B", options=options)
        return (again if again.fun < best.fun else best).x, float(min(again.fun, best.fun))

    def starts(self) -> Array:
        """The best starts of variable projection, (STARTS, 5)."""
        loss, starts = np.exp(self.target), []
        for alpha in EXPONENTS:
            for beta in EXPONENTS:
                design = np.stack([np.ones_like(self.x), np.exp(-alpha * self.x), np.exp(-beta * self.y)], axis=1)
                solution = optimize.nnls(design / loss[:, None], np.ones_like(loss))[0]
                starts.append([*np.log(np.maximum(solution, LEAST_E * loss.min())), alpha, beta])
        values = self.objective(np.array(starts), np.ones((len(starts), len(self.x))))[0]
        return np.array(starts)[np.argsort(values)[:STARTS]]

    def descend(self, theta: Array, weights: Array, iterations: int = 300) -> Array:
        """Minimises many weighted objectives together, each from its own theta, by BFGS.

        The line search is the weak Wolfe bisection of Lewis and Overton (2013), which suits an objective that is
        almost a sum of absolute values.
        """
        theta, alive = theta.copy(), np.arange(len(theta))
        value, gradient = self.objective(theta, weights)
        inverse = np.tile(1e-2 * np.eye(5), (len(theta), 1, 1))
        for _ in range(iterations):
            here, slope = theta[alive], gradient[alive]
            step = -np.einsum("sij,sj->si", inverse[alive], slope)
            new, new_value, new_gradient = self._search(here, value[alive], slope, step, weights[alive])
            moved, change = new - here, new_gradient - slope
            gained = value[alive] - new_value
            theta[alive], value[alive], gradient[alive] = new, new_value, new_gradient
            inverse[alive] = _updated(inverse[alive], moved, change)
            alive = alive[gained > 1e-9 * value[alive]]
            if not len(alive):
                break
        return theta

    def _search(
        self, theta: Array, value: Array, slope: Array, step: Array, weights: Array
    ) -> tuple[Array, Array, Array]:
        """The points along `step` that meet the weak Wolfe conditions; the best bracket after 30 halvings."""
        descent = (step * slope).sum(1)
        low, high, size = np.zeros(len(theta)), np.full(len(theta), np.inf), np.ones(len(theta))
        best = theta, value, slope
        for _ in range(30):
            new = theta + size[:, None] * step
            new_value, new_gradient = self.objective(new, weights)
            enough = new_value <= value + 1e-4 * size * descent
            flat = (step * new_gradient).sum(1) >= 0.9 * descent
            better = new_value < best[1]
            best = (
                np.where(better[:, None], new, best[0]),
                np.where(better, new_value, best[1]),
                np.where(better[:, None], new_gradient, best[2]),
            )
            if (enough & flat).all():
                break
            high = np.where(enough, high, size)
            low = np.where(enough & ~flat, size, low)
            size = np.where(enough & flat, size, np.where(np.isinf(high), 2 * size, (low + high) / 2))
        return best


def _updated(inverse: Array, moved: Array, change: Array) -> Array:
    """The BFGS update of inverse Hessians (S, 5, 5), where the curvature is positive."""
    product = (moved * change).sum(1)
    usable = product > 1e-300
    rho = np.where(usable, 1 / np.where(usable, product, 1), 0)[:, None, None]
    left = np.eye(5) - rho * moved[:, :, None] * change[:, None, :]
    return left @ inverse @ left.transpose(0, 2, 1) + rho * moved[:, :, None] * moved[:, None, :]
