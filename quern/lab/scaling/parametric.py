"""The parametric fit of the loss, L(N, D) = E + A / N^α + B / D^β (arXiv 2203.15556, approach 3).

docs/scaling.md explains the fit. N: parameters; D: tokens; C: FLOPs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize

from quern.lab.scaling.fits import Array, Estimate, estimate

FEWEST_RUNS = 8  # that differ in N or D: the five constants and three more
HUBER_DELTA = 1e-3
SCALE = 1e3  # multiplies the objective: L-BFGS stops early without it
EXPONENTS = np.geomspace(0.05, 1.6, 8)  # exponents of the starts: all pairs
STARTS = 3  # the best ones are optimised
LEAST_E = 1e-3  # E of a start, as a share of the lowest loss; the fit may go below, where the gradient in ln E vanishes
HIGHEST_SHARE = 0.02  # share of the runs that the leave-out row of the highest losses lacks


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
    """A fit without some runs. exponent: a of N* ∝ C^a."""

    label: str
    runs: int
    E: float
    alpha: float
    beta: float
    exponent: float


@dataclass(frozen=True)
class SurfaceFit:
    """A fitted surface, or a refusal, with intervals from a bootstrap over runs.

    Args:
        note: The terms that the runs do not determine.
        intervals: Intervals of E, A, B, alpha, beta, and of `exponent`: a of N* ∝ C^a.
        leave_out: Fits without each budget, the highest losses, and the most influential run.
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

    def predict(self, flops: float) -> dict[str, Estimate]:
        """The best parameters and tokens for a budget, their ratio, and the loss there. The interval of the loss is
        the interval of the surface; one run deviates by `residual_sd` more."""
        assert self.surface is not None
        s = self.surface
        with np.errstate(divide="ignore"):  # E may be 0
            theta = np.array([[np.log(s.E), np.log(s.A), np.log(s.B), s.alpha, s.beta]])
        points, drawn = (_optimum(one, flops, self.kappa, self.gamma) for one in (theta, self.samples))
        return {name: _estimate(points[name][0], drawn[name], self.runs).exp() for name in points}


def _optimum(theta: Array, flops: float, kappa: float, gamma: float) -> dict[str, Array]:
    """Logarithms of the optimum under C = κ N^γ D, which for γ = 1 is equation 4 of arXiv 2203.15556. theta: (S, 5), in
    the order of `SurfaceFit.samples`."""
    e, a, b, alpha, beta = theta.T
    budget = np.log(flops / kappa)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_n = (np.log(alpha) + a - np.log(gamma * beta) - b + beta * budget) / (alpha + gamma * beta)
        log_d = budget - gamma * log_n
        loss = np.logaddexp(np.logaddexp(e, a - alpha * log_n), b - beta * log_d)
    return {"parameters": log_n, "tokens": log_d, "ratio": log_d - log_n, "loss": loss}


def _estimate(value: float, samples: Array, runs: int) -> Estimate:
    return estimate(value, samples, runs - 5, inflation=(runs / (runs - 5)) ** 0.5)


def fit_surface(
    n: ArrayLike,
    d: ArrayLike,
    loss: ArrayLike,
    *,
    budget: ArrayLike,
    flops: ArrayLike,
    labels: Sequence[str],
    resamples: int = 1000,
) -> SurfaceFit:
    """Fits the surface to runs of n parameters, d tokens and a final loss. budget: planned FLOPs, each of which the
    leave-out table drops once; flops: FLOPs of each run, for `predict`; labels: names of the runs, for the table."""
    n, d, loss, budget = (np.asarray(values, float) for values in (n, d, loss, budget))
    runs = len(n)
    if refusal := _too_few(n, d):
        return SurfaceFit(runs, refusal=refusal)
    means = float(np.log(n).mean()), float(np.log(d).mean())
    problem = _Problem(np.log(n) - means[0], np.log(d) - means[1], np.log(loss), means)
    best, objective = problem.fit()
    whole = problem.constants(best[None])[0]
    surface = Surface(*map(float, (*np.exp(whole[:3]), *whole[3:])), objective=objective)
    residual_sd = float(np.std(np.log(loss / surface.loss(n, d))) * (runs / (runs - 5)) ** 0.5)
    if refusal := _constant(surface, n, d, 2 * residual_sd * loss.mean()):
        return SurfaceFit(runs, refusal=refusal)
    gamma, log_kappa = np.polyfit(np.log(n), np.log(np.asarray(flops) / d), 1)
    least = np.log(LEAST_E * loss.min())
    at_zero, best[0] = best[0] < least, max(best[0], least)  # the resamples start where the gradient does not vanish
    counts = np.random.default_rng(0).multinomial(runs, np.full(runs, 1 / runs), resamples)
    samples = problem.refit(best, counts)
    values = [*whole, surface.beta / (surface.alpha + surface.beta)]
    drawn = [*samples.T, samples[:, 4] / (samples[:, 3] + samples[:, 4])]
    intervals = {
        name: _estimate(value, one, runs)
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
    )


def _too_few(n: Array, d: Array) -> str:
    """Why these runs cannot determine the constants; empty if they can."""
    runs, sizes, tokens = len(set(zip(n, d, strict=True))), len(set(n)), len(set(d))
    needed = f"the fit needs {FEWEST_RUNS} different runs, of 3 sizes and 3 numbers of tokens"
    few = runs < FEWEST_RUNS or min(sizes, tokens) < 3
    return f"{needed}: there are {runs}, of {sizes} and {tokens}" if few else ""


def _constant(surface: Surface, n: Array, d: Array, noise: float) -> str:
    """Why a term of the surface is none: over these runs it varies by less than the noise."""
    for name, factor, exponent, values in (("N", surface.A, surface.alpha, n), ("D", surface.B, surface.beta, d)):
        if exponent <= 0 or np.ptp(factor * values**-exponent) < noise:
            return f"the loss does not fall with {name} by more than the noise: measure a wider range of {name}"
    return ""


def _leave_out(problem: _Problem, best: Array, loss: Array, budget: Array, labels: Sequence[str]) -> Iterator[LeftOut]:
    """Fits that start at the optimum of all runs; of those without one run, the one that differs most."""
    runs, order = len(loss), np.argsort(loss)[::-1]
    few = max(1, round(HIGHEST_SHARE * runs))
    groups = {f"the {few} highest losses" if few > 1 else "the highest loss": np.isin(np.arange(runs), order[:few])}
    groups |= {f"budget {flops:.3g}": budget == flops for flops in np.unique(budget)}
    groups = {label: left for label, left in groups.items() if runs - left.sum() >= FEWEST_RUNS}
    names = [*groups, *labels]
    dropped = np.array([*groups.values(), *np.eye(runs, dtype=bool)])
    fits = [
        LeftOut(name, int(left.sum()), float(np.exp(e)), float(alpha), float(beta), float(beta / (alpha + beta)))
        for name, left, (e, _, _, alpha, beta) in zip(names, dropped, problem.refit(best, ~dropped), strict=True)
    ]
    yield from fits[: len(groups)]
    whole = best[4] / (best[3] + best[4])
    yield max(fits[len(groups) :], key=lambda fit: abs(fit.exponent - whole))


@dataclass(frozen=True)
class _Problem:
    """The objective over theta: ln E, ln A', ln B', α, β. A' and B' are the terms at the means of ln N and ln D, where
    they depend less on α and β."""

    x: Array
    y: Array
    target: Array
    means: tuple[float, float]

    def constants(self, theta: Array) -> Array:
        """ln E, ln A, ln B, α, β of many theta (S, 5)."""
        shift = np.stack([theta[:, 3] * self.means[0], theta[:, 4] * self.means[1]], axis=1)
        return np.concatenate([theta[:, :1], theta[:, 1:3] + shift, theta[:, 3:]], axis=1)

    def objective(self, theta: Array, weights: Array | float = 1.0) -> tuple[float, Array]:
        """The value and the gradient (5,). weights: (runs,)."""
        e, a, b, alpha, beta = theta
        terms = np.stack([np.full_like(self.x, e), a - alpha * self.x, b - beta * self.y])
        top = terms.max(0)
        shares = np.exp(terms - top)
        total = shares.sum(0)
        error = top + np.log(total) - self.target
        clipped = np.clip(error, -HUBER_DELTA, HUBER_DELTA)
        slopes = weights * clipped * shares / total
        gradient = np.array([*slopes.sum(1), -(slopes[1] @ self.x), -(slopes[2] @ self.y)])
        return SCALE * float((weights * clipped * (error - clipped / 2)).sum()), SCALE * gradient

    def minimum(self, start: Array, weights: Array | float = 1.0) -> optimize.OptimizeResult:
        """The minimum by L-BFGS from a start."""
        options = {"maxiter": 5000, "maxfun": 50_000, "maxcor": 30, "ftol": 1e-15, "gtol": 1e-9}
        return optimize.minimize(self.objective, start, weights, jac=True, method="L-BFGS-B", options=options)

    def fit(self) -> tuple[Array, float]:
        """The optimum over all starts, and its value."""
        found = [self.minimum(start) for start in self.starts()]
        found.append(self.minimum(min(found, key=lambda one: one.fun).x))
        best = min(found, key=lambda one: one.fun)
        return best.x, float(best.fun)

    def starts(self) -> list[Array]:
        """The best starts of variable projection."""
        loss, starts = np.exp(self.target), list[Array]()
        for alpha, beta in product(EXPONENTS, repeat=2):
            design = np.stack([np.ones_like(self.x), np.exp(-alpha * self.x), np.exp(-beta * self.y)], axis=1)
            solution = optimize.nnls(design / loss[:, None], np.ones_like(loss))[0]
            starts.append(np.array([*np.log(np.maximum(solution, LEAST_E * loss.min())), alpha, beta]))
        return sorted(starts, key=lambda start: self.objective(start)[0])[:STARTS]

    def refit(self, best: Array, weights: Array) -> Array:
        """The constants (S, 5) that fit the runs with each of these weights (S, runs), from the optimum of all."""
        return self.constants(np.array([self.minimum(best, one).x for one in weights]))
