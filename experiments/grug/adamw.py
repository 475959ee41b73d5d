"""AdamW in place of Muon, in the JAX twin: optax's AdamW for every parameter.

Hypothesis: orthogonalised updates learn more per step than elementwise ones.
Source: ../adamw_everywhere.py, whose rates and constants these are; a test compares the updates of the two files.
Expected effect: worse at equal steps; the update takes less time.
Verdict: worse on rung 0 (+0.0805 bits per byte, 5 pairs). Study ladder-jax.
"""

from dataclasses import replace

import jax.numpy as jnp
from optax import GradientTransformationExtraArgs

from quern.grug import optim
from quern.grug.state import Grug
from quern.optim.constants import AdamWGroup, muon_rate
from quern.recipe import OptimRecipe, ResolvedOptim
from quern.recipes.gpt import RECIPE as GPT_RECIPE


def rules(recipe: ResolvedOptim, dtype: jnp.dtype, depth: int) -> dict[str, GradientTransformationExtraArgs]:
    lr, decay = muon_rate(recipe)
    matrices = AdamWGroup(lr * (recipe.width_scale or 1.0), 0.9, 0.95, decay)
    return optim.rules(recipe, dtype, depth) | {"matrices": optim.adamw(matrices, recipe.eps)}


class AdamWEverywhere(Grug):
    rules = rules


RECIPE = replace(
    GPT_RECIPE,
    name="adamw",
    make_model=AdamWEverywhere,
    unused=(*GPT_RECIPE.unused, "optim.muon_beta2", "optim.muon_steps"),
    optim=OptimRecipe(matrix_lr=0.003, matrix_decay=0.1),
)
