"""An idea's file at toy size: its recipe, a state with every weight moved from where it starts, its batches."""

import json
import sys
import traceback
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from quern import compiler
from quern.data.batch import Batches
from quern.flags.recipe_file import read_recipe_file
from quern.mesh import Mesh
from quern.recipe import Recipe, Resolved
from quern.resolve import resolve
from quern.runs.training import make_batches
from quern.train.state import TrainState, build_model, build_state
from quern.train.step import train_step
from tests.support.deviation import deviation
from tests.support.models import moved
from tests.support.toy_training import CPU, VOCABULARY, copy_of, differing, snapshot, toy_corpus, toy_recipe

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
STEPS, HALF = 2, 1
TOKENS = [b"", *(b"a" * size for size in range(1, VOCABULARY))]
"""The BOS, and tokens each of which begins with the one before it."""


def idea_files() -> list[str]:
    """Names of the files of experiments/ that end in a recipe."""
    return sorted(path.stem for path in EXPERIMENTS.glob("*.py") if "\nRECIPE = " in path.read_text(encoding="utf-8"))


@cache
def read(name: str) -> Recipe:
    return read_recipe_file(EXPERIMENTS / f"{name}.py")[0]


@cache
def toy(name: str) -> Resolved:
    """The idea's recipe at the size of `toy_recipe`; a part of the shape that the idea sets keeps its value."""
    recipe, small = read(name), toy_recipe()
    shape = {field: getattr(recipe.model, field) or getattr(small.model, field) for field in ("head_dim", "kv_heads")}
    shape |= {field: getattr(small.model, field) for field in ("width", "context", "vocab_size")}
    # A rounding error makes no whole step of AdamW, and where it turns the mask of cautious decay, rate · decay of the
    # weight stays below the contracts' tolerance.
    calm = {"lr_scale": 0.1, "eps": 3e-4} | ({} if "optim.decay_scale" in recipe.unused else {"decay_scale": 5e-4})
    train = replace(recipe.train, steps=STEPS, batch_tokens=small.train.batch_tokens)
    model, optim = replace(recipe.model, bos=0, **shape), replace(recipe.optim, **calm)
    return resolve(replace(recipe, depth=2, model=model, optim=optim, train=train))


def own_initial_values(name: str) -> tuple[str, ...]:
    """Patterns of the parameters that an idea starts differently on purpose: the constant OWN_INITIAL_VALUES."""
    read(name)
    return getattr(sys.modules[name], "OWN_INITIAL_VALUES", ())


def state_of(recipe: Resolved, mesh: Mesh | None = None) -> TrainState:
    model = moved(build_model(recipe, CPU, recipe.seed))
    model.read_vocabulary(TOKENS)
    return build_state(recipe, CPU, model, mesh)


def batches_of(recipe: Resolved) -> Batches:
    return make_batches(recipe, toy_corpus())


def train(state: TrainState, recipe: Resolved, first: int, last: int) -> list[float]:
    """Runs steps first … last - 1 → losses."""
    batches, schedule, data = batches_of(recipe), recipe.make_schedule(recipe.train), state.optimizer.mesh.data
    losses = []
    for step in range(first, last):
        batch, clip_norm = batches.batch(step, data.rank, data.size), recipe.train.clip_norm
        losses.append(train_step(state, batch, schedule(step), CPU, micro_batch_rows=16, clip_norm=clip_norm).loss)
    return losses


@dataclass(frozen=True)
class Trained:
    """One uninterrupted run."""

    before: dict[str, torch.Tensor]  # weights
    half: tuple[dict[str, torch.Tensor], str]  # what a checkpoint holds
    after: dict[str, torch.Tensor]  # `snapshot`
    saved: dict[str, torch.Tensor]  # the tensors of a checkpoint after
    losses: list[float]


@cache
def trained(name: str) -> Trained:
    recipe = toy(name)
    state = state_of(recipe)
    before = {key: p.detach().clone() for key, p in state.model.named_parameters()}
    losses = train(state, recipe, 0, HALF)
    half = copy_of(state.tensors()), json.dumps(state.meta())
    losses += train(state, recipe, HALF, STEPS)
    return Trained(before, half, snapshot(state), copy_of(state.tensors()), losses)


@cache
def resumed_apart(name: str) -> list[str]:
    """Names of what differs where the second half starts from what was saved."""
    tensors, meta = trained(name).half
    state = state_of(toy(name))
    state.restore(tensors, json.loads(meta))
    train(state, toy(name), HALF, STEPS)
    return differing(trained(name).after, snapshot(state))


CODES: dict[Any, str] = {}


def first_with_its_code(name: str) -> str:
    """The first idea asked for whose code is that of this one, from which it differs in numbers."""
    recipe = toy(name)
    code = recipe.make_model, recipe.make_rules, recipe.make_schedule, recipe.make_batches
    return CODES.setdefault(code, name)


def apart_on_ranks(mesh: Mesh, names: list[str], folder: str) -> dict[str, float | str]:
    """On each rank, for each idea: how far its share of the trained state is from that of one process, in `folder`; a
    traceback where training fails."""
    found: dict[str, float | str] = {}
    for name in names:
        try:
            with compiler.eager():
                recipe = toy(name)
                state = state_of(recipe, mesh)
                train(state, recipe, 0, STEPS)
            expected, slices = torch.load(Path(folder, name)), state.optimizer.slices()
            parts = [part.tensor for part in slices.values()]
            found[name] = deviation(parts, [part.of(expected[key]) for key, part in slices.items()])
        except Exception:
            found[name] = traceback.format_exc()
    return found
