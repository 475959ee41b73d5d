"""Fits of scaling laws: known constants come back, intervals cover them, bad data are refused, and the published runs
give the known optimum."""

import csv
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import optimize

from quern.lab.scaling.fits import envelope, lack_of_fit, parabola
from quern.lab.scaling.parametric import Surface, SurfaceFit, fit_surface

BUDGETS = (1e15, 3e15, 1e16, 3e16)
EXPONENT = 0.52
SIZES = np.logspace(-0.7, 0.8, 7)
"""Relative to the best one."""


def best_size(flops: Any) -> Any:
    return 0.09 * flops**EXPONENT


def study(noise: float, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Budgets, sizes, tokens and losses of runs whose losses are parabolas with known minima."""
    budget = np.repeat(BUDGETS, len(SIZES))
    n = np.concatenate([best_size(flops) * SIZES for flops in BUDGETS])
    loss = 2 * (budget / 1e15) ** -0.05 + 0.03 * np.log(n / best_size(budget)) ** 2
    return budget, n, budget / (6 * n), loss + np.random.default_rng(seed).normal(0, noise, len(n))


ABOVE = "the minimum, 45.3, is above the measured range of the size, which ends at 8"
BELOW = "is below the measured range of the size, which ends at 1: measure smaller"
FEW = "3 of at least 4 different values of the size"


@pytest.mark.parametrize(
    ("x", "loss", "reason"),
    [
        ([1, 2, 4, 8], [4.0, 3.0, 2.2, 1.6], ABOVE),
        ([1, 2, 4, 8], [1.6, 2.2, 3.0, 4.0], BELOW),
        ([1, 2, 4, 8], [1.0, 2.0, 2.0, 1.0], "the parabola has a maximum"),
        ([1, 2, 4], [2.0, 1.0, 2.0], FEW),
        ([1, 2, 2, 4, 4], [2.0, 1.0, 1.1, 2.0, 2.1], FEW),
        ([], [], "0 of at least 4"),
    ],
)
def test_a_parabola_without_a_measured_minimum_is_refused(x: list[float], loss: list[float], reason: str) -> None:
    found = parabola(x, loss)
    assert isinstance(found, str) and reason in found


def test_a_budget_that_is_no_parabola_lacks_fit() -> None:
    sizes = np.geomspace(1e5, 1e8, 9)
    x, rng = np.log(sizes / 3e6), np.random.default_rng(3)
    noise = 0.002 * rng.normal(size=(200, 9))
    found = [lack_of_fit(np.ones(9), sizes, 2 + 0.01 * x**2 + one) for one in noise]
    assert 0.02 < np.mean(np.array(found) < 0.05) < 0.1, "the test keeps its level"
    assert lack_of_fit(np.ones(9), sizes, 2 + 0.01 * x**2 + 0.002 * x**3 + noise[0]) < 1e-3
    assert np.isnan(lack_of_fit(np.ones(4), sizes[:4], 2 + 0.01 * x[:4] ** 2)), "four sizes leave nothing to test"


def test_exact_parabolas_give_the_exponents() -> None:
    found = envelope(*study(noise=0), resamples=100)
    assert found.parameters and found.tokens and found.ratio
    assert [found.parameters.value, found.tokens.value] == pytest.approx([EXPONENT, 1 - EXPONENT])
    optima = [one.parameters.value for one in found.accepted if one.parameters]
    assert optima == pytest.approx([*map(best_size, BUDGETS)])
    size, predicted = best_size(3e17), found.predict(3e17)
    values = [predicted[name].value for name in ("parameters", "tokens", "ratio")]
    assert values == pytest.approx([size, 3e17 / 6 / size, 3e17 / 6 / size**2])
    assert [left for left, *_ in found.leave_out] == [*BUDGETS]
    assert np.array(found.leave_out)[:, 1] == pytest.approx(EXPONENT)


def test_a_refused_budget_leaves_the_others() -> None:
    budget, n, d, loss = study(noise=1e-3)
    kept = (budget != BUDGETS[1]) | (n > best_size(BUDGETS[1]) * 1.2)  # no smaller sizes
    found = envelope(budget[kept], n[kept], d[kept], loss[kept], resamples=100)
    assert [bool(one.refusal) for one in found.optima] == [False, True, False, False]
    assert found.parameters is not None and found.leave_out == ()
    two = kept & (budget != BUDGETS[2])
    fewer = envelope(budget[two], n[two], d[two], loss[two], resamples=100)
    assert (fewer.refusal, fewer.parameters) == ("2 of at least 3 budgets have an optimum", None)
    assert envelope([], [], [], []).refusal == "0 of at least 3 budgets have an optimum"


def test_noise_that_often_hides_the_minimum_leaves_no_finite_interval() -> None:
    optima = (one for seed in range(50) for one in envelope(*study(0.1, seed), resamples=200).accepted)
    hidden = next(one for one in optima if one.outside > 0.2)
    assert hidden.parameters and hidden.parameters.high == np.inf


def test_intervals_of_the_envelope_cover_the_truth_in_200_trials() -> None:
    hits = np.zeros(4)
    for seed in range(200):
        found = envelope(*study(5e-3, seed), resamples=200)
        ahead, first = found.predict(10 * BUDGETS[-1])["parameters"], found.optima[0].parameters
        assert found.parameters and found.tokens and first
        truths = (EXPONENT, 1 - EXPONENT, best_size(10 * BUDGETS[-1]), best_size(BUDGETS[0]))
        estimates = (found.parameters, found.tokens, ahead, first)
        hits += [one.low <= truth <= one.high for one, truth in zip(estimates, truths, strict=True)]
    assert min(hits) >= 0.9 * 200


# The parametric fit ------------------------------------------------------------------------------------------

TRUE = Surface(E=1.8, A=480.0, B=2100.0, alpha=0.35, beta=0.37)
PLANNED = (1e17, 3e17, 1e18, 3e18)
CONSTANTS = ("E", "A", "B", "alpha", "beta")
FLOPS: Any = np.repeat(PLANNED, 7)
N = 0.09 * FLOPS**0.5 * np.tile(np.logspace(-0.6, 0.6, 7), len(PLANNED))
D = FLOPS / (6 * N)
"""FLOPs, sizes and tokens of seven runs at each budget."""


def noisy(noise: float, seed: int, surface: Surface = TRUE) -> Any:
    """Losses with relative noise."""
    return surface.loss(N, D) * np.exp(np.random.default_rng(seed).normal(0, noise, len(N)))


def fit(loss: Any, kept: Any = slice(None), resamples: int = 4, flops: Any = FLOPS) -> SurfaceFit:
    about = {"budget": FLOPS[kept], "flops": flops[kept], "labels": [f"run {run}" for run in np.arange(len(N))[kept]]}
    return fit_surface(N[kept], D[kept], loss[kept], **about, resamples=resamples)


def constants(found: SurfaceFit) -> list[float]:
    assert found.surface is not None, found.refusal
    return [getattr(found.surface, name) for name in CONSTANTS]


def test_known_constants_come_back_also_beside_outliers() -> None:
    exact, outlying = TRUE.loss(N, D), TRUE.loss(N, D)
    outlying[[3, 17]] *= 1.3
    assert constants(fit(exact)) == pytest.approx([getattr(TRUE, name) for name in CONSTANTS], rel=1e-5)
    assert constants(fit(outlying))[3:] == pytest.approx([TRUE.alpha, TRUE.beta], abs=0.003)


def test_the_leave_out_rows_are_fits_of_the_rest() -> None:
    """The rows start at the optimum of all runs; the fits of the rest at their own."""
    loss = noisy(5e-3, seed=3)
    rows = {row.label: row for row in fit(loss).leave_out}
    *names, influential = rows
    assert names == ["the highest loss", *(f"budget {flops:.3g}" for flops in PLANNED)]
    run = np.arange(len(N)) == int(influential.removeprefix("run "))
    for row, left in ((rows[f"budget {PLANNED[-1]:.3g}"], PLANNED[-1] == FLOPS), (rows[influential], run)):
        E, _, _, alpha, beta = constants(fit(loss, ~left))
        assert row.runs == left.sum() and (row.E, row.alpha, row.beta) == pytest.approx((E, alpha, beta), rel=1e-3)


@pytest.mark.parametrize(("kappa", "gamma"), [(6, 1.0), (4, 1.05)])  # attention's share grows with the size
def test_a_prediction_is_the_minimum_along_the_budget(kappa: float, gamma: float) -> None:
    found = fit(TRUE.loss(N, D), flops=kappa * N**gamma * D)
    assert (found.kappa, found.gamma) == (pytest.approx(kappa), pytest.approx(gamma))
    predicted = found.predict(1e20)

    def loss(log_n: float) -> float:
        return TRUE.loss(np.exp(log_n), 1e20 / (kappa * np.exp(gamma * log_n))).item()

    oracle: Any = optimize.minimize_scalar(loss, bounds=(10, 30), method="bounded", options={"xatol": 1e-9})
    tokens = 1e20 / (kappa * np.exp(gamma * oracle.x))
    values = [predicted[name].value for name in ("parameters", "tokens", "loss")]
    assert values == pytest.approx([np.exp(oracle.x), tokens, oracle.fun], rel=1e-3)
    assert found.intervals["exponent"].value == pytest.approx(0.37 / 0.72, rel=1e-4)
    odd = np.array([[0, 1, 0, -0.5, 1], [0, 1, 1, 1, 0.0], *found.samples])  # resamples without a minimum
    assert replace(found, samples=odd).predict(1e20)["loss"].value == predicted["loss"].value


@pytest.mark.parametrize(("A", "B", "name"), [(0.0, 2100.0, "N"), (480.0, 0.0, "D")])
def test_a_loss_that_does_not_fall_is_refused(A: float, B: float, name: str) -> None:
    found = fit(noisy(5e-3, 0, Surface(1.8, A, B, 0.35, 0.37)))
    reason = f"the loss does not fall with {name} by more than the noise: measure a wider range of {name}"
    assert (found.surface, found.refusal) == (None, reason)


def test_a_constant_that_the_runs_do_not_determine_is_named() -> None:
    found = fit(noisy(3e-3, 1, Surface(0.0, 480.0, 2100.0, 0.35, 0.37)), resamples=20)
    assert constants(found)[0] < 1e-3
    assert found.note == "E is 0 at the optimum: these runs do not determine it"
    assert found.intervals["E"].low < 1e-3 < found.intervals["E"].high  # resamples may find another E


def test_few_runs_are_refused() -> None:
    reason = "the fit needs 8 different runs, of 3 sizes and 3 numbers of tokens: there are"
    assert fit(TRUE.loss(N, D), slice(7)).refusal == f"{reason} 7, of 7 and 7"
    about: Any = {"budget": np.ones(9), "flops": np.ones(9), "labels": ["run"] * 9}
    one_size = fit_surface(np.full(9, 1e6), np.arange(1, 10), np.arange(1, 10), **about)
    assert one_size.refusal == f"{reason} 9, of 1 and 9"
    assert fit_surface([], [], [], budget=[], flops=[], labels=[]).refusal


@pytest.mark.parametrize(
    ("trials", "resamples", "bar"),
    [(2, 40, 1.0), pytest.param(200, 200, 0.9, marks=[pytest.mark.campaign, pytest.mark.timeout(900)])],
)
def test_intervals_cover_the_constants(trials: int, resamples: int, bar: float) -> None:
    truths = {name: getattr(TRUE, name) for name in CONSTANTS} | {"exponent": TRUE.beta / (TRUE.alpha + TRUE.beta)}
    hits = dict.fromkeys(truths, 0)
    for seed in range(trials):
        found = fit(noisy(3e-3, seed), resamples=resamples)
        for name, truth in truths.items():
            hits[name] += found.intervals[name].low <= truth <= found.intervals[name].high
    assert min(hits.values()) >= bar * trials


FILE = "svg_extracted_data.csv"
"""The runs of arXiv 2203.15556 as read from its figure by Epoch AI (github.com/epoch-research/analyzing-chinchilla).
It has no licence, so it is not part of this repository."""


def test_the_published_runs_give_the_known_optimum() -> None:
    folders = [os.environ.get("QUERN_SCALING_DATA"), *(one / "shared" for one in Path(__file__).resolve().parents)]
    path = next((path for folder in folders if folder for path in Path(folder).rglob(FILE)), None)
    if path is None:
        pytest.skip(f"no {FILE}: put it into a folder and set QUERN_SCALING_DATA to the folder")
    with path.open(encoding="utf-8", newline="") as file:
        rows = [(float(r["Model Size"]), float(r["Training FLOP"]), float(r["loss"])) for r in csv.DictReader(file)]
    n, flops, loss = np.array(sorted(rows, key=lambda row: row[2])[:-5]).T  # the five highest losses are outliers
    assert len(n) == 240
    about: Any = {"budget": np.zeros(240), "flops": flops, "labels": [f"run {run}" for run in range(len(n))]}
    found = fit_surface(n, flops / (6 * n), loss, **about, resamples=4)
    golden = "E 1.81722, A 477.83, B 2143.42, alpha 0.34731, beta 0.36717, objective 1.01827"
    for name, digits in (one.split() for one in golden.split(", ")):
        assert f"{getattr(found.surface, name):.{len(digits.partition('.')[2])}f}" == digits, name
    assert found.intervals["exponent"].value == pytest.approx(0.514, abs=5e-4)
