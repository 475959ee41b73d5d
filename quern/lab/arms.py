"""The processes of a comparison: one for each arm, which trains all trials of the arm.

Arms that train at the same time alternate: an arm trains for some seconds while the others wait. So all of them meet
the same disturbances of the machine, and their times can be compared.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from quern.child import Child, orders, replying, start, while_parent_lives
from quern.flags.recipe_file import read_recipe_file
from quern.kernels.attention.autotune import select_attention
from quern.lab.idea import with_verdict
from quern.lab.trainer import Trainer, Trial
from quern.machine import Machine, detect
from quern.recipe import Recipe

TURN_SECONDS = 0.3
"""An arm's turn, at least one step: short against the disturbances that both arms should meet. The times of one recipe
in two processes still differ by about 2 % (standard deviation, CPU)."""


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
    """One trial to train. pair: number of the pair, from 0."""

    arm: str
    pair: int
    steps: int
    seed: int
    data_seed: int
    evaluations: int = 1


class Arms:
    """Starts the process of an arm when it is first needed. Use it in a `with` block.

    Args:
        arms: By name.
        out: The folder of tokenizers and token shards.
        machine: Arguments of `machine.detect`.
        variables: Environment variables of the processes.
        most: Processes at a time; the one that was used the longest ago ends first.
    """

    def __init__(
        self,
        arms: Mapping[str, Arm],
        out: Path,
        machine: Mapping[str, Any],
        variables: Mapping[str, str] | None = None,
        most: int = 2,
    ) -> None:
        self.arms, self.out, self.machine, self.variables, self.most = arms, out, machine, variables, most
        self._running: dict[str, tuple[Child, ExitStack]] = {}  # in the order of use

    def __enter__(self) -> Arms:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def train(self, trials: Sequence[Order]) -> Iterator[tuple[Order, Trial]]:
        """Trains at most one trial of each arm, alternating between the arms.

        Args:
            trials: Of different arms.

        Yields:
            Each trial when it is finished.

        Raises:
            RuntimeError: An arm's process failed; the message has its last lines.
        """
        children = {order.arm: self._child(order.arm) for order in trials}
        waiting = list(trials)
        for order in trials:
            children[order.arm].send({**asdict(order), "alternate": len(trials) > 1})
        if len(trials) > 1:
            for child in children.values():  # a process that still starts would slow down the first turn of another
                child.answer()
        while waiting:
            for order in tuple(waiting):
                child = children[order.arm]
                if len(trials) > 1:
                    child.send("turn")
                answer = child.answer()
                if "trial" in answer:
                    waiting.remove(order)
                    yield order, Trial.from_json(answer["trial"])

    def end(self) -> None:
        """Kills all processes; a trial that is not finished is lost. They start again on demand."""
        while self._running:
            self._stop(next(iter(self._running)))

    def _stop(self, name: str) -> None:
        child, stack = self._running.pop(name)
        child.process.kill()
        stack.close()

    def _child(self, name: str) -> Child:
        if name in self._running:
            self._running[name] = self._running.pop(name)
            return self._running[name][0]
        while len(self._running) >= self.most:
            self._stop(next(iter(self._running)))
        arm, stack = self.arms[name], ExitStack()
        order = {
            "name": name,
            "recipe": arm.recipe.to_json(),
            "path": str(arm.path) if arm.path else None,
            "source": arm.source,
            "out": str(self.out),
            "machine": dict(self.machine),
        }
        child = stack.enter_context(start("quern.lab.arms", f"arm {name}", order, self.variables))
        self._running[name] = child, stack
        return child


def main() -> None:
    """The process of an arm: trains each `Order` that it receives. It alternates with arms that train beside it."""
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
            turns = _Turns(reply, requests, body.pop("alternate"))
            one = Order(**body)
            trial = trainer.train(
                replace(recipe, train=replace(recipe.train, steps=one.steps)),
                name=order["name"],
                seed=one.seed,
                data_seed=one.data_seed,
                evaluations=one.evaluations,
                on_step=turns.after_step,
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


class _Turns:
    """If arms alternate: ends this arm's turn after some seconds, and waits for the next."""

    def __init__(self, reply: Callable[[Any], None], requests: Iterator[Any], alternate: bool) -> None:
        self._reply, self._requests, self._alternate = reply, requests, alternate
        if alternate:
            reply({"turn": "ready"})
            next(self._requests)
        self._began: float | None = None  # at the first step, which may compile

    def after_step(self, step: int, seconds: float) -> None:
        if not self._alternate:
            return
        now = time.perf_counter()
        self._began = self._began or now
        if now - self._began >= TURN_SECONDS:
            self._reply({"turn": "over"})
            next(self._requests)
            self._began = time.perf_counter()


if __name__ == "__main__":
    main()
