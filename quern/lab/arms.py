"""The process of an arm: it trains all trials of one order, so that text, model and compilation are paid for once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from quern.child import orders, replying, start, while_parent_lives
from quern.flags.recipe_file import read_recipe_file
from quern.kernels.attention.autotune import select_attention
from quern.lab.idea import with_verdict
from quern.lab.trainer import Trainer, Trial
from quern.machine import Machine, detect
from quern.recipe import Recipe


@dataclass(frozen=True)
class Arm:
    """One side of a comparison.

    Args:
        name: Unique in the study.
        recipe: As for `quern pretrain`, with the flags of the study.
        path: The recipe's file, or None for a recipe of quern.
        source: The text of that file.
    """

    name: str
    recipe: Recipe
    path: Path | None = None
    source: str | None = None


@dataclass(frozen=True)
class Order:
    """One trial to train. steps: None for those of the arm's recipe; evaluations: validations in the trial."""

    steps: int | None
    seed: int
    data_seed: int
    evaluations: int = 1


Train = Callable[[Arm, Sequence[Order]], Iterator[Trial]]
"""Trains an arm's orders one after another; RuntimeError if its process fails."""


def in_process(out: Path, machine: Mapping[str, Any], variables: Mapping[str, str] | None = None) -> Train:
    """Returns what trains orders in a child process of this machine."""

    def train(arm: Arm, orders: Sequence[Order]) -> Iterator[Trial]:
        order = {
            "name": arm.name,
            "recipe": arm.recipe.to_json(),
            "path": str(arm.path) if arm.path else None,
            "source": arm.source,
            "out": str(out),
            "machine": dict(machine),
        }
        with start("quern.lab.arms", f"arm {arm.name}", order, variables) as child:
            for one in orders:
                yield Trial.from_json(child.ask(asdict(one))["trial"])

    return train


def main() -> None:
    """Trains each `Order` that the process receives."""
    with replying() as reply:
        order, requests = orders()
        requests = while_parent_lives(requests)
        callables = {}
        if order["path"]:
            found, source = read_recipe_file(Path(order["path"]))
            if with_verdict(source, "") != with_verdict(order["source"], ""):
                raise ValueError(f"{order['path']} has changed since the study began")
            callables = found.callables()
        recipe = Recipe.from_json(order["recipe"], **callables)
        trainer = trainer_for(recipe, Path(order["out"]), detect(**order["machine"]))
        for body in requests:
            one = Order(**body)
            steps = replace(recipe.train, steps=one.steps or recipe.train.steps)
            trial = trainer.train(
                replace(recipe, train=steps),
                name=order["name"],
                seed=one.seed,
                data_seed=one.data_seed,
                evaluations=one.evaluations,
            )
            reply({"trial": trial.to_json()})


def trainer_for(recipe: Recipe, out: Path, machine: Machine) -> Trainer:
    """Returns the trainer of a recipe's library: JAX's for a model of the JAX twin, else PyTorch's."""
    if "jax" in sys.modules:  # the file of such a model has imported it
        from quern.grug.state import Grug
        from quern.lab.jax_trainer import JaxTrainer

        if isinstance(recipe.make_model, type) and issubclass(recipe.make_model, Grug):
            return JaxTrainer(out, machine)
    return Trainer(out, select_attention(machine))


if __name__ == "__main__":
    main()
