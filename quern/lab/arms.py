"""An arm of a study: its recipe, the opening docstring of its file, and the process or Ray actor that trains it.

A process trains all trials of a call, so that text, model and compilation are paid for once. On a Ray cluster, the
processes of each worker run where Ray finds room for them.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from quern.cluster import actors, ray_module
from quern.flags.recipe_file import read_recipe_file
from quern.kernels.attention.autotune import select_attention
from quern.lab.trainer import Trainer, Trial
from quern.machine import Machine, detect
from quern.process import serve, start, while_parent_lives
from quern.recipe import Recipe
from quern.records import typed
from quern.runs.origin import with_absolute_paths
from quern.temporaries import scratch_folder
from quern.terminal import silent

PARTS = ("Hypothesis", "Source", "Published", "Expected effect", "Changed", "Verdict")
"""Parts of a docstring; the first word of each is the field of `Idea`."""
_BEGINS = re.compile(rf"^({'|'.join(PARTS)}):\s*", re.MULTILINE)
_VERDICT = re.compile(
    rf"^Verdict:.*?(?:\n?[ \t]*(?P<quotes>\"\"\"|''')|(?=\n[ \t]*\n|\n(?:{'|'.join(PARTS)}):))",
    re.MULTILINE | re.DOTALL,
)
"""The verdict of a docstring, up to a blank line or the next part, or with the quotes that end the docstring."""
_PREDICTS = re.compile(r"(?:slightly |clearly )?(no difference|better|worse)\b")
"""How an expected effect that predicts a verdict begins. Anything else is no prediction."""
EVALUATIONS = 2  # validations in a trial, for the curves


@dataclass(frozen=True)
class Idea:
    """An idea's docstring. Parts that it lacks are empty. published: the figure that the source measured, and its date;
    changed: when the idea itself last changed, as ISO 8601 text, and how: studies before tried another idea."""

    title: str
    hypothesis: str = ""
    source: str = ""
    published: str = ""
    expected: str = ""
    changed: str = ""
    verdict: str = ""

    @property
    def direction(self) -> str | None:
        """The verdict that the author expects, or None."""
        found = _PREDICTS.match(self.expected)
        return found[1] if found else None


def read_idea(source: str) -> Idea:
    """Reads the docstring of an idea's file. source: the text of the file."""
    title, *words = _BEGINS.split(ast.get_docstring(ast.parse(source)) or "")
    fields = [name.partition(" ")[0].lower() for name in words[::2]]
    parts = {name: " ".join(text.split()) for name, text in zip(fields, words[1::2], strict=True)}
    return Idea(" ".join(title.split()), **parts)


def with_verdict(source: str, verdict: str) -> str:
    """The text of an idea's file with another verdict; unchanged if its docstring has none."""
    tree, found = ast.parse(source), _VERDICT.search(source)
    last = (tree.body[0].end_lineno or 0) if ast.get_docstring(tree) is not None else 0
    if found is None or source.count("\n", 0, found.start()) >= last:  # the docstring has none
        return source
    told = "\n".join([*textwrap.wrap(f"Verdict: {verdict}", 120), *filter(None, [found["quotes"]])])
    return source[: found.start()] + told + source[found.end() :]


@dataclass(frozen=True)
class Arm:
    """One side of a comparison. path, source: the recipe's file and its text; None for a recipe of quern."""

    name: str
    recipe: Recipe
    path: Path | None = None
    source: str | None = None


Seeds = tuple[int, int]  # the seeds of a trial: one for the initial weights, one for the order of the data
Train = Callable[[Arm, Iterable[Seeds]], Iterator[Trial]]
"""Trains an arm with each of some seeds; RuntimeError if its process fails."""


def in_process(out: Path, machine: Mapping[str, Any], variables: Mapping[str, str] | None = None) -> Train:
    """Returns what trains arms in a child process of this machine."""
    return lambda arm, seeds: (typed(one, Trial) for one in _ask_process(_order(arm, out, machine), seeds, variables))


def on_cluster(out: Path, machine: Mapping[str, Any]) -> Train:
    """Returns what trains arms in a Ray actor, after `connect`. Its machine needs quern, and the text at the same path.
    It raises RuntimeError if the cluster has no room or loses the actor."""

    def train(arm: Arm, seeds: Iterable[Seeds]) -> Iterator[Trial]:
        threads, gpus = machine["threads"], int(machine["device"] == "cuda")
        arm = replace(arm, recipe=with_absolute_paths(arm.recipe))  # a worker runs in another folder
        what = f"a worker with {threads} CPU threads and {gpus} GPUs"
        order = (_order(arm, out.resolve(), machine),)
        with actors(_Host, 1, what, order, num_cpus=threads, num_gpus=gpus) as (actor,):
            for answer in actor.train.options(num_returns="streaming").remote(list(seeds)):
                yield typed(ray_module().get(answer), Trial)

    return train


def trainer_for(recipe: Recipe, out: Path, machine: Machine, log: Callable[[str], None] = silent) -> Trainer:
    """Returns the trainer of a recipe's library: JAX's for a model of the JAX twin, else PyTorch's."""
    if "jax" in sys.modules:  # the file of such a model has imported it
        from quern.grug.state import Grug
        from quern.lab.jax_trainer import JaxTrainer

        if isinstance(recipe.make_model, type) and issubclass(recipe.make_model, Grug):
            return JaxTrainer(out, machine, log)
    return Trainer(out, select_attention(machine), log)


def _order(arm: Arm, out: Path, machine: Mapping[str, Any]) -> dict[str, Any]:
    body = {"name": arm.name, "recipe": arm.recipe.to_json(), "source": arm.source}
    return body | {"path": arm.path and str(arm.path), "out": str(out), "machine": dict(machine)}


def _ask_process(
    order: dict[str, Any], seeds: Iterable[Seeds], variables: Mapping[str, str] | None = None
) -> Iterator[dict[str, Any]]:
    with start("quern.lab.arms", f"arm {order['name']}", order, variables) as child:
        for one in seeds:  # a generator itself: Ray sends to it
            yield child.ask(one)


def _answers(order: dict[str, Any], requests: Iterator[Any]) -> Iterator[dict[str, Any]]:
    """Runs in the child: trains the arm with each of the seeds that it receives."""
    requests = while_parent_lives(requests)
    callables = {}
    if order["path"]:
        found, source = read_recipe_file(Path(order["path"]))
        if with_verdict(source, "") != with_verdict(order["source"], ""):
            raise ValueError(f"{order['path']} has changed since the study began")
        callables = found.callables()
    name, recipe = order["name"], Recipe.from_json(order["recipe"], **callables)
    trainer = trainer_for(recipe, Path(order["out"]), detect(**order["machine"]))
    for seed, data_seed in requests:
        yield asdict(trainer.train(recipe, name=name, seed=seed, data_seed=data_seed, evaluations=EVALUATIONS))


class _Host:
    """The actor: writes the recipe's file to a folder of its own, and trains the arm in a process."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._order = order

    def train(self, seeds: list[Seeds]) -> Iterator[dict[str, Any]]:
        with scratch_folder() as folder:
            path, source = folder / f"{self._order['name']}.py", self._order["source"]
            if source is not None:
                path.write_text(source, encoding="utf-8")
            yield from _ask_process(self._order | {"path": source and str(path)}, seeds)


if __name__ == "__main__":
    serve(_answers)
