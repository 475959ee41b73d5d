"""Power laws, parabolas and envelopes: known constants come back, intervals cover them, bad data are refused."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from scipy import stats

from quern.lab.scaling.fits import Sweep, envelope, law_of_optima, parabola, power_law

BUDGETS = (1e15, 3e15, 1e16, 3e16)
EXPONENT = 0.52
SIZES = np.logspace(-0.7, 0.8, 7)
"""Relative to the best one."""


def best_size(flops: Any) -> Any:
    return 0.09 * flops**EXPONENT


def study(noise: float, seed: int = 0, budgets: Sequence[float] = BUDGETS) -> tuple[np.ndarray, ...]:
    """Budgets, sizes, tokens and losses of runs whose losses are parabolas with known minima."""
    budget = np.repeat(budgets, len(SIZES))
    n = np.concatenate([best_size(flops) * SIZES for flops in budgets])
    loss = 2 * (budget / 1e15) ** -0.05 + 0.03 * np.log(n / best_size(budget)) ** 2
    return budget, n, budget / (6 * n), loss + np.random.default_rng(seed).normal(0, noise, len(n))


# Parabolas --------------------------------------------------------------------------------------------------


def test_the_vertex_is_the_minimum_of_the_parabola() -> None:
    x = np.array([1e6, 2e6, 5e6, 1e7, 3e7])
    vertex = parabola(x, 0.25 * np.log(x / 4e6) ** 2 + 1.5)
    assert vertex.x == pytest.approx(4e6, rel=1e-9)
    assert (vertex.loss, vertex.curvature, vertex.refusal) == (pytest.approx(1.5), pytest.approx(0.25), "")


@pytest.mark.parametrize(
    ("x", "loss", "reason"),
    [
        (
            [1, 2, 4, 8],
            [4.0, 3.0, 2.2, 1.6],
            "the minimum, 45.3, is above the measured range of the size, which ends at 8",
        ),
        (
            [1, 2, 4, 8],
            [1.6, 2.2, 3.0, 4.0],
            "is below the measured range of the size, which ends at 1: measure smaller",
        ),
        ([1, 2, 4, 8], [1.0, 2.0, 2.0, 1.0], "the parabola has a maximum"),
        ([1, 2, 4], [2.0, 1.0, 2.0], "3 of at least 4 different values of the size"),
        ([1, 2, 2, 4, 4], [2.0, 1.0, 1.1, 2.0, 2.1], "3 of at least 4 different values of the size"),
        ([], [], "0 of at least 4"),
    ],
)
def test_a_parabola_without_a_measured_minimum_is_refused(x: list[float], loss: list[float], reason: str) -> None:
    vertex = parabola(x, loss)
    assert reason in vertex.refusal
    assert np.isnan(vertex.x)


# Power laws -------------------------------------------------------------------------------------------------


def test_the_interval_of_an_exponent_is_that_of_linear_regression() -> None:
    x, y = np.array([1e6, 3e6, 1e7, 4e7, 1e8]), np.array([3.1, 4.6, 7.9, 12.2, 18.0])
    law = power_law(y, {"tokens": x})
    oracle: Any = stats.linregress(np.log(x), np.log(y))
    half = stats.t.ppf(0.975, 3) * oracle.stderr
    found = law.exponents["tokens"]
    assert [found.value, found.low, found.high] == pytest.approx(
        [oracle.slope, oracle.slope - half, oracle.slope + half]
    )
    at_zero = law.predict(tokens=1.0)  # where the interval is that of the intercept
    half = stats.t.ppf(0.975, 3) * oracle.intercept_stderr
    assert np.log([at_zero.value, at_zero.high]) == pytest.approx([oracle.intercept, oracle.intercept + half])


def test_a_law_of_two_variables() -> None:
    width, depth = np.array([128, 256, 512, 128, 256]), np.array([2, 4, 8, 8, 2])
    law = power_law(3 * width**-1.0 * depth**-0.5, {"width": width, "depth": depth})
    assert law.coefficient == pytest.approx(3)
    assert [law.exponents[name].value for name in ("width", "depth")] == pytest.approx([-1, -0.5])
    assert law.predict(width=1024, depth=16).value == pytest.approx(3 / 1024 / 4)


@pytest.mark.parametrize(
    ("y", "x", "reason"),
    [
        ([1, 2], {"tokens": [1, 2]}, "2 points cannot fit 2 constants"),
        ([1, 2, 0], {"tokens": [1, 2, 3]}, "positive"),
        ([1, 2, 3], {"tokens": [5, 5, 5]}, "tokens must vary"),
        ([1, 2, 3, 4], {"width": [1, 2, 3, 4], "depth": [2, 4, 6, 8]}, "width and depth must vary, each independently"),
    ],
)
def test_a_law_that_the_points_do_not_determine_is_refused(
    y: list[float], x: dict[str, list[float]], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        power_law(y, x)


def batch_sweep(tokens: float, best: float) -> Sweep:
    batches = [2.0**power for power in range(10, 20)]
    return Sweep({"tokens": tokens}, batches, [1 + 0.01 * np.log(batch / best) ** 2 for batch in batches])


def test_the_law_of_batch_against_tokens_comes_from_the_optima_of_sweeps() -> None:
    sweeps = [batch_sweep(tokens, 4 * tokens**0.45) for tokens in (1e7, 3e7, 1e8, 1e9)]
    law, optima = law_of_optima([*sweeps, batch_sweep(1e6, 100)], "batch")
    assert law.exponents["tokens"].value == pytest.approx(0.45)
    assert law.coefficient == pytest.approx(4)
    assert "is below the measured range of the batch" in optima[-1].refusal


def test_sweeps_whose_optima_are_refused_give_no_law() -> None:
    sweeps = [batch_sweep(1e7, 1e4), batch_sweep(1e8, 3e4), batch_sweep(1e9, 1e8)]
    with pytest.raises(
        ValueError, match="2 points cannot fit.* at {'tokens': 1000000000.0}, the minimum, 1e.08, is above"
    ):
        law_of_optima(sweeps, "batch")


# The envelope -----------------------------------------------------------------------------------------------


def test_exact_parabolas_give_the_exponents() -> None:
    found = envelope(*study(noise=0), resamples=100)
    assert found.parameters and found.tokens and found.ratio
    assert [found.parameters.value, found.tokens.value] == pytest.approx([EXPONENT, 1 - EXPONENT])
    assert [one.parameters.value for one in found.accepted if one.parameters] == pytest.approx(
        [*map(best_size, BUDGETS)]
    )
    predicted = found.predict(3e17)
    assert predicted["parameters"].value == pytest.approx(best_size(3e17))
    assert predicted["tokens"].value == pytest.approx(3e17 / 6 / best_size(3e17))
    assert predicted["ratio"].value == pytest.approx(3e17 / 6 / best_size(3e17) ** 2)
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


def test_no_runs_are_refused() -> None:
    assert envelope([], [], [], []).refusal == "0 of at least 3 budgets have an optimum"


def test_noise_that_often_hides_the_minimum_leaves_no_finite_interval() -> None:
    optima = (one for seed in range(50) for one in envelope(*study(0.1, seed), resamples=200).accepted)
    hidden = next(one for one in optima if one.outside > 0.2)
    assert hidden.parameters and hidden.parameters.high == np.inf


def covered(trials: int) -> dict[str, float]:
    hits = dict.fromkeys(("exponent of N", "exponent of D", "size ten times ahead", "size at the first budget"), 0)
    for seed in range(trials):
        found = envelope(*study(5e-3, seed), resamples=200, seed=seed)
        ahead = found.predict(10 * BUDGETS[-1])["parameters"]
        first = found.optima[0].parameters
        assert found.parameters and found.tokens and first
        truths = (EXPONENT, 1 - EXPONENT, best_size(10 * BUDGETS[-1]), best_size(BUDGETS[0]))
        for name, one, truth in zip(hits, (found.parameters, found.tokens, ahead, first), truths, strict=True):
            hits[name] += one.low <= truth <= one.high
    return {name: count / trials for name, count in hits.items()}


def test_intervals_of_the_envelope_cover_the_truth_in_200_trials() -> None:
    assert min(covered(200).values()) >= 0.9
