"""Ranks run this for the laws of reinforcement learning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quern import compiler
from quern.eval.task import Item, question
from quern.generate.engine import Engine
from quern.mesh import Mesh, alone
from quern.parallel.plan import shard_model
from quern.recipe import OptimRecipe, Resolved, RlRecipe
from quern.rl.environment import Environment
from quern.rl.rollouts import Rollouts
from quern.train.state import TrainState, build_model, build_state
from quern.train.step import train_step
from tests.parallel.compared import Snapshot, small_cuts, state_apart
from tests.support.models import moved
from tests.support.toy_engine import toy_tokenizer
from tests.support.toy_training import CPU, toy_recipe, toy_schedule

SETTINGS = RlRecipe(groups=5, samples=3, max_tokens=10, steps=4, resample=1)


def ask(seed: str) -> Item:
    return question(f"mill {seed[-6:]}", "e")


LETTERS = Environment("letters", ask, lambda item, reply: min(1.0, reply.count("e") / 2))
NEVER = Environment("never", ask, lambda item, reply: 0.0)


def rl_recipe() -> Resolved:
    recipe = toy_recipe({"context": 48, "vocab_size": toy_tokenizer().vocab_size, "kv_heads": 2})
    return replace(recipe, optim=OptimRecipe(lr_scale=0.01, decay_scale=0.1, width_scale=1.0, eps=1e-4))


def rl_state(mesh: Mesh, seed: int = 1) -> TrainState:
    recipe = rl_recipe()
    return build_state(recipe, CPU, shard_model(moved(build_model(recipe, CPU, 0), seed=seed), mesh), mesh)


def rollouts_of(state: TrainState, settings: RlRecipe = SETTINGS, *environments: Environment, **more: Any) -> Rollouts:
    engine = Engine(state.model, toy_tokenizer(), CPU)
    return Rollouts(engine, environments or (LETTERS,), settings, 0, micro_batch_rows=2, **more)


def advanced(state: TrainState, rollouts: Rollouts, mesh: Mesh, micro_batch_rows: int, steps: int = 4) -> Any:
    result = None
    for step in range(steps):
        batch = rollouts.batch(step, mesh.data.rank, mesh.data.size)
        result = train_step(state, batch, toy_schedule(steps)(step), CPU, micro_batch_rows=micro_batch_rows)
    return result


def replies(mesh: Mesh, unequal: bool = False) -> list[Any]:
    """The replies that the mesh samples, token by token, and their rewards. unequal: each rank rewards otherwise."""
    compiler.set_eager(True)
    spread = Environment("spread", ask, lambda item, reply: len(reply) + mesh.rank * unequal)
    rollouts = rollouts_of(rl_state(mesh), SETTINGS, spread, mesh=mesh)
    items = [(spread, ask(f"{number:06}")) for number in range(6)]
    groups = rollouts.ask(items, 3, list(map(str, range(6))))
    return [[[one.ids, one.reward, one.logprobs] for one in group] for group in groups]


def updated(mesh: Mesh, updates: int = 1) -> float:
    """Trains on the mesh and on one process, with other micro-batches → the largest deviation of the state."""
    compiler.set_eager(True)
    small_cuts()
    settings = replace(SETTINGS, updates=updates)
    one, ours = rl_state(alone()), rl_state(mesh)
    advanced(one, rollouts_of(one, settings), alone(), 100)
    advanced(ours, rollouts_of(ours, settings, mesh=mesh), mesh, 2)
    return state_apart(ours, Snapshot.of(one))
