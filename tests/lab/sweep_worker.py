"""A sweep of a fake trainer, which may kill itself. A result is a pure function of the recipe's fields and the seed."""

import math
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quern.lab.options import SweepOptions
from quern.lab.search.sweep import run
from quern.lab.trainer import Point, Trainer, Trial
from quern.recipe import Recipe
from quern.resolve import resolve
from tests.support.events import Events

SPACE = ("optim.matrix-lr=0.001..0.1:log", "train.warmdown-share=0.3..0.9")
DIVERGES_ABOVE = 0.08


def unused(*arguments: Any) -> None:
    raise AssertionError("the fake trainer builds nothing")


RECIPE = Recipe(make_model=unused, make_rules=unused, make_schedule=unused)


class FakeTrainer(Trainer):
    """Appends a line for each finished run to `ran`. before: takes the recipe of each run, and may raise."""

    def __init__(  # pyright: ignore[reportMissingSuperCall]
        self, ran: Path | None = None, before: Callable[[Recipe], None] = lambda recipe: None
    ) -> None:
        self.ran, self.before = ran, before

    def check(self, recipe: Recipe) -> None:
        resolve(recipe)

    def train(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        recipe: Recipe,
        *,
        name: str,
        seed: int,
        data_seed: int,
        evaluations: int = 1,
        on_eval: Callable[[Point], None] = lambda point: None,
    ) -> Trial:
        self.before(recipe)
        bpb = score(recipe, seed)
        for number in range(1, evaluations + 1):
            on_eval(Point(number, 0, 0.0, 0.0, bpb + 1.0 / number))
        if self.ran is not None:
            with self.ran.open("a", encoding="utf-8") as file:
                file.write(f"{recipe.optim.matrix_lr!r} {recipe.train.warmdown_share!r} {seed}\n")
        return Trial(name, seed=seed, bpb=None if recipe.optim.matrix_lr > DIVERGES_ABOVE else bpb)


def score(recipe: Recipe, seed: int) -> float:
    rate, share = recipe.optim.matrix_lr, resolve(recipe).train.warmdown_share
    noise = random.Random(f"{seed}").gauss(0, 0.01) + random.Random(f"{seed} {rate} {share}").gauss(0, 0.001)
    return 1.5 + 0.2 * math.log10(rate / 0.03) ** 2 + 0.1 * (share - 0.6) ** 2 + noise


def sweep(folder: Path, trials: int, workers: int = 1, kill_at: int = 0) -> int:
    """Returns the exit code. kill_at: the call of a function of the sweep or of its files before which it dies."""
    options = SweepOptions(RECIPE, SPACE, out=folder, sampler="random", trials=trials, seeds=2, workers=workers)
    if kill_at:
        die = lambda place: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        sys.setprofile(Events(("lab", "temporaries.py"), ("train", kill_at), die))
    code = f"from pathlib import Path; from {__name__} import sweep; sweep(Path({str(folder)!r}), {trials})"
    command = (sys.executable, "-W", "error", "-c", code)
    return run(options, lambda line: None, FakeTrainer(folder / "ran.txt"), command)
