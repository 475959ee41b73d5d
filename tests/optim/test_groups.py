"""The group table: rates follow the recipe, and every parameter is in exactly one group; the schedules of the rates."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from quern.optim.adamw import AdamW
from quern.optim.groups import make_groups, table
from quern.optim.muon import Muon
from quern.optim.schedule import learning_rate, warmup_stable_decay, weight_decay
from quern.recipe import OptimRecipe, Resolved, TrainRecipe
from quern.recipes.gpt import RECIPE
from quern.resolve import resolve

RULES = table(resolve(RECIPE))
Reported = dict[str, list[tuple[str, Parameter]]]


def reported() -> Reported:
    def parameter(*shape: int) -> Parameter:
        return Parameter(torch.ones(shape))

    return {
        "matrices": [("block.up", parameter(8, 4)), ("block.down", parameter(4, 8))],
        "embedding": [("embedding", parameter(16, 4))],
        "value_embeddings": [("value_embedding", parameter(16, 4))],
        "head": [("head", parameter(16, 4))],
        "residual_scales": [("residual", parameter(2))],
        "x0_scales": [("x0", parameter(2))],
        "gates": [("gate", parameter(2, 3))],
        "smear": [("smear.gate", parameter(1, 4)), ("backout", parameter(1))],
    }


def everything(groups: Reported) -> list[tuple[str, Parameter]]:
    return [pair for pairs in groups.values() for pair in pairs]


def test_rates_follow_batch_and_width() -> None:
    recipe = OptimRecipe(lr_scale=0.5, decay_scale=2.0, table_decay_scale=4.0, width_scale=3.0)
    model = reported()
    groups = {
        group.name: group
        for group in make_groups(model, table(Resolved.of(resolve(RECIPE), optim=recipe)), everything(model))
    }
    rates = {name: group.lr for name, group in groups.items()}
    assert rates == pytest.approx(
        {
            "matrices": 0.01,
            "head": 0.008 * 0.5**0.5 * 3,
            "embedding": 0.3 * 1.5,
            "value_embeddings": 0.15 * 1.5,
            "residual_scales": 0.0025,
            "x0_scales": 0.25,
            "gates": 0.01,
            "smear": 0.1,
        }
    )
    assert groups["matrices"].rule == Muon(beta2=0.9, weight_decay=0.56, steps=5)
    assert groups["head"].rule == AdamW((0.8, 0.96), 1e-10, 0.04)
    assert groups["value_embeddings"].rule == AdamW((0.8, 0.995), 1e-10, 0.04)
    assert groups["embedding"].rule == AdamW((0.8, 0.995), 1e-10, 0.001)
    assert groups["x0_scales"].rule == AdamW((0.96, 0.95), 1e-10, 0.0)


@pytest.mark.parametrize(("scale", "decay"), [(4.0, 0.16), (20.0, 0.1 / 0.225)])
def test_bigrams_decay_four_times_as_fast_as_value_embeddings_up_to_a_tenth_in_a_step(
    scale: float, decay: float
) -> None:
    optim = OptimRecipe(lr_scale=0.5, table_decay_scale=scale, width_scale=3.0)
    rule, lr, _ = table(Resolved.of(resolve(RECIPE), optim=optim))["bigrams"]
    assert isinstance(rule, AdamW) and (lr, rule.weight_decay) == pytest.approx((0.225, decay))


NEW = Parameter(torch.ones(1))


@pytest.mark.parametrize(
    ("group", "name"), [("gates", "head"), ("smear", "backout"), ("smear", "stranger"), ("matrixes", "block.up")]
)
def test_parameters_that_are_not_in_one_group_are_named(group: str, name: str) -> None:
    model = reported()
    parameters = everything(model)
    with pytest.raises(ValueError, match=": forgotten: missing, named twice, or not the model"):
        make_groups(model, RULES, [*parameters, ("forgotten", NEW)])
    with pytest.raises(ValueError, match=": head: missing, named twice, or not the model"):
        make_groups(model | {"head": [("head", NEW)]}, RULES, parameters)
    model.setdefault(group, []).append((name, dict(parameters).get(name, NEW)))
    with pytest.raises(ValueError, match=f": {name}: missing, named twice, or not the model"):
        make_groups(model, RULES, parameters)


@pytest.mark.parametrize(
    ("group", "every", "message"),
    [
        ("matrixes", 1, "no optimizer group is called matrixes: use one of matrices, head"),
        ("matrices", 1, "'bias' is no matrix"),
        ("matrices", 0, "group 'matrices' cannot be updated every 0 steps: every must be at least 1"),
    ],
)
def test_a_group_that_has_no_rule_is_refused(group: str, every: int, message: str) -> None:
    model = {group: [("bias", NEW)]}
    rules = RULES | {"matrices": RULES["matrices"]._replace(every=every)}
    with pytest.raises(ValueError, match=message):
        make_groups(model, rules, everything(model))


# Schedules --------------------------------------------------------------------------------------------------


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


def test_the_schedule_puts_them_together() -> None:
    train: Any = TrainRecipe(steps=100, warmup_steps=5, warmdown_share=0.5, final_lr=0.1)
    told = warmup_stable_decay(train)(80)
    assert told.lr == pytest.approx(0.1 + 0.9 * 20 / 50)
    assert told.momentum == 0.95
    assert told.decay == weight_decay(80, 100)
