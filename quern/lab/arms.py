"""An arm of a study: its recipe, the opening docstring of its file, and the process or Ray actor that trains it.

The docstring of an idea's file has its title, hypothesis, source, expected effect, and the lab's verdict. A process
trains all trials of one order, so that text, model and compilation are paid for once. On a Ray cluster, the processes
of each worker run where Ray finds room for them.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from quern.cluster import SECONDS_TO_START, last_line, ray_module
from quern.flags.recipe_file import read_recipe_file
from quern.kernels.attention.autotune import select_attention
from quern.lab.trainer import Trainer, Trial
from quern.machine import Machine, detect
from quern.process import orders, replying, start, while_parent_lives
from quern.recipe import Recipe
from quern.runs.origin import with_absolute_paths
from quern.temporaries import scratch_folder

PARTS = ("Hypothesis", "Source", "Published", "Expected effect", "Changed", "Verdict")
_BEGINS = re.compile(rf"^({'|'.join(PARTS)}):\s*", re.MULTILINE)
_PREDICTS = re.compile(r"(?:slightly |clearly )?(no difference|better|worse)\b")
"""How an expected effect that predicts a verdict begins. Anything else is no prediction."""


@dataclass(frozen=True)
class Idea:
    """An idea's docstring. Parts that it lacks are empty."""

    title: str
    hypothesis: str = ""
    source: str = ""
    published: str = ""
    """The figure that the source measured, with its date."""
    expected: str = ""
    changed: str = ""
    """When the idea itself last changed, as ISO 8601 text, and how: studies registered before tried another idea."""
    verdict: str = ""

    @property
    def direction(self) -> str | None:
        """The verdict that the author expects, or None."""
        found = _PREDICTS.match(self.expected)
        return found[1] if found else None


def read_idea(source: str) -> Idea:
    """Reads the docstring of an idea's file. source: the text of the file."""
    words = _BEGINS.split(ast.get_docstring(ast.parse(source)) or "")
    parts = {name: " ".join(text.split()) for name, text in zip(words[1::2], words[2::2], strict=True)}
    return Idea(
        title=" ".join(words[0].split()),
        hypothesis=parts.get("Hypothesis", ""),
        source=parts.get("Source", ""),
        published=parts.get("Published", ""),
        expected=parts.get("Expected effect", ""),
        changed=parts.get("Changed", ""),
        verdict=parts.get("Verdict", ""),
    )


def with_verdict(source: str, verdict: str) -> str:
    """The text of an idea's file with another verdict; unchanged if its docstring has none."""
    body = ast.parse(source).body
    if not body or not isinstance(body[0], ast.Expr) or ast.get_docstring(ast.parse(source)) is None:
        return source
    lines, end = source.split("\n"), body[0].end_lineno or 0
    begin = next((at for at in range(body[0].lineno - 1, end) if lines[at].startswith("Verdict:")), None)
    if begin is None:
        return source
    after = next((at for at in range(begin + 1, end - 1) if not lines[at].strip() or _BEGINS.match(lines[at])), end - 1)
    quotes = [] if after < end - 1 else ['"""']  # the docstring's last line may hold the verdict's end
    rest = lines[after:] if after < end - 1 else lines[end:]
    return "\n".join([*lines[:begin], *textwrap.wrap(f"Verdict: {verdict}", 120), *quotes, *rest])


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
        arm = Arm(order["name"], Recipe.from_json(order["recipe"], **callables))
        for trial in train_here(Path(order["out"]), order["machine"])(arm, (Order(**body) for body in requests)):
            reply({"trial": trial.to_json()})


def train_here(out: Path, machine: Mapping[str, Any]) -> Callable[[Arm, Iterable[Order]], Iterator[Trial]]:
    """Returns what trains orders in this process."""

    def train(arm: Arm, orders: Iterable[Order]) -> Iterator[Trial]:
        trainer = trainer_for(arm.recipe, out, detect(**machine))
        for one in orders:
            steps = replace(arm.recipe.train, steps=one.steps or arm.recipe.train.steps)
            yield trainer.train(
                replace(arm.recipe, train=steps),
                name=arm.name,
                seed=one.seed,
                data_seed=one.data_seed,
                evaluations=one.evaluations,
            )

    return train


def trainer_for(recipe: Recipe, out: Path, machine: Machine) -> Trainer:
    """Returns the trainer of a recipe's library: JAX's for a model of the JAX twin, else PyTorch's."""
    if "jax" in sys.modules:  # the file of such a model has imported it
        from quern.grug.state import Grug
        from quern.lab.jax_trainer import JaxTrainer

        if isinstance(recipe.make_model, type) and issubclass(recipe.make_model, Grug):
            return JaxTrainer(out, machine)
    return Trainer(out, select_attention(machine))


def on_cluster(out: Path, machine: Mapping[str, Any]) -> Train:
    """Returns what trains orders in a Ray actor, after `connect`.

    All trials of a call run on one machine. A machine of the cluster needs quern, and the text at the same path.
    """

    def train(arm: Arm, orders: Sequence[Order]) -> Iterator[Trial]:
        ray = ray_module()
        actor = _start(arm, out, machine)
        try:
            answers = actor.train.options(num_returns="streaming").remote([asdict(order) for order in orders])
            for answer in answers:
                yield Trial.from_json(ray.get(answer))
        except ray.exceptions.RayError as error:
            raise RuntimeError(last_line(error)) from error
        finally:
            ray.kill(actor)

    return train


def _start(arm: Arm, out: Path, machine: Mapping[str, Any]) -> Any:
    """Starts the actor and waits for it. Raises RuntimeError if the cluster has no room."""
    ray = ray_module()
    threads, gpus = machine["threads"], 1 if machine["device"] == "cuda" else 0
    body = with_absolute_paths(arm.recipe).to_json()  # a worker runs in another folder
    made = ray.remote(_Host).options(num_cpus=threads, num_gpus=gpus)
    actor = made.remote(arm.name, body, arm.source, str(out.resolve()), dict(machine))
    try:
        ray.get(actor.ready.remote(), timeout=SECONDS_TO_START)
    except ray.exceptions.GetTimeoutError as error:
        ray.kill(actor)
        raise RuntimeError(
            f"the cluster has had no room for a worker with {threads} CPU threads and {gpus} GPUs for "
            f"{SECONDS_TO_START} s: give fewer --workers or fewer --threads"
        ) from error
    except ray.exceptions.RayError as error:
        raise RuntimeError(last_line(error)) from error
    return actor


class _Host:
    """The actor: writes the recipe's file to a folder of its own, and trains the arm in a process."""

    def __init__(
        self, name: str, recipe: dict[str, Any], source: str | None, out: str, machine: dict[str, Any]
    ) -> None:
        self._stack = ExitStack()
        path, callables = None, {}
        if source is not None:
            path = self._stack.enter_context(scratch_folder()) / f"{name}.py"
            path.write_text(source, encoding="utf-8")
            callables = read_recipe_file(path)[0].callables()
        self._arm = Arm(name, Recipe.from_json(recipe, **callables), path, source)
        self._train = in_process(Path(out), machine)

    def ready(self) -> None:
        """Returns when the actor runs."""

    def train(self, orders: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for trial in self._train(self._arm, [Order(**order) for order in orders]):
            yield trial.to_json()
        self._stack.close()


if __name__ == "__main__":
    main()
