"""Arms of a comparison on the machines of a Ray cluster: each worker's processes run where Ray finds room for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quern.cluster.connect import SECONDS_TO_START, last_line, ray_module
from quern.flags.recipe_file import read_recipe_file
from quern.lab.arms import Arm, Arms, Order
from quern.lab.trainer import Trial
from quern.recipe import Recipe
from quern.runs.origin import with_absolute_paths
from quern.temporaries import scratch_folder

SECONDS_TO_CLOSE = 10


class RayArms:
    """`arms.Arms` in a Ray actor. Use it in a `with` block, after `connect`.

    All trials of an actor run on one machine, so that the times of alternating arms can be compared. A machine of the
    cluster needs quern, and the text of the recipes at the same path.

    Args:
        arms, out, machine: As for `arms.Arms`.

    Raises:
        RuntimeError: On entry, the cluster has no room for the actor.
    """

    def __init__(self, arms: Mapping[str, Arm], out: Path, machine: Mapping[str, Any]) -> None:
        # A worker runs in another folder.
        recipes = {name: with_absolute_paths(arm.recipe).to_json() for name, arm in arms.items()}
        bodies = {name: {"recipe": recipes[name], "source": arm.source} for name, arm in arms.items()}
        self._arguments = bodies, str(out.resolve()), dict(machine)
        self._actor: Any = None

    def __enter__(self) -> RayArms:
        self._start()
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def train(self, trials: Sequence[Order]) -> Iterator[tuple[Order, Trial]]:
        """Trains as `arms.Arms.train` does. Raises RuntimeError also if the actor's machine is lost."""
        ray = ray_module()
        self._start()
        by_arm = {order.arm: order for order in trials}
        try:
            answers = self._actor.train.options(num_returns="streaming").remote([asdict(order) for order in trials])
            for answer in answers:
                body = ray.get(answer)
                yield by_arm[body["recipe"]], Trial.from_json(body)
        except ray.exceptions.RayError as error:
            raise RuntimeError(last_line(error)) from error

    def end(self) -> None:
        """Ends the actor and its processes; the next trial starts another one."""
        if self._actor is not None:
            ray, actor, self._actor = ray_module(), self._actor, None
            with suppress(ray.exceptions.RayError):
                ray.get(actor.close.remote(), timeout=SECONDS_TO_CLOSE)
            ray.kill(actor)

    def _start(self) -> None:
        """Starts the actor and waits for it: a worker that holds a lock of the study must not wait for room."""
        if self._actor is not None:
            return
        ray, machine = ray_module(), self._arguments[2]
        threads, gpus = machine["threads"], 1 if machine["device"] == "cuda" else 0
        actor = ray.remote(_Host).options(num_cpus=threads, num_gpus=gpus).remote(*self._arguments)
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
        self._actor = actor


class _Host:
    """The actor: writes the recipes' files to a folder of its own, and trains arms in processes."""

    def __init__(self, bodies: dict[str, Any], out: str, machine: dict[str, Any]) -> None:
        self._stack = ExitStack()
        folder = self._stack.enter_context(scratch_folder())
        arms = {}
        for name, body in bodies.items():
            path, callables = None, {}
            if body["source"] is not None:
                path = folder / f"{name}.py"
                path.write_text(body["source"], encoding="utf-8")
                callables = read_recipe_file(path)[0].callables()
            arms[name] = Arm(name, Recipe.from_json(body["recipe"], **callables), path, body["source"])
        self._arms = Arms(arms, Path(out), machine)

    def ready(self) -> None:
        """Returns when the actor runs."""

    def close(self) -> None:
        self._arms.end()
        self._stack.close()

    def train(self, orders: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for _, trial in self._arms.train([Order(**order) for order in orders]):
            yield trial.to_json()
