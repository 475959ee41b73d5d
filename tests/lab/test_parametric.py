"""The parametric fit: known constants come back, intervals cover them, the published data give the known optimum."""

import csv
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import optimize

from quern.lab.scaling.parametric import Surface, SurfaceFit, fit_surface

TRUE = Surface(E=1.8, A=480.0, B=2100.0, alpha=0.35, beta=0.37)
BUDGETS = (1e17, 3e17, 1e18, 3e18)
CONSTANTS = ("E", "A", "B", "alpha", "beta")
FLOPS: Any = np.repeat(BUDGETS, 7)
N = 0.09 * FLOPS**0.5 * np.tile(np.logspace(-0.6, 0.6, 7), len(BUDGETS))
D = FLOPS / (6 * N)
"""FLOPs, sizes and tokens of seven runs at each budget."""


def noisy(noise: float, seed: int, surface: Surface = TRUE) -> Any:
    """Losses with relative noise."""
    return surface.loss(N, D) * np.exp(np.random.default_rng(seed).normal(0, noise, len(N)))


def fit(loss: Any, kept: Any = slice(None), resamples: int = 4, seed: int = 0, flops: Any = FLOPS) -> SurfaceFit:
    about = {"budget": FLOPS[kept], "flops": flops[kept], "labels": [f"run {run}" for run in np.arange(len(N))[kept]]}
    return fit_surface(N[kept], D[kept], loss[kept], **about, resamples=resamples, seed=seed)


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
    assert names == ["the highest loss", *(f"budget {flops:.3g}" for flops in BUDGETS)]
    run = np.arange(len(N)) == int(influential.removeprefix("run "))
    for row, left in ((rows[f"budget {BUDGETS[-1]:.3g}"], BUDGETS[-1] == FLOPS), (rows[influential], run)):
        E, _, _, alpha, beta = constants(fit(loss, ~left))
        assert row.runs == left.sum() and (row.E, row.alpha, row.beta) == pytest.approx((E, alpha, beta), rel=1e-3)


@pytest.mark.parametrize(("kappa", "gamma"), [(6, 1.0), (4, 1.05)])  # attention's share grows with the size
def test_a_prediction_is_the_minimum_along_the_budget(kappa: float, gamma: float) -> None:
    found = fit(TRUE.loss(N, D), flops=kappa * N**gamma * D)
    assert (found.kappa, found.gamma) == (pytest.approx(kappa), pytest.approx(gamma))
    predicted = found.predict(1e20)
    oracle: Any = optimize.minimize_scalar(
        lambda log_n: TRUE.loss(np.exp(log_n), 1e20 / (kappa * np.exp(gamma * log_n))).item(),
        bounds=(10, 30),
        method="bounded",
        options={"xatol": 1e-9},
    )
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
    found = fit(noisy(3e-3, 1, Surface(0.0, 480.0, 2100.0, 0.35, 0.37)), resamples=60)
    assert constants(found)[0] < 1e-3
    assert found.note == "E is 0 at the optimum: these runs do not determine it"
    assert found.intervals["E"].low < 1e-3 < found.intervals["E"].high  # resamples may find another E


def test_few_runs_are_refused() -> None:
    reason = "the fit needs 8 different runs, of 3 sizes and 3 numbers of tokens: there are"
    assert fit(TRUE.loss(N, D), slice(7)).refusal == f"{reason} 7, of 7 and 7"
    about: Any = {"budget": np.ones(9), "flops": np.ones(9), "labels": ["run"] * 9}
    assert (
        fit_surface(np.full(9, 1e6), np.arange(1, 10), np.arange(1, 10), **about).refusal == f"{reason} 9, of 1 and 9"
    )
    assert fit_surface([], [], [], budget=[], flops=[], labels=[]).refusal


@pytest.mark.parametrize(
    ("trials", "bar"), [(2, 1.0), pytest.param(200, 0.9, marks=[pytest.mark.campaign, pytest.mark.timeout(900)])]
)
def test_intervals_cover_the_constants(trials: int, bar: float) -> None:
    truths = {name: getattr(TRUE, name) for name in CONSTANTS} | {"exponent": TRUE.beta / (TRUE.alpha + TRUE.beta)}
    hits = dict.fromkeys(truths, 0)
    for seed in range(trials):
        found = fit(noisy(3e-3, seed), resamples=200, seed=seed)
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
