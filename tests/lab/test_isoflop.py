"""The plan of an IsoFLOP study: costs, lengths, refusals; and the comparison of the parameter conventions."""

from dataclasses import replace

import numpy as np
import pytest

from quern.lab.scaling.fits import Envelope, Estimate, Optimum
from quern.lab.scaling.isoflop import CONVENTIONS, make_plan, most_stable
from quern.recipe import ModelRecipe, TrainRecipe
from quern.recipes.gpt import RECIPE
from quern.resolve import resolve

DEPTH_2_PARAMETERS = {"kaplan": 1_441_792, "chinchilla": 3_538_998, "transformer": 393_216}
"""Two blocks of 12 · 128², a head of 8192 · 128; the embedding and one table of value embeddings of the same size, and
54 scalars and gates."""
GATES = 24 + 2 * 12
"""Products of the smear, and of the gate of the one table of value embeddings for two heads."""
PAIRS = 128 * 129 // 2 + 384 * 128 + 512 * 513 // 2
"""The first layer sees 128 tokens, the last one the whole context."""
DEPTH_2_FLOPS_PER_TOKEN = 6 * (1_441_792 + GATES) + 12 * 128 * PAIRS / 512


def test_a_cell_costs_its_budget_and_its_recipe_has_its_size_and_length() -> None:
    recipe, budgets, sizes = replace(RECIPE, seed=5), (1e12, 1e15), ("2x128", "4x320")
    plan = make_plan(recipe, budgets, sizes, seeds=(0, 2))
    keys = [(budget, size, seed) for size in sizes for budget in budgets for seed in (0, 2)]
    assert [cell.key for cell in plan.cells] == keys
    for cell in plan.cells:
        assert abs(cell.flops / cell.budget - 1) <= 0.01 and cell.tokens == cell.steps * cell.batch_tokens
    for cell in plan.cells[:4]:
        assert cell.parameters == DEPTH_2_PARAMETERS
        assert cell.flops == cell.tokens * DEPTH_2_FLOPS_PER_TOKEN
    last = plan.cells[-1]
    resolved = resolve(last.recipe(recipe))
    assert (resolved.model.depth, resolved.model.width) == (last.depth, last.width) == (4, 320)
    assert (resolved.train.steps, resolved.train.batch_tokens) == (last.steps, last.batch_tokens)
    assert resolved.seed == 5, "the recipe's seed decides the built-in text"


def test_a_short_run_gets_a_smaller_batch_and_a_budget_that_no_steps_cost_is_named() -> None:
    (cell,) = make_plan(RECIPE, [5e11], ["2x128"]).cells  # at 4,096 tokens a step it would be 12.7 steps
    assert cell.batch_tokens < 4096 and cell.batch_tokens % 512 == 0
    assert "1 step of 512 tokens miss the budget" in make_plan(RECIPE, [1e9], ["2x128"]).refused[0]
    plan = make_plan(replace(RECIPE, train=TrainRecipe(batch_tokens=65_536)), [1e12, 1e15], ["2x128"])
    assert [cell.budget for cell in plan.cells] == [1e15]
    (reason,) = plan.refused
    assert reason.startswith("1e+12 FLOPs, size 2x128: 2 steps of 65,536 tokens miss the budget by 20.8 %")
    assert "a smaller --train.batch-tokens" in reason


def test_sizes_that_cannot_be_compared_are_refused() -> None:
    for sizes, reason in (
        (["4", "8"], r"^the sizes differ in text.vocab-size \(8,192 at 4, 32,768 at 8\): set --text.vocab-size"),
        (["4", "four"], "^'four' is no size: give a depth such as 4, or DEPTHxWIDTH such as 4x320$"),
        (["0"], "depth must be a whole number between 1 and 1,000"),
    ):
        with pytest.raises(ValueError, match=reason):
            make_plan(RECIPE, [1e14], sizes)
    recipe = replace(RECIPE, text=replace(RECIPE.text, vocab_size=8192), model=ModelRecipe(context=1024))
    assert len(make_plan(recipe, [1e15], ["4", "8"]).cells) == 2, "they share what is set"


FLOPS = (1e18, 2e18, 5e18, 1e19)
PUBLISHED = {
    "kaplan": ((110_678_115, 1_241_505_403), (167_797_457, 1_785_336_422), (250_650_865, 2_642_234_152),
               (381_758_347, 3_806_871_243)),
    "chinchilla": ((416_320_605, 1_232_157_011), (560_239_841, 1_763_669_281), (741_495_903, 2_629_909_368),
                   (988_644_331, 3_884_841_895)),
    "transformer": ((80_259_665, 1_315_639_547), (131_488_566, 1_864_134_141), (220_985_474, 2_595_328_843),
                    (401_213_504, 3_328_704_512)),
}  # fmt: skip
"""Optimal parameters and tokens at the budgets, from nanochat's log of experiments, which concludes: Kaplan's."""


def envelope_of(optima: tuple[tuple[int, int], ...], noise: float, flops: tuple[float, ...] = FLOPS) -> Envelope:
    def sure(value: float) -> Estimate:
        return Estimate(value, value, value)

    logs = np.log(np.array(optima, float))
    return Envelope(
        tuple(
            Optimum(budget, 7, "", sure(n), sure(d), sure(d / n), sure(1.0))
            for budget, (n, d) in zip(flops, optima, strict=True)
        ),
        samples=logs + np.random.default_rng(0).normal(0, noise, (500, *logs.shape)),
    )


def test_the_published_study_names_the_convention_that_its_authors_chose() -> None:
    found = most_stable({name: envelope_of(optima, noise=0.01) for name, optima in PUBLISHED.items()})
    assert found.name == "kaplan" and found.spreads and found.support
    assert list(PUBLISHED) == list(CONVENTIONS)
    logs = np.log([d / n for n, d in PUBLISHED["kaplan"]])
    assert found.spreads["kaplan"] == pytest.approx(logs.std(ddof=1))
    assert found.support["kaplan"] == 1.0
    unsure = most_stable({name: envelope_of(optima, noise=0.3) for name, optima in PUBLISHED.items()})
    assert unsure.support and 0.3 < unsure.support["kaplan"] < 0.9


def test_conventions_are_compared_over_their_common_budgets() -> None:
    kaplan, chinchilla = PUBLISHED["kaplan"], PUBLISHED["chinchilla"]
    three = envelope_of(chinchilla[1:], noise=0.01, flops=FLOPS[1:])
    found = most_stable({"kaplan": envelope_of(kaplan, noise=0.01), "chinchilla": three})
    assert found.spreads and found.spreads["kaplan"] == pytest.approx(
        np.log([d / n for n, d in kaplan[1:]]).std(ddof=1)
    )
    two = envelope_of(chinchilla[2:], noise=0.01, flops=FLOPS[2:])
    found = most_stable({"kaplan": envelope_of(kaplan, noise=0.01), "chinchilla": two})
    assert (found.name, found.refusal) == (None, "2 of at least 3 budgets have an optimum in every convention")
