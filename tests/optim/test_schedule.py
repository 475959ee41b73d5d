"""The schedules at points worked out by hand, and that no rate ever rises in the warm-down."""

from collections.abc import Callable

import pytest

from quern.optim.schedule import learning_rate, multipliers, weight_decay


@pytest.mark.parametrize(
    ("schedule", "steps", "points"),
    [  # 1,000 steps: warm-up over 40, flat until 600, then 400 steps down to 0.05
        (learning_rate, 1000, {0: 1 / 40, 19: 0.5, 39: 1.0, 600: 1.0, 800: 0.525, 1000: 0.05}),
        (weight_decay, 100, {0: 1.0, 25: 0.8535534, 50: 0.5, 100: 0.0, 120: 0.0}),
    ],
)
def test_known_points(schedule: Callable[[int, int], float], steps: int, points: dict[int, float]) -> None:
    assert {step: schedule(step, steps) for step in points} == pytest.approx(points, abs=1e-7)


@pytest.mark.parametrize("steps", [1, 2, 7, 30, 100, 1000])
def test_rates_rise_in_the_warm_up_and_never_after(steps: int) -> None:
    rates = [learning_rate(step, steps) for step in range(steps)]
    peak = rates.index(max(rates))
    assert all(a <= b for a, b in zip(rates[:peak], rates[1 : peak + 1], strict=True))
    assert all(a >= b for a, b in zip(rates[peak:-1], rates[peak + 1 :], strict=True))
    assert all(0 < rate <= 1 for rate in rates)
    assert steps < 100 or rates[-1] < rates[-2] < rates[len(rates) // 2]


def test_multipliers_put_them_together() -> None:
    told = multipliers(80, 100, warmup_steps=5, warmdown_share=0.5, final_lr=0.1)
    assert told.lr == pytest.approx(0.1 + 0.9 * 20 / 50)
    assert told.momentum == 0.95
    assert told.decay == weight_decay(80, 100)
