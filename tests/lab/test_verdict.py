"""Verdicts of a study: the boundary against published constants, the moderation, verdicts by hand."""

import numpy as np
import pytest

from quern.lab import verdict
from quern.lab.verdict import Rules, critical, judge


@pytest.mark.parametrize(("looks", "expected"), [(2, 2.178), (5, 2.413), (10, 2.555)])
def test_the_boundary_is_pococks(looks: int, expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jennison & Turnbull 2000, table 2.1: alpha 0.05, looks of equal size from the first on."""
    monkeypatch.setattr(verdict, "FIRST_LOOK", 1)
    verdict._crossings.cache_clear()
    assert float(critical(0.05, looks)) == pytest.approx(expected, abs=1e-3)
    verdict._crossings.cache_clear()


def test_a_study_of_three_kinds() -> None:
    rng = np.random.default_rng(0)
    base = {seed: 1.2 + 0.002 * rng.standard_normal() for seed in range(8)}
    ideas: dict[str, dict[int, float | None]] = {
        name: {seed: score + effect + 0.001 * rng.standard_normal() for seed, score in list(base.items())[:6]}
        for name, effect in (("better", -0.02), ("worse", 0.02), ("no difference", 0.0))
    }
    ideas["fails"] = {0: None, 1: None, 2: None}
    found = judge(base, ideas, Rules(delta=0.008, most_pairs=8)).findings
    assert {name: one.verdict for name, one in found.items()} == {name: name for name in ideas}
