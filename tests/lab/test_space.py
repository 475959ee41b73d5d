"""Search spaces: what entries mean, and what is refused with which message."""

from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import pytest
from optuna import create_study
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from quern.flags.recipe_file import read_recipe_file
from quern.lab.search.space import apply, distributions, point, read_space
from quern.recipe import Recipe
from quern.recipes.gpt import RECIPE
from quern.resolve import resolve

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


ENTRIES: dict[str, BaseDistribution] = {
    "optim.matrix-lr=0.001..0.1:log": FloatDistribution(0.001, 0.1, log=True),
    "train.warmdown-share=0.3..0.9": FloatDistribution(0.3, 0.9),
    "train.batch-tokens=4096..16384:4096": IntDistribution(4096, 16384, step=4096),
    "train.batch-tokens=4096,8192": CategoricalDistribution((4096, 8192)),
    "model.windows=SSSL,SSL,L": CategoricalDistribution(("SSSL", "SSL", "L")),
    "train.clip-norm=none,1": CategoricalDistribution((None, 1.0)),
    "train.packing=best-fit,stream": CategoricalDistribution(("best-fit", "stream")),
    "depth=2..6": IntDistribution(2, 6),
    "model.rope-base=1e4..1e6:log": FloatDistribution(1e4, 1e6, log=True),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_sets_its_field(entry: str) -> None:
    space, name = read_space([entry], RECIPE), entry.partition("=")[0].replace("-", "_")
    assert distributions(space) == {name: ENTRIES[entry]}
    values = create_study().ask(distributions(space)).params
    changed, own = apply(RECIPE, values), attrgetter(name)
    assert own(changed) == values[name]
    assert apply(changed, {name: own(RECIPE)}) == RECIPE


REFUSED = {
    "optim.matrix-lr": "'optim.matrix-lr' has no values: write optim.matrix-lr=0.005..0.08:log",
    "model.windows=SSSL,X": "model.windows is a pattern of S (short) and L (long), such as SSSL, not 'X'",
    "model.head-dim=7,8": "model.head-dim must be even for rotary embeddings, not 7",
    "optim.matrix-lr=0.1..0.01": "its low end must be below its high end",
    "optim.matrix-lr=0..0.1:log": "with :log both ends must be above 0",
    "optim.matrix-lr=0.01..0.1:lin": "LOW..HIGH, LOW..HIGH:log or LOW..HIGH:STEP, in numbers",
    "optim.matrix-lr=0.01..0.1:0.04": "a whole number of steps of 0.04 must lead from 0.01 to 0.1",
    "optim.matrix-lr=0.01..0.1:": "LOW..HIGH, LOW..HIGH:log or LOW..HIGH:STEP, in numbers",
    "optim.matrix-lr=0.01": "at least two choices",
    "optim.matrix-lr=0.01,0.01": "all different",
    "optim.matrix-lr=-1..1": "optim.matrix-lr must be a number between 0 and 1,000, not -1.0",
    "optim.matrix-lr=0.1,fast": "'fast' in 'optim.matrix-lr=0.1,fast' must be a number",
    "train.batch-tokens=4096.5..8192": "in whole numbers",
    "train.packing=best-fit,worst-fit": "train.packing must be one of best-fit",
    "model.windows=1..3": "which is no number",
    "optim.matrix_rate=0.1..0.2": "no field 'optim.matrix-rate'; nearest: optim.matrix-lr",
    "seed=0..5": "seed cannot be in the space: it is what pairs the trials: set how many seeds with --seeds",
    "data=a,b": "changes the text",
    "model.vocab-size=100,200": "follows from the tokenizer: set --text.vocab-size",
    "model.mlp-width=100,200": "does nothing in the 'gpt' recipe",
    "sft.epochs=1..2": "is for fine-tuning, and a study compares pretraining",
    "train.minutes=1..2": "its trials have a fixed number of steps",
    "train.recompute=true,false": "does not change what is learned",
    "optim.matrix-lr=0.1,0.2 optim.matrix_lr=0.1..0.2": "optim.matrix-lr is in the space twice",
}


@pytest.mark.parametrize("entry", REFUSED)
def test_a_wrong_entry_is_refused_with_the_right_form(entry: str) -> None:
    with pytest.raises(ValueError, match=".") as caught:
        read_space(entry.split(), RECIPE)
    assert REFUSED[entry] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_means_the_same_as_its_entries(tmp_path: Path) -> None:
    file = tmp_path / "two.toml"
    text = 'depth = [2, 4]\n[optim]\nmatrix-lr = "0.005..0.08:log"\n[model]\nwindows = ["SSSL", "L"]\n'
    file.write_text(text, encoding="utf-8")
    entries = ["depth=2,4", "optim.matrix-lr=0.005..0.08:log", "model.windows=SSSL,L"]
    assert read_space([str(file)], RECIPE) == read_space(entries, RECIPE)
    assert read_space([str(file), "train.final-lr=0..0.1"], RECIPE)["train.final_lr"].text == "0..0.1"
    for wrong in (b"depth = ", b"\xff\xfe"):
        file.write_bytes(wrong)
        with pytest.raises(ValueError, match=r"two\.toml is not TOML"):
            read_space([str(file)], RECIPE)


@pytest.mark.parametrize(
    ("entry", "value", "edge"),
    [
        ("optim.matrix-lr=0.001..0.1:log", 0.09, "upper"),
        ("optim.matrix-lr=0.001..0.1:log", 0.0012, "lower"),
        ("optim.matrix-lr=0.001..0.1:log", 0.01, None),
        ("train.warmdown-share=0.5..1", 1.0, None),  # no share is above 1
        ("train.warmdown-share=0.5..1", 0.51, "lower"),
        ("train.batch-tokens=4096,8192,16384", 16384, "upper"),
        ("train.batch-tokens=4096,8192", 8192, None),
        ("train.clip-norm=none,1,2,3", None, None),
        ("model.windows=SSSL,SSL,L", "L", None),
    ],
)
def test_the_edge_of_a_range(entry: str, value: object, edge: str | None) -> None:
    (dimension,) = read_space([entry], RECIPE).values()
    assert dimension.edge(value) == edge


def test_the_recipes_own_values_are_a_point_if_they_are_in_the_space() -> None:
    recipe: Recipe = resolve(replace(RECIPE, train=replace(RECIPE.train, steps=10, batch_tokens=4096)))
    for entry, value in (
        ("optim.matrix-lr=0.01..0.1:log", 0.02),
        ("train.batch-tokens=4096,8192", 4096),
        ("train.batch-tokens=4096..8192:4096", 4096),
        ("train.batch-tokens=1024..8192:1792", "absent"),  # 4096 is between two of its values
        ("optim.matrix-lr=0.03..0.1:log", "absent"),
        ("train.clip-norm=none,1", None),
    ):
        name = entry.partition("=")[0].replace("-", "_")
        both = point(read_space([entry, "optim.head-lr=0.001..0.1"], recipe), recipe)
        assert both == (None if value == "absent" else {name: value, "optim.head_lr": 0.008}), entry


@pytest.mark.parametrize("path", sorted(EXPERIMENTS.glob("studies/*.toml")), ids=lambda path: path.stem)
def test_the_spaces_of_the_studies_are_around_their_recipes_values(path: Path) -> None:
    own = path.with_suffix(".py")
    recipe, _ = read_recipe_file(own if own.exists() else EXPERIMENTS / own.name)
    space = read_space([str(path)], recipe)
    assert point(space, resolve(recipe)) is not None
