"""The parametric fit: known constants come back, intervals cover them, the published data give the known optimum."""

import csv
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import optimize

from quern.lab.scaling.parametric import Surface, SurfaceFit, fit_surface

TRUE = Surface(E=1.8, A=480.0, B=2100.0, alpha=0.35, beta=0.37)
BUDGETS = (1e17, 3e17, 1e18, 3e18)
CONSTANTS = ("E", "A", "B", "alpha", "beta")


def grid(budgets: tuple[float, ...] = BUDGETS) -> tuple[np.ndarray, ...]:
    """Sizes, tokens and FLOPs of seven runs at each budget."""
    flops = np.repeat(budgets, 7)
    n = 0.09 * flops**0.5 * np.tile(np.logspace(-0.6, 0.6, 7), len(budgets))
    return n, flops / (6 * n), flops


def noisy(noise: float, seed: int) -> tuple[np.ndarray, ...]:
    n, d, flops = grid()
    return n, d, TRUE.loss(n, d) * np.exp(np.random.default_rng(seed).normal(0, noise, len(n))), flops


def fitted(found: SurfaceFit) -> Surface:
    assert found.surface is not None, found.refusal
    return found.surface


def test_exact_losses_give_the_constants_to_five_digits() -> None:
    n, d, _ = grid()
    found = fitted(fit_surface(n, d, TRUE.loss(n, d), resamples=100))
    for name in CONSTANTS:
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-5), name


def test_the_objective_resists_outliers() -> None:
    n, d, _ = grid()
    loss = TRUE.loss(n, d)
    loss[[3, 17]] *= 1.3
    found = fitted(fit_surface(n, d, loss, resamples=100))
    assert found.alpha == pytest.approx(TRUE.alpha, abs=0.003)
    assert found.beta == pytest.approx(TRUE.beta, abs=0.003)


def test_the_leave_out_rows_are_fits_of_the_rest() -> None:
    """The rows come from the batched BFGS; the fits of the rest from their own starts by L-BFGS."""
    n, d, loss, flops = noisy(5e-3, seed=3)
    whole = fit_surface(n, d, loss, budget=flops, resamples=100)
    rows = {row.label: row for row in whole.leave_out}
    assert [*rows][:5] == ["the highest loss", *(f"budget {flops:.3g}" for flops in BUDGETS)]
    influential = whole.leave_out[-1].label
    dropped = {f"budget {budget:.3g}": flops == budget for budget in BUDGETS[-1:]}
    dropped[influential] = np.arange(len(n)) == int(influential.removeprefix("run ")) - 1
    for label, left in dropped.items():
        row, alone = rows[label], fitted(fit_surface(n[~left], d[~left], loss[~left], resamples=100))
        assert (row.runs, row.E, row.alpha, row.beta) == (left.sum(), *map(approx, (alone.E, alone.alpha, alone.beta)))


def approx(value: float) -> object:
    return pytest.approx(value, rel=1e-3)


def test_a_prediction_is_the_minimum_along_the_budget() -> None:
    """Here a token costs 4 N^1.05 FLOPs: the attention's share grows with the size."""
    n, d, _ = grid()
    found = fit_surface(n, d, TRUE.loss(n, d), flops=4 * n**1.05 * d, resamples=100)
    predicted = found.predict(1e20)
    oracle: Any = optimize.minimize_scalar(
        lambda log_n: TRUE.loss(np.exp(log_n), 1e20 / (4 * np.exp(1.05 * log_n))).item(),
        bounds=(10, 30),
        method="bounded",
        options={"xatol": 1e-9},
    )
    assert predicted["parameters"].value == pytest.approx(np.exp(oracle.x), rel=1e-3)
    assert predicted["loss"].value == pytest.approx(oracle.fun, rel=1e-6)
    assert predicted["tokens"].value == pytest.approx(1e20 / (4 * np.exp(1.05 * oracle.x)), rel=1e-3)


def test_the_exponent_of_the_usual_rule() -> None:
    n, d, flops = grid()
    found = fit_surface(n, d, TRUE.loss(n, d), flops=flops, resamples=100)
    assert (found.kappa, found.gamma) == (pytest.approx(6), pytest.approx(1))
    sizes = [found.predict(flops)["parameters"].value for flops in (1e19, 1e20)]
    assert np.log10(sizes[1] / sizes[0]) == pytest.approx(found.intervals["exponent"].value)
    assert found.intervals["exponent"].value == pytest.approx(0.37 / 0.72, rel=1e-4)


@pytest.mark.parametrize(("A", "B", "name"), [(0.0, 2100.0, "N"), (480.0, 0.0, "D")])
def test_a_loss_that_does_not_fall_is_refused(A: float, B: float, name: str) -> None:
    n, d, _ = grid()
    loss = Surface(1.8, A, B, 0.35, 0.37).loss(n, d) * np.exp(np.random.default_rng(0).normal(0, 5e-3, len(n)))
    found = fit_surface(n, d, loss, resamples=100)
    assert (found.surface, found.refusal) == (
        None,
        f"the loss does not fall with {name} by more than the noise: measure a wider range of {name}",
    )


def test_a_constant_that_the_runs_do_not_determine_is_named() -> None:
    n, d, _ = grid()
    loss = Surface(0.0, 480.0, 2100.0, 0.35, 0.37).loss(n, d) * np.exp(np.random.default_rng(1).normal(0, 3e-3, len(n)))
    found = fit_surface(n, d, loss)
    assert fitted(found).E < 1e-3
    assert found.note == "E is 0 at the optimum: these runs do not determine it"
    assert found.intervals["E"].low < 1e-3 < found.intervals["E"].high  # resamples may find another E


def test_few_runs_are_refused() -> None:
    n, d, _ = grid(BUDGETS[:1])
    reason = "the fit needs 8 different runs, of 3 sizes and 3 numbers of tokens: there are"
    assert fit_surface(n, d, TRUE.loss(n, d)).refusal == f"{reason} 7, of 7 and 7"
    assert fit_surface(np.full(9, 1e6), np.arange(1, 10), np.arange(1, 10)).refusal == f"{reason} 9, of 1 and 9"
    assert fit_surface([], [], []).refusal


def covered(trials: int) -> dict[str, float]:
    truths = {name: getattr(TRUE, name) for name in CONSTANTS} | {"exponent": TRUE.beta / (TRUE.alpha + TRUE.beta)}
    hits = dict.fromkeys(truths, 0)
    for seed in range(trials):
        n, d, loss, _ = noisy(3e-3, seed)
        found = fit_surface(n, d, loss, resamples=200, seed=seed)
        for name, truth in truths.items():
            hits[name] += found.intervals[name].low <= truth <= found.intervals[name].high
    return {name: count / trials for name, count in hits.items()}


def test_intervals_cover_the_constants() -> None:
    assert min(covered(4).values()) == 1


@pytest.mark.campaign
@pytest.mark.timeout(900)  # a minute, or some where others compute too
def test_intervals_cover_the_constants_in_200_trials() -> None:
    assert min(covered(200).values()) >= 0.9


FILE = "svg_extracted_data.csv"
"""The runs of arXiv 2203.15556 as read from its figure by Epoch AI (github.com/epoch-research/analyzing-chinchilla).
It has no licence, so it is not part of this repository."""


def published_data() -> Path | None:
    folders = [os.environ.get("QUERN_SCALING_DATA"), *(one / "shared" for one in Path(__file__).resolve().parents)]
    found = (path for folder in folders if folder for path in Path(folder).rglob(FILE))
    return next(found, None)


def test_the_published_runs_give_the_known_optimum() -> None:
    path = published_data()
    if path is None:
        pytest.skip(f"no {FILE}: put it into a folder and set QUERN_SCALING_DATA to the folder")
    with path.open(encoding="utf-8", newline="") as file:
        rows = [(float(r["Model Size"]), float(r["Training FLOP"]), float(r["loss"])) for r in csv.DictReader(file)]
    n, flops, loss = np.array(sorted(rows, key=lambda row: row[2])[:-5]).T  # the five highest losses are outliers
    assert len(n) == 240
    found = fit_surface(n, flops / (6 * n), loss, resamples=400)
    surface = fitted(found)
    golden = "E 1.81722, A 477.83, B 2143.42, alpha 0.34731, beta 0.36717, objective 1.01827"
    for name, digits in (one.split() for one in golden.split(", ")):
        assert f"{getattr(surface, name):.{len(digits.partition('.')[2])}f}" == digits, name
    assert found.intervals["exponent"].value == pytest.approx(0.514, abs=5e-4)
