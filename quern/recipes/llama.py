"""The `llama` recipe: Hugging Face's Llama architecture, every number from `--depth`, Muon for the matrices.

Muon and AdamW were compared on the built-in world at depth 4; the matrices learn far faster under Muon. Everything
else is AdamW's, norms without decay.
"""

from __future__ import annotations

from quern.model.llama import Llama
from quern.optim.adamw import AdamW
from quern.optim.groups import Rule
from quern.optim.muon import Muon
from quern.optim.schedule import warmup_stable_decay
from quern.recipe import ModelRecipe, OptimRecipe, Recipe


def rules(recipe: OptimRecipe) -> dict[str, tuple[Rule, float]]:
    """group → (rule, peak learning rate). Unresolved scales (None) count as 1."""
    scale = 1.0 if recipe.lr_scale is None else recipe.lr_scale
    width = 1.0 if recipe.width_scale is None else recipe.width_scale
    decay = recipe.matrix_decay * (1.0 if recipe.decay_scale is None else recipe.decay_scale)

    def adamw(weight_decay: float) -> AdamW:
        return AdamW((0.9, 0.95), recipe.eps, weight_decay)

    return {
        "matrices": (Muon(recipe.muon_beta2, decay, recipe.muon_steps), recipe.matrix_lr * scale),
        "head": (adamw(0.01), recipe.head_lr * scale * width),
        "embedding": (adamw(0.001), recipe.embedding_lr * scale * width),
        "norms": (adamw(0.0), recipe.residual_lr * scale),
    }


RECIPE = Recipe(
    name="llama",
    make_model=Llama,
    make_rules=rules,
    make_schedule=warmup_stable_decay,
    model=ModelRecipe(windows="L", rope_base=10_000.0),
    optim=OptimRecipe(matrix_lr=0.04, head_lr=0.01, embedding_lr=0.01, residual_lr=0.01),
)
