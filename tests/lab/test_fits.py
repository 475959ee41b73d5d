"""Power laws, parabolas and envelopes: known constants come back, intervals cover them, bad data are refused."""

from typing import Any

import numpy as np
import pytest

from quern.lab.scaling.fits import envelope, lack_of_fit, parabola

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
    vertex = parabola(x, loss)
    assert reason in vertex.refusal and np.isnan(vertex.n)


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
        found = envelope(*study(5e-3, seed), resamples=200, seed=seed)
        ahead, first = found.predict(10 * BUDGETS[-1])["parameters"], found.optima[0].parameters
        assert found.parameters and found.tokens and first
        truths = (EXPONENT, 1 - EXPONENT, best_size(10 * BUDGETS[-1]), best_size(BUDGETS[0]))
        estimates = (found.parameters, found.tokens, ahead, first)
        hits += [one.low <= truth <= one.high for one, truth in zip(estimates, truths, strict=True)]
    assert min(hits) >= 0.9 * 200
