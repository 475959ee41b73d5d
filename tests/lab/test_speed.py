"""The ratio of two arms' speeds on a simulated machine with drift and disturbances, and of two real recipes."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from quern.lab import axes
from quern.lab.axes import LEAST_PAIRS, PARTS, _alternate, measure_speed
from tests.lab.test_trainer import toy
from tests.support.toy_training import CPU

pytestmark = pytest.mark.usefixtures("eager")
GROWS = 1.1, 1.3
"""The idea's seconds over the baseline's in each half of a run."""


class Noisy:
    """A machine on which steps take longer and longer, vary, and are disturbed now and then. arms: their steps."""

    def __init__(self, seed: int) -> None:
        self.rng, self.time = np.random.default_rng(seed), 0.0
        self.arms = [partial(self.step, arm) for arm in (0, 1)]

    def step(self, arm: int, share: float) -> float:
        factor = GROWS[share >= 0.5] if arm else 1.0
        disturbed = 5.0 if self.rng.random() < 0.03 else 1.0
        seconds = 0.1 * factor * disturbed * math.exp(0.03 * self.rng.normal()) * (1 + self.time / 100)
        self.time += seconds
        return seconds


def test_the_error_is_that_of_the_ratio() -> None:
    """Over 24 measurements the ratio is as far from the true one as the errors say."""
    found = []
    for seed in range(24):
        speed = _alternate(Noisy(seed).arms, 2, 0.01, 1000)
        assert speed.error <= 0.01 and speed.pairs >= PARTS * LEAST_PAIRS
        found.append(math.log(speed.ratio / (sum(GROWS) / 2)) / speed.error)
    assert 0.6 < np.std(found) < 1.6 and abs(np.mean(found)) < 0.5
    machine = Noisy(0)
    assert _alternate(machine.arms, 2, 1e-9, 5.0).error > 1e-9 and 4.0 <= machine.time < 15, "the time is over"


def test_a_deeper_model_is_slower_and_a_twin_is_not(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(axes, "TURN_SECONDS", 0.04)
    flat, deep = (replace(toy(text, steps=20), depth=depth) for depth in (1, 6))
    same, slower = (measure_speed(flat, one, tmp_path, CPU, error=0.05, most_seconds=0.5) for one in (flat, deep))
    assert abs(math.log(same.ratio)) < 0.1 + 4 * same.error
    assert slower.ratio > 1.5
