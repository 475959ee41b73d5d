"""Verdicts of a study: boundary, moderation and estimates against published numbers and SciPy; no contradiction.

Error rates and power are laws: tests/laws/test_verdict_law.py.
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats

from quern.lab import verdict
from quern.lab.verdict import Rules, critical, fails, judge, moderate, reach

RULES = Rules(delta=0.008, most_pairs=8)
Runs = dict[int, float | None]


def study(effects: dict[str, float], seed: int = 0, pairs: int = 6, seeds: int = 12) -> tuple[Runs, dict[str, Runs]]:
    """Runs with an SD of 0.002, and differences of 0.001 within a pair."""
    rng = np.random.default_rng(seed)
    base: Runs = {at: 1.2 + 0.002 * rng.standard_normal() for at in range(seeds)}
    return base, {
        name: {at: base[at] + effect + 0.001 * rng.standard_normal() for at in range(pairs)}  # type: ignore[operator]
        for name, effect in effects.items()
    }


@pytest.mark.parametrize(
    ("shape", "looks", "expected"), [(0.5, 2, 2.178), (0.5, 5, 2.413), (0.5, 10, 2.555), (0, 5, 2.040)]
)
def test_the_boundary_is_pococks_and_obrien_flemings(
    shape: float, looks: int, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jennison & Turnbull 2000, tables 2.1 and 2.3: alpha 0.05, looks of equal size from the first on."""
    monkeypatch.setattr(verdict, "FIRST_LOOK", 1)
    monkeypatch.setattr(verdict, "SHAPE", shape)
    verdict._crossings.cache_clear()
    assert float(critical(0.05, looks)) == pytest.approx(expected, abs=1e-3)
    verdict._crossings.cache_clear()


def test_more_looks_need_a_higher_boundary_up_to_the_most_pairs_that_may_be_asked_for() -> None:
    """Of the sum of many differences, a quadrature with too few nodes loses sight."""
    found = [float(critical(0.001, most)) for most in (8, 24, 50, 100)]
    assert found == sorted(found) and found[-1] > found[0] + 0.1


def test_variances_are_moderated_as_far_as_they_agree() -> None:
    """The moments of 500 ideas' variances find the scaled inverse chi-square from which these are drawn."""
    rng = np.random.default_rng(0)
    alike, drawn = (np.ones(500), 8 / rng.chisquare(8, 500))
    common, weight = moderate(4 * drawn * rng.chisquare(30, 500) / 30, 30)
    assert float(common[0]) == pytest.approx(4, rel=0.1) and float(weight[0]) == pytest.approx(8, rel=0.2)
    assert moderate(alike * rng.chisquare(3, 500) / 3, 3)[1] == pytest.approx(3 * (500 / (1 + 499 / 4) - 1), rel=0.02)
    assert [float(moderate(np.arange(1.0, 1 + ideas), 5)[1][0]) for ideas in (1, 2, 3)] == [0, 0, 0]
    y = np.array([0.01, 1.0, 300.0])
    assert verdict._inverse_trigamma(special.polygamma(1, y)) == pytest.approx(y, rel=1e-5)


def test_one_idea_has_scipys_paired_t() -> None:
    base, ideas = study({"idea": -0.01}, seeds=6)
    judgement = judge(base, ideas, RULES)
    found = judgement.findings["idea"]
    differences = np.array([ideas["idea"][at] - base[at] for at in range(6)])  # type: ignore[operator]
    score = float(critical(0.05, 8)) * (6 / 8) ** (verdict.SHAPE - 0.5)
    level = 2 * stats.norm.sf(score)
    half = stats.t.isf(level / 2, 4) * stats.sem(differences)  # one degree is for the looks
    assert (found.difference, found.error) == pytest.approx((differences.mean(), stats.sem(differences)))
    assert found.interval == pytest.approx((found.difference - half, found.difference + half))
    assert found.degrees == pytest.approx(4)
    unbiased = math.exp((math.log(5 / 2) - special.digamma(5 / 2)) / 2)  # the mean of ln s² is below ln σ²
    assert judgement.sd == pytest.approx(differences.std(ddof=1) * unbiased, rel=1e-3)
    pair = [ideas["idea"][at] for at in range(6)], [base[at] for at in range(6)]
    assert found.correlation == pytest.approx(stats.pearsonr(*pair)[0])


def test_further_seeds_of_the_baseline_help_where_pairs_do_not_correlate() -> None:
    rng = np.random.default_rng(1)
    base: Runs = dict(enumerate(rng.standard_normal(12)))
    ideas: dict[str, Runs] = {str(k): dict(enumerate(rng.standard_normal(6))) for k in range(20)}
    few, many = judge({at: base[at] for at in range(6)}, ideas, RULES), judge(base, ideas, RULES)
    shares = [many.findings[name].error / few.findings[name].error for name in ideas]
    assert 0.8 < np.mean(shares) < 0.95  # the best that is possible is √(1.5 / 2) = 0.87
    close: dict[str, Runs] = {k: {at: base[at] + 0.01 * x for at, x in one.items()} for k, one in ideas.items()}  # type: ignore[operator]
    assert judge(base, close, RULES).findings["0"].error < 0.01
    assert (many.sd, many.shared) == (few.sd, few.shared), "of the differences of pairs, which are the same"
    assert few.floor is None and many.floor is not None and many.floor.pairs == 6


def test_a_study_of_all_kinds() -> None:
    effects = {"better": -0.02, "better, small": -0.006, "worse": 0.02, "worse, small": 0.006, "no difference": 0}
    base, ideas = study(effects)
    ideas |= {"fails": {0: None, 1: math.nan, 2: 9.0}, "undecided": {0: 1.1}}
    found = judge(base, ideas, RULES).findings
    assert {name: one.verdict for name, one in found.items()} == {name: name for name in ideas}
    assert found["fails"].failed == 3 and found["fails"].pairs == 0 and math.isnan(found["fails"].difference)
    assert judge(base, {}, RULES).findings == {}
    assert math.isnan(judge(base, {"one pair": {0: 1.1}}, RULES).sd)
    same = judge(base, {"twin": base}, RULES).findings["twin"]
    assert (same.verdict, same.difference) == ("no difference", 0)


def test_an_idea_fails_if_the_baseline_does_not() -> None:
    assert fails([0, 1, 2, 3], [3, 3, 3, 3], 0, 3, 11, 0.05).tolist() == [False, False, False, True]
    assert not fails(4, 8, 4, 8, 11, 0.05) and fails(4, 8, 0, 8, 11, 0.05)


@given(
    st.lists(st.tuples(st.floats(-0.03, 0.03), st.floats(1e-5, 0.02), st.integers(1, 8)), min_size=1, max_size=12),
    st.floats(0, 0.02),
    st.integers(8, 16),
)
def test_no_verdict_contradicts_its_interval(kinds: list[tuple[float, float, int]], delta: float, seeds: int) -> None:
    rng = np.random.default_rng(0)
    base: Runs = {at: 1 + 0.004 * x for at, x in enumerate(rng.standard_normal(seeds))}
    ideas: dict[str, Runs] = {
        str(k): {at: 1 + mean + sd * rng.standard_normal() for at in range(pairs)}
        for k, (mean, sd, pairs) in enumerate(kinds)
    }
    for one in judge(base, ideas, Rules(delta, 8)).findings.values():
        low, high = one.interval
        assert low <= one.difference <= high
        below, above, within = high < 0, low > 0, -delta <= low and high <= delta
        expected = "undecided"
        if below or above:
            expected = ("better" if below else "worse") + (", small" if abs(one.difference) < delta else "")
        elif within:
            expected = "no difference"
        assert one.verdict == expected


def test_further_seeds_of_the_baseline_find_more() -> None:
    effect, delta = reach(0.004, RULES, 11)
    assert effect > delta > 0 and reach(0.004, RULES, 3) > (effect, delta), "three ideas use pairs alone"


def test_a_study_of_uneven_ideas_finds_less() -> None:
    alike, uneven = (reach(0.004, RULES, ideas=20, shared=shared) for shared in (math.inf, 1.0))
    assert alike == reach(0.004, RULES, ideas=20)
    assert uneven[0] > 1.2 * alike[0] and uneven[1] > alike[1]
    base, ideas = study({str(at): 0.0 for at in range(20)}, pairs=3)
    steady = judge(base, ideas, RULES)
    for name, runs in ideas.items():
        for seed, score in runs.items():
            runs[seed] = base[seed] + (score - base[seed]) * 3 ** (int(name) % 3)  # type: ignore[operator]
    assert judge(base, ideas, RULES).shared < steady.shared
