"""Arms of a comparison on the machines of a Ray cluster: each worker's processes run where Ray finds room for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quern.cluster.connect import SECONDS_TO_START, last_line, ray_module
from quern.flags.recipe_file import read_recipe_file
from quern.lab.arms import Arm, Order, Train, in_process
from quern.lab.trainer import Trial
from quern.recipe import Recipe
from quern.runs.origin import with_absolute_paths
from quern.temporaries import scratch_folder


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
