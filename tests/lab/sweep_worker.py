"""Sweeps of a fake trainer, one after another in forked processes, which may kill themselves.

    python tests/lab/sweep_worker.py FOLDER TRIALS KILLS [--workers 1]

KILLS is a list of numbers such as 500,900,0: the first process sends itself SIGKILL before the 500th call of a function
of the sweep or of its files; the last one starts a second worker and runs to its end. Prints the exit codes as JSON.
With --workers 1, it is that second worker. The result of the fake trainer is a pure function of the recipe's fields and
the seed.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quern.lab.options import SweepOptions
from quern.lab.search import results  # noqa: F401  (the forked processes need not import it again)
from quern.lab.search.sweep import run
from quern.lab.trainer import Trainer
from quern.recipe import Recipe
from tests.support.events import Events

SPACE = ("optim.matrix-lr=0.001..0.1:log", "train.warmdown-share=0.3..0.9")
DIVERGES_ABOVE = 0.08


def unused(*arguments: Any) -> None:
    raise AssertionError("the fake trainer builds nothing")


RECIPE = Recipe(make_model=unused, make_rules=unused, make_schedule=unused)


@dataclass(frozen=True)
class FakePoint:
    bpb: float


@dataclass(frozen=True)
class FakeRun:
    seed: int
    bpb: float | None


class FakeTrainer(Trainer):
    """Appends a line for each finished run to `ran`."""

    def __init__(self, ran: Path | None = None) -> None:  # pyright: ignore[reportMissingSuperCall]
        self.ran = ran

    def train(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        recipe: Recipe,
        *,
        name: str,
        seed: int,
        data_seed: int,
        evaluations: int = 1,
        on_eval: Callable[[Any], None] = lambda point: None,
    ) -> FakeRun:
        bpb = score(recipe, seed)
        for number in range(1, evaluations + 1):
            on_eval(FakePoint(bpb + 1.0 / number))
        if self.ran is not None:
            with self.ran.open("a", encoding="utf-8") as file:
                file.write(f"{recipe.optim.matrix_lr!r} {recipe.train.warmdown_share!r} {seed}\n")
        return FakeRun(seed, None if recipe.optim.matrix_lr > DIVERGES_ABOVE else bpb)


def score(recipe: Recipe, seed: int) -> float:
    rate, share = recipe.optim.matrix_lr, recipe.train.warmdown_share
    noise = random.Random(f"{seed}").gauss(0, 0.01) + random.Random(f"{seed} {rate} {share}").gauss(0, 0.001)
    return 1.5 + 0.2 * math.log10(rate / 0.03) ** 2 + 0.1 * (share - 0.6) ** 2 + noise


def sweep(folder: Path, trials: int, kills: str, workers: int, kill_at: int) -> int:
    options = SweepOptions(RECIPE, SPACE, out=folder, sampler="random", trials=trials, seeds=2, workers=workers)
    if kill_at:
        die = lambda place: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        sys.setprofile(Events(("lab", "temporaries.py"), ("train", kill_at), die))
    command = (sys.executable, __file__, str(folder), str(trials), kills)
    return run(options, lambda line: None, FakeTrainer(folder / "ran.txt"), command)


def forked(run_child: Callable[[], int]) -> int:
    """The exit code of a child process, or minus the number of the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(run_child())
        except BaseException:
            traceback.print_exc()
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(folder: Path, trials: int, kills: str, *worker: str) -> None:
    if worker:
        sys.exit(sweep(folder, trials, kills, 1, 0))
    at = [int(number) for number in kills.split(",")]
    print(json.dumps([forked(lambda n=n: sweep(folder, trials, kills, 1 if n else 2, n)) for n in at]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
