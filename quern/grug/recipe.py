"""The recipe on the JAX side: the `gpt` recipe with JAX callables, and its translation.

A Recipe holds callables, and those of the `gpt` recipe import torch. Here the same dataclasses hold their JAX twins,
so that reading a recipe imports no torch; `torch_json` and `from_torch_json` exchange one for the other.
"""

from __future__ import annotations

from typing import Any

from quern.grug.model import init_parameters
from quern.grug.optim import rules
from quern.optim.schedule import warmup_stable_decay
from quern.recipe import Recipe

TWINS = {
    "make_model": (init_parameters, "quern.model.gpt:GPT"),
    "make_rules": (rules, "quern.optim.groups:table"),
    "make_schedule": (warmup_stable_decay, "quern.optim.schedule:warmup_stable_decay"),
}
"""field → the callable here, and the name of the one that it is the twin of."""

UNUSED = ("model.mlp_width", "model.norm_eps", "model.dropout")
"""As in quern/recipes/gpt.py, which imports torch; a test holds the two together."""
RECIPE = Recipe(name="gpt", unused=UNUSED, **{field: here for field, (here, _) in TWINS.items()})  # type: ignore[arg-type]


def torch_json(recipe: Recipe) -> dict[str, Any]:
    """The recipe as the PyTorch side would write it."""
    return recipe.to_json() | {field: name for field, (_, name) in TWINS.items()}


def from_torch_json(body: dict[str, Any]) -> Recipe:
    """Reads what the PyTorch side wrote. Raises ValueError for another architecture than `gpt`."""
    for field, (_, name) in TWINS.items():
        if body.get(field) != name:
            raise ValueError(
                f"the JAX twin computes the `gpt` recipe only, and this one has {field} = {body.get(field)}: train it "
                "with `quern pretrain`, or copy the core into a file of your own (docs/grug.md)"
            )
    return Recipe.from_json(body, **{field: here for field, (here, _) in TWINS.items()})
