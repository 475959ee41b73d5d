"""Evidence from pairs: formulas against numerical integration, SciPy and plain definitions; verdicts by hand.

Error rates and power are laws: tests/laws/test_verdict_law.py.
"""

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import ArrayLike
from scipy import integrate, optimize, stats

from quern.lab.evidence import (
    Paired,
    Slope,
    _rejected,
    compare_pairs,
    critical_t,
    e_value,
    interval,
    local_slope,
    log_bayes_factor,
    moments,
    outliers,
    share_saved,
    verdict,
    verdicts,
)

BASE = [1.210, 1.214, 1.207, 1.211, 1.218, 1.209, 1.213]
IDEA = [1.203, 1.208, 1.199, 1.206, 1.210, 1.201, 1.208]


def last_interval(differences: ArrayLike) -> tuple[float, float]:
    """The confidence sequence after the last difference."""
    n, mean, sd = moments(differences)
    low, high = interval(n[-1], mean[-1], sd[-1], 0.05)
    return float(low), float(high)


def paired(n: int, mean: float, sd: float, tau2: float = 1.0) -> Paired:
    """Numbers of a study whose scores do not matter."""
    low, high = interval(n, mean, sd, 0.05, tau2)
    t = mean * math.sqrt(n) / sd
    e = float(np.exp(log_bayes_factor(t, n, tau2)))
    ends = (float(low), float(high))
    return Paired(n, mean, sd, 0.05, tau2, ends, ends, "paired t", 0.5, e, (), (0, 0))


@pytest.mark.parametrize(
    ("t", "n", "tau2"), [(0.0, 4, 1.0), (1.3, 3, 1.0), (-3.1, 9, 1.0), (2.5, 6, 0.25), (5.0, 12, 4.0)]
)
def test_the_bayes_factor_is_the_ratio_of_two_densities(t: float, n: int, tau2: float) -> None:
    """The density of t, averaged over effects from N(0, tau2), over its density without an effect."""

    def density(effect: float) -> float:
        return float(stats.nct.pdf(t, n - 1, effect * math.sqrt(n)) * stats.norm.pdf(effect, scale=math.sqrt(tau2)))

    reach = 8 * math.sqrt(tau2)
    with_effect, _ = integrate.quad(density, -reach, reach, points=[0.0, t / math.sqrt(n)], epsabs=1e-12)
    expected = math.log(with_effect / stats.t.pdf(t, n - 1))
    assert float(log_bayes_factor(t, n, tau2)) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("alpha", [0.05, 0.01])
@pytest.mark.parametrize("n", [6, 7, 15, 200])
def test_the_critical_t_is_the_root_of_the_bayes_factor(n: int, alpha: float) -> None:
    root = optimize.brentq(lambda t: float(log_bayes_factor(t, n)) + math.log(alpha), 0.0, 1e4, xtol=1e-10)
    assert float(critical_t(n, alpha)) == pytest.approx(root, rel=1e-9)


def test_too_few_pairs_decide_nothing() -> None:
    """The factor of n pairs is at most (1 + n)^((n-1)/2): 11.2 for four pairs, 36 for five."""
    assert float(np.exp(log_bayes_factor(math.inf, [4, 5])[1])) == pytest.approx(36.0)
    assert critical_t([0, 1, 2, 3, 4, 5], 0.05)[:5].tolist() == [math.inf] * 5
    assert float(critical_t(5, 0.05)) < 10
    for n in range(1, 5):
        assert last_interval([-1.0, -1.001, -0.999, -1.0][:n]) == (-math.inf, math.inf)
    assert e_value([3.0]) == 1.0


@given(
    st.lists(st.floats(-5, 5), min_size=6, max_size=12).filter(lambda x: np.std(x) > 1e-3),
    st.floats(0.001, 100),
)
def test_the_interval_inverts_the_test_in_any_unit(differences: list[float], unit: float) -> None:
    x = np.array(differences)
    low, high = last_interval(x)
    assert e_value(x - low) == pytest.approx(20, rel=1e-6) and e_value(x - high) == pytest.approx(20, rel=1e-6)
    assert e_value(x - x.mean()) < 1
    assert last_interval(-unit * x) == pytest.approx((-unit * high, -unit * low), rel=1e-6, abs=1e-9)
    n, mean, sd = moments(x)
    assert (n[-1], mean[-1], sd[-1]) == (len(x), pytest.approx(x.mean()), pytest.approx(x.std(ddof=1)))


def test_a_comparison_has_the_numbers_of_scipy() -> None:
    found = compare_pairs(BASE, IDEA, 0.05)
    differences = np.subtract(IDEA, BASE)
    assert (found.n, found.mean, found.sd) == (
        7,
        pytest.approx(differences.mean()),
        pytest.approx(differences.std(ddof=1)),
    )
    assert found.method == "paired t"
    assert found.fixed_interval == pytest.approx(tuple(stats.ttest_1samp(differences, 0).confidence_interval(0.95)))
    assert found.correlation == pytest.approx(stats.pearsonr(BASE, IDEA)[0])
    assert found.interval == last_interval(differences) and found.e_value == e_value(differences)
    assert found.interval[0] < found.fixed_interval[0] < found.fixed_interval[1] < found.interval[1] < 0
    assert verdict(found, 0.0, 0.05) == "better"


def test_unpaired_scores_show_welchs_interval_and_keep_the_decision() -> None:
    idea = [1.19, 1.17, 1.21, 1.20, 1.16, 1.18, 1.16]
    found = compare_pairs(BASE, idea, 0.05)
    assert found.correlation < 0 and found.method == "Welch t"
    welch = stats.ttest_ind(idea, BASE, equal_var=False).confidence_interval(0.95)
    assert found.fixed_interval == pytest.approx(tuple(welch))
    assert found.interval == last_interval(np.subtract(idea, BASE))


def test_one_pair_and_equal_runs() -> None:
    one = compare_pairs([1.2], [1.1], 0.05)
    assert one.n == 1 and math.isnan(one.sd) and math.isnan(one.correlation) and one.e_value == 1
    assert one.interval == one.fixed_interval == (-math.inf, math.inf) and verdict(one, 1.0, 0.05) == "undecided"
    equal = compare_pairs(BASE, BASE, 0.05)
    assert equal.interval == (0.0, 0.0) and equal.e_value < 1 and verdict(equal, 0.0, 0.05) == "no difference"
    constant = compare_pairs([1.5] * 6, [1.25] * 6, 0.05)
    assert constant.interval == (-0.25, -0.25) and constant.e_value == pytest.approx(7**2.5)
    assert math.isnan(constant.correlation) and verdict(constant, 0.0, 0.05) == "better"


def test_arms_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="7 runs of the baseline and 6 of the idea"):
        compare_pairs(BASE, IDEA[:-1], 0.05)
    with pytest.raises(ValueError, match="one or more whole pairs"):
        compare_pairs([], [], 0.05)


@pytest.mark.parametrize("lost", [None, math.nan, math.inf, -math.inf, 11.0])
def test_a_diverged_run_counts_as_the_worst(lost: float | None) -> None:
    once = compare_pairs(BASE, [*IDEA[:-1], lost], 0.05)
    assert once.diverged == (0, 1) and once.outliers == (6,) and once.n == 7
    assert once.mean == pytest.approx((sum(IDEA[:-1]) + 8 - sum(BASE)) / 7)
    assert verdict(once, 0.0, 0.05) == "undecided"  # it was "better" without that run
    of_base = compare_pairs([*BASE[:-1], lost], IDEA, 0.05)
    assert of_base.diverged == (1, 0) and of_base.mean < -0.9 and verdict(of_base, 0.0, 0.05) == "undecided"
    assert verdict(compare_pairs(BASE, [lost] * 7, 0.05), 0.0, 0.05) == "worse"
    both = compare_pairs([*BASE[:-1], lost], [*IDEA[:-1], lost], 0.05)
    assert both.diverged == (1, 1) and both.n == 7 and max(np.abs(both.mean), both.sd) < 0.01


def test_outliers_are_named_and_counted_like_all_others() -> None:
    assert outliers([1.0, 1.1, 0.9, 1.05, 0.95, 9.0, 1.0]) == (5,)
    assert outliers([1.0, 1.1, 0.9, 1.05, 0.95, 1.2]) == ()
    assert outliers([1.0, 1.0, 1.0, 1.0, 1.3]) == (4,)
    assert outliers([0.0, 0.0, 9.0]) == ()  # too few to say so
    found = compare_pairs(BASE, [*IDEA[:-1], 1.3], 0.05)
    assert found.outliers == (6,) and found.mean == pytest.approx(np.mean([*IDEA[:-1], 1.3]) - np.mean(BASE))


E_VALUES = st.lists(st.sampled_from([0.0, 1.0, 19.0, 20.0, 25.0, 40.0, 60.0, 80.0, 100.0, 1e9]), min_size=1, max_size=6)


@given(E_VALUES)
@example([79.0, 1.0, 1.0, 1.0])
@example([80.0, 1.0, 1.0, 1.0])
@example([1.0, 41.0, 45.0, 1.0])  # two of at least 4 / (0.05 · 2)
def test_e_bh_is_its_definition(e_values: list[float]) -> None:
    """The largest j for which j hypotheses have e-values of at least K/(alpha j); those are rejected."""
    total, expected = len(e_values), set()
    for j in range(1, total + 1):
        above = {i for i, e in enumerate(e_values) if e * j * 0.05 >= total}
        if len(above) >= j:
            expected = above
    assert set(np.flatnonzero(_rejected(np.array(e_values), 0.05))) == expected


@pytest.mark.parametrize(
    ("mean", "sd", "delta", "expected"),
    [
        (-1.0, 0.5, 0.0, "better"),
        (1.0, 0.5, 0.0, "worse"),
        (0.05, 0.5, 0.0, "undecided"),
        (0.05, 0.5, 0.1, "undecided"),
        (0.05, 0.5, 1.0, "no difference"),
        (-0.95, 0.5, 1.0, "better"),
        (-0.5, 0.1, 1.0, "no difference"),  # below 0, but by less than matters
    ],
)
def test_verdicts_worked_out_by_hand(mean: float, sd: float, delta: float, expected: str) -> None:
    """Ten pairs at alpha 0.05: R = (11 · 400)^(1/10) = 2.3139, t* = √(9 · 1.3139 / (1 - R / 11)) = 3.870, so the
    interval is mean ± 1.224 SD."""
    assert float(critical_t(10, 0.05)) == pytest.approx(3.870, abs=5e-4)
    assert verdict(paired(10, mean, sd), delta, 0.05) == expected


def test_several_ideas_need_more_evidence_unless_they_agree() -> None:
    good, null = paired(10, -0.65, 0.5), paired(10, 0.01, 0.5)  # an e-value of 28.8
    assert 20 < good.e_value < 40
    assert verdict(good, 0.0, 0.05) == "better" and verdict(good, 0.0, 0.025) == "undecided"
    assert verdicts([good, null], 0.0, 0.05) == ["undecided", "undecided"]
    assert verdicts([good, good], 0.0, 0.05) == ["better", "better"]
    assert verdicts([], 0.0, 0.05) == []
    # An idea that is "no difference" does not lower the bar for the others.
    small = paired(10, -0.65, 0.1)
    assert verdicts([good, small], 0.0, 0.05) == ["better", "better"]
    assert verdicts([good, small], 1.0, 0.05) == ["undecided", "no difference"]
    # Arms may have stopped after different numbers of pairs.
    assert verdicts([paired(7, 1.0, 0.3), paired(30, 0.0, 0.3)], 0.5, 0.05) == ["worse", "no difference"]


def test_a_difference_becomes_a_share_of_the_horizon() -> None:
    """On score = 3 - 0.1 log(h), a difference of -0.1 log(1.25) is what 25 % more steps bring: 20 % of them saved."""
    horizons = np.log([500, 1000, 2000])
    curves = [[(x, 3 + offset - 0.1 * x) for x in horizons] for offset in (0.0, 0.01)]
    slope = local_slope(curves)
    assert slope.mean == pytest.approx(-0.1) and slope.error < 1e-12 and slope.degrees == 3
    difference = -0.1 * math.log(1.25)
    found = share_saved(paired(10, difference, 1e-9), slope, 0.05)
    assert found.share == pytest.approx(0.2) and found.interval == pytest.approx((0.2, 0.2), abs=1e-6)
    assert share_saved(paired(10, -difference, 1e-9), slope, 0.05).share == pytest.approx(-0.25)
    assert share_saved(paired(4, difference, 0.1), slope, 0.05).interval == (-math.inf, 1.0)


def test_a_slope_is_scipys_for_one_seed_and_needs_two_horizons() -> None:
    curve = [(1.0, 2.0), (2.0, 1.8), (3.0, 1.72), (4.0, 1.6)]
    slope, _, _, _, error = stats.linregress([x for x, _ in curve], [y for _, y in curve])
    found = local_slope([curve])
    assert (found.mean, found.error) == (pytest.approx(slope), pytest.approx(error))
    assert found.degrees == 2 and found.interval(0.05)[0] < found.mean < found.interval(0.05)[1]
    assert local_slope([curve[:2]]).interval(0.05) == (-math.inf, math.inf)
    with pytest.raises(ValueError, match="train it at two or more horizons"):
        local_slope([[(1.0, 2.0)], [(1.0, 1.8)]])
    unknown = share_saved(paired(10, -0.5, 0.1), Slope(-0.1, 0.2, 2), 0.05)
    assert unknown.share > 0 and unknown.interval == (-math.inf, 1.0)
    assert math.isnan(share_saved(paired(10, -0.5, 0.1), Slope(0.1, 0.01, 2), 0.05).share)


def test_the_interval_of_the_saved_share_covers_it() -> None:
    """Simulated studies on a curved baseline, 1 + 40 / √h: the idea needs 10 % fewer steps of the same curve."""
    rng, covered, lengths = np.random.default_rng(3), 0, []
    for _ in range(200):
        noise = 0.004 * rng.standard_normal((8, 4))
        curves = [
            [(math.log(h), 1 + 40 / math.sqrt(h) + row[at]) for at, h in enumerate((700, 1000, 1400))] for row in noise
        ]
        base = [curve[1][1] for curve in curves]
        idea = [1 + 40 / math.sqrt(1000 / 0.9) + row[3] for row in noise]
        found = share_saved(compare_pairs(base, idea, 0.05), local_slope(curves), 0.05)
        covered += found.interval[0] <= 0.1 <= found.interval[1]
        lengths.append(found.interval[1] - found.interval[0])
    assert covered >= 190 and np.median(lengths) < 0.05, (covered, np.median(lengths))
