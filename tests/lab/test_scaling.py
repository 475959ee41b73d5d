"""`quern lab scaling`: the plan, studies with a trainer whose loss is a known function of size and tokens, and the
comparison of the parameter conventions."""

import functools
import json
import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quern.lab.options import ScalingOptions
from quern.lab.scaling.fits import Envelope, Estimate, Optimum
from quern.lab.scaling.isoflop import CONVENTIONS, make_plan, most_stable
from quern.lab.scaling.parametric import Surface
from quern.lab.scaling.study import check_lines, planned
from quern.lab.scaling.study import run as run_plan
from quern.lab.trainer import Trainer, Trial
from quern.model.count import FlopCounter, Parameters, flop_counter, parameters
from quern.recipe import ModelRecipe, Recipe, TrainRecipe
from quern.recipes.gpt import RECIPE
from quern.resolve import resolve
from tests.support.command import Told
from tests.support.tiny_model import tiny_tokenizer

TRUE = Surface(E=0.9, A=300.0, B=400.0, alpha=0.35, beta=0.38)
"""In the parameters of Kaplan's convention: matrices and head."""
BUDGETS = (1e13, 3e13, 1e14, 3e14)
SIZES = ("2x64", "2", "3", "4", "5", "6", "7")
NOISE = 1e-3
TORN = '{"budget": 1e13, "size": "3", "see'
"""By a crash."""


@functools.cache
def counted(depth: int, shape: ModelRecipe) -> tuple[Parameters, FlopCounter]:
    resolved = resolve(replace(RECIPE, depth=depth, model=shape))
    return parameters(resolved), flop_counter(resolved)


class FakeTrainer(Trainer):
    """Bits per byte follow from the size, the tokens and the seeds. `before` may raise."""

    def __init__(self, before: Callable[[int, Recipe], None] = lambda number, recipe: None) -> None:
        self.before, self.trained = before, 0

    def train(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, recipe: Recipe, *, name: str, seed: int, data_seed: int, on_step: Callable[[int, float], None]
    ) -> Trial:
        resolved = resolve(recipe)
        train, (counts, counter) = resolved.train, counted(recipe.depth, recipe.model)
        assert train.steps and train.batch_tokens and recipe.depth
        self.before(self.trained, recipe)
        self.trained += 1
        on_step(train.steps, 1.0)
        tokens, kaplan = train.steps * train.batch_tokens, counts.kaplan
        noise = np.random.default_rng([seed, data_seed, kaplan, tokens]).normal(0, NOISE)
        bpb = float(TRUE.loss(kaplan, tokens) * np.exp(noise))
        flops = train.steps * counter.step(train.batch_tokens).model
        return Trial(name, train.steps, seed, data_seed, tokens, flops, 1.0, bpb, 1000.0, asdict(counts), ())


def options(out: Path, **changes: Any) -> ScalingOptions:
    return replace(ScalingOptions(RECIPE, BUDGETS, SIZES, out=out, resamples=10), **changes)


def run(given: ScalingOptions, trainer: FakeTrainer | None, log: Callable[[str], None], **more: Any) -> int:
    return run_plan(given, planned(given, log), trainer, log, **more)


def study(given: ScalingOptions, trainer: FakeTrainer | None = None) -> tuple[dict[str, Any], list[str]]:
    """Runs a study; returns fits.json and the printed lines."""
    lines: list[str] = []
    run(given, None if given.fit else trainer or FakeTrainer(), lines.append)
    return fits(given), lines


def fits(given: ScalingOptions) -> dict[str, Any]:
    return json.loads((given.folder / "fits.json").read_text(encoding="utf-8"))


def cells(given: ScalingOptions) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (given.folder / "cells.jsonl").read_text(encoding="utf-8").splitlines()]


Made = tuple[ScalingOptions, dict[str, Any], list[str]]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A study that nothing disturbs, its fits.json and the printed lines."""
    given = options(tmp_path_factory.mktemp("first"), study="first", resamples=100)
    return given, *study(given)


def test_a_study_finds_the_law_and_predicts_the_next_budget(first: Made) -> None:
    _, body, lines = first
    assert body["runs"] == {"planned": 28, "used": 28, "diverged": [], "missing": [], "off_budget": []}
    surface = body["conventions"]["kaplan"]["surface"]
    for name in ("E", "A", "B", "alpha", "beta"):
        assert surface["intervals"][name]["low"] <= getattr(TRUE, name) <= surface["intervals"][name]["high"], name
    ahead = body["predictions"]
    assert ahead["flops"] == 3e15
    found = ahead["kaplan"]["surface"]
    flops = surface["kappa"] * found["parameters"]["value"] ** surface["gamma"] * found["tokens"]["value"]
    assert flops == pytest.approx(3e15)
    best = TRUE.loss(found["parameters"]["value"], found["tokens"]["value"]).item()
    assert found["loss"]["low"] <= best <= found["loss"]["high"]
    assert body["stable"]["name"] in body["conventions"]
    parts = ["kaplan: matrices and head", "N* ∝ C^", "at 3e+15 FLOPs by the surface: parameters ", "without budget "]
    for part in (*parts, f"by the convention {body['stable']['name']} "):
        assert part in "\n".join(lines)
    assert surface["leave_out"][-1]["label"].partition(",")[0] in ("1e+13 FLOPs", "3e+14 FLOPs")  # a corner of the grid


def test_a_study_that_was_stopped_repeats_no_finished_run_and_keeps_its_plan(first: Made, tmp_path: Path) -> None:
    def stop(number: int, recipe: Recipe) -> None:
        if number == 3:
            raise KeyboardInterrupt

    def on(device: str) -> dict[str, Any]:
        return {"commit": "abc", "machine": {"device": device, "dtype": "float32", "compiled": True, "torch": "2.9"}}

    (whole, fitted, _), given = first, replace(first[0], out=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run(given, FakeTrainer(stop), lambda line: None, facts=on("cpu"))
    with (given.folder / "cells.jsonl").open("a", encoding="utf-8") as file:
        file.write(TORN)
    logged = replace(given, recipe=replace(RECIPE, train=replace(RECIPE.train, log_every=99)), tokens_per_second=9.0)
    _, said = study(logged, rest := FakeTrainer())  # which changes nothing that is learned
    assert "3 runs finished before, 25 are left" in said and rest.trained == 25
    assert cells(given) == cells(whole) and fits(given) == fitted
    with pytest.raises(ValueError, match=r"began with --device \(cpu then, cuda now\)"):
        run(given, FakeTrainer(), said.append, facts=on("cuda"))
    rates = replace(RECIPE, optim=replace(RECIPE.optim, matrix_lr=0.03))
    for changes, source, named in (
        ({"budgets": (*BUDGETS, 1e15)}, None, "budgets, cells"),
        ({"recipe": rates}, None, r"recipe\.optim\.matrix_lr"),
        ({}, "RECIPE = …", "source"),
    ):
        with pytest.raises(ValueError, match=f"registered with another {named}, which must not change"):
            run(replace(given, **changes), FakeTrainer(), said.append, source=source)


def test_fit_reads_a_study_that_others_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Told) -> None:
    given = options(tmp_path)
    assert options(tmp_path, study="").folder == given.folder
    monkeypatch.setattr("quern.machine.detect", None)  # the compiler is not tried: nothing trains
    said = told("lab", "scaling", "--fit", "--out", tmp_path, code=1)
    assert re.search(r"there is no study in .*/lab/scaling: train it first", said)
    assert not list(tmp_path.iterdir())

    def look(number: int, recipe: Recipe) -> None:
        if number == 25:
            path = given.folder / "cells.jsonl"
            before = path.read_text(encoding="utf-8")
            path.write_text(before + TORN, encoding="utf-8")  # by the process that trains
            with monkeypatch.context() as patch:
                patch.setattr("quern.process.SILENT_SECONDS", 0.0)
                body, lines = study(replace(given, fit=True))
            assert f"waiting for the fit and its {given.resamples} repetitions on resampled runs" in lines
            assert (body["runs"]["used"], len(body["runs"]["missing"])) == (25, 3)
            assert path.read_text(encoding="utf-8").endswith(TORN)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        study(given, FakeTrainer(look))


def test_diverged_failed_and_padded_cells_are_survived_and_named(tmp_path: Path) -> None:
    class Unlucky(FakeTrainer):
        def train(self, recipe: Recipe, **given: Any) -> Trial:
            if recipe.depth == 7:
                raise RuntimeError("not enough memory")
            trial = super().train(recipe, **given)
            if recipe.depth == 3:
                bpb = None if self.trained % 2 else float("nan")
                return replace(trial, bpb=bpb, tokens_per_second=float("inf"))
            return replace(trial, flops=0.9 * trial.flops) if recipe.depth == 4 else trial

    given, lines = options(tmp_path), []
    assert run(given, Unlucky(), lines.append) == 1
    found = fits(given)["runs"]
    assert (found["planned"], found["used"]) == (28, 20)
    assert found["diverged"] == [f"{flops:.0e} FLOPs, size 3, seed 0" for flops in BUDGETS]
    bad = [line for line in cells(given) if line["size"] == "3"]
    assert len(bad) == 4 and all(line["bpb"] is line["tokens_per_second"] is None for line in bad)
    assert found["missing"] == [f"{flops:.0e} FLOPs, size 7, seed 0" for flops in BUDGETS]
    assert "3e+14 FLOPs, size 7, seed 0 failed and is left out: not enough memory" in lines
    assert len(found["off_budget"]) == 4 and found["off_budget"][0].startswith("1e+13 FLOPs, size 4, seed 0: -")
    retry = FakeTrainer()
    assert run(given, retry, lines.append) == 0
    assert retry.trained == 4  # the failed ones; one that diverged would diverge again


def test_refused_budgets_are_explained(tmp_path: Path) -> None:
    """The best size of every budget has 10⁹ parameters."""

    class LargerIsBetter(FakeTrainer):
        def train(self, recipe: Recipe, **given: Any) -> Trial:
            trial = super().train(recipe, **given)
            return replace(trial, bpb=1 + 0.01 * np.log(trial.parameters["kaplan"] / 1e9) ** 2)

    body, lines = study(options(tmp_path), LargerIsBetter())
    reasons = [one["refusal"] for one in body["conventions"]["kaplan"]["envelope"]["optima"]]
    assert len(reasons) == 4
    assert all(one.startswith("the minimum, 1e+09, is above the measured range of the size") for one in reasons)
    assert body["conventions"]["kaplan"]["envelope"]["parameters"] is None
    assert body["predictions"]["kaplan"]["envelope"] == {}
    assert "  no envelope: 0 of at least 3 budgets have an optimum" in lines
    assert body["stable"]["name"] is None


def test_plan_writes_nothing(tmp_path: Path) -> None:
    lines: list[str] = []
    planned(options(tmp_path, plan=True, tokens_per_second=20_000.0), lines.append)
    assert not list(tmp_path.iterdir())
    assert lines[-1] == "28 runs of 3.08e+15 FLOPs in all, about 77 minutes"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sizes": ("2", "3", "4")}, "--sizes needs at least 4"),
        ({"recipe": replace(RECIPE, train=replace(RECIPE.train, steps=10))}, "leave out train.steps"),
        ({"recipe": replace(RECIPE, train=replace(RECIPE.train, minutes=1.0))}, "leave out train.minutes"),
        ({"study": "../evil"}, "a study cannot be called '../evil'"),
        ({"budgets": (10.0,)}, "no run meets its budget"),
        ({"check": "none"}, "there is no fitted study in .*none: `quern lab scaling --study none --out /.*` makes one"),
    ],
)
def test_a_plan_that_fits_nothing_is_refused(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=reason):
        planned(options(tmp_path, **changes), lambda line: None)
    assert not list(tmp_path.iterdir())


def test_a_prediction_is_checked_against_the_budget_that_it_is_for(first: Made) -> None:
    given, predicted, _ = first
    with pytest.raises(ValueError, match=r"first predicts 3e\+15 FLOPs: give that with --budgets"):
        study(replace(given, study="other", check="first"))
    sizes = ("5", "6", "7", "6x512", "7x640")
    measured, lines = study(replace(given, study="later", check="first", budgets=(3e15,), sizes=sizes))
    kaplan = [line for line in lines if line.strip().startswith("kaplan") and "surface" in line]
    assert any("predictions of first for 3e+15 FLOPs" in line for line in lines)
    assert kaplan and any("loss" in line and line.rstrip().endswith("yes") for line in kaplan)
    far = deepcopy(predicted)
    far["predictions"]["kaplan"]["surface"]["loss"] |= {"value": 9.0, "low": 8.9, "high": 9.1}
    assert any("loss" in line and line.rstrip().endswith("no") for line in check_lines("first", far, measured))


# The plan, and the conventions -------------------------------------------------------------------------------

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


def test_a_named_tokenizer_decides_the_vocabulary_of_every_size(tmp_path: Path) -> None:
    """Also of sizes whose defaults differ."""
    tokenizer, model = tiny_tokenizer(), replace(RECIPE.model, context=512)
    assert 256 < tokenizer.vocab_size <= 320
    text = replace(RECIPE.text, tokenizer=str(tokenizer.save(tmp_path / "named.json")))
    given = options(tmp_path, recipe=replace(RECIPE, text=text, model=model), sizes=("2", "4", "6", "8"))
    plan = planned(given, lambda line: None)
    assert {cell.size for cell in plan.cells} == {*given.sizes}
    for cell in plan.cells:
        counts, counter = counted(cell.depth, replace(model, vocab_size=320))  # a multiple of 64
        assert cell.parameters["chinchilla"] == counts.total
        assert cell.flops == cell.steps * counter.step(cell.batch_tokens).model


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

    logs, pairs = np.log(np.array(optima, float)), zip(flops, optima, strict=True)
    found = tuple(Optimum(budget, 7, "", sure(n), sure(d), sure(d / n), sure(1.0)) for budget, (n, d) in pairs)
    return Envelope(found, samples=logs + np.random.default_rng(0).normal(0, noise, (500, *logs.shape)))


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
    spread = np.log([d / n for n, d in kaplan[1:]]).std(ddof=1)
    assert found.spreads and found.spreads["kaplan"] == pytest.approx(spread)
    two = envelope_of(chinchilla[2:], noise=0.01, flops=FLOPS[2:])
    found = most_stable({"kaplan": envelope_of(kaplan, noise=0.01), "chinchilla": two})
    assert (found.name, found.refusal) == (None, "2 of at least 3 budgets have an optimum in every convention")
