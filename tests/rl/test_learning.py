"""Reinforcement learning raises the reward: a random model learns to write a letter."""

from dataclasses import replace

import pytest

from quern.optim.schedule import multipliers
from quern.recipe import OptimRecipe
from quern.train.state import build_model, build_state
from quern.train.step import train_step
from tests.rl.ranks import SETTINGS, rl_recipe, rollouts_of
from tests.support.toy_training import CPU

pytestmark = pytest.mark.usefixtures("eager")
STEPS = 16


def test_the_reward_rises() -> None:
    optim = OptimRecipe(lr_scale=4.0, head_lr=0.016, decay_scale=0.0, width_scale=1.0, matrix_decay=0.0)
    recipe = replace(rl_recipe(), optim=optim)
    state = build_state(recipe, CPU, build_model(recipe, CPU, 0))
    rollouts, found = rollouts_of(state, replace(SETTINGS, groups=8, samples=8)), []
    for step in range(STEPS):
        batch = rollouts.batch(step)
        found.append(rollouts.tally.means()["reward"])
        train_step(state, batch, multipliers(step, STEPS, warmup_steps=0, warmdown_share=0.0), CPU, micro_batch_rows=99)
    assert found[0] < 0.3 and found[-1] > 0.8, found
