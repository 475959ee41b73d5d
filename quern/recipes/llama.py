"""The `llama` recipe: Hugging Face's Llama architecture, every number from `--depth`, Muon for the matrices.

Muon or AdamW for the matrices was tried on the built-in world at depth 4 (vocabulary 2,048, context 256, 250 steps of
2,048 tokens, each at the best rate of a small grid): 0.53 and 0.68 bits per byte. All else is AdamW's; norms do not
decay. In so short a run higher rates than these are better still: they are chosen for thousands of steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quern.field_types import Deferred
from quern.optim.constants import or_one
from quern.recipe import ModelRecipe, OptimRecipe, Recipe, Resolved

if TYPE_CHECKING:
    from quern.optim.groups import GroupRule


def rules(recipe: Resolved) -> dict[str, GroupRule]:
    """group → its rule and peak learning rate. Unresolved scales (None) count as 1."""
    from quern.optim.adamw import AdamW
    from quern.optim.groups import GroupRule
    from quern.optim.muon import Muon

    optim = recipe.optim
    scale, width = or_one(optim.lr_scale), or_one(optim.width_scale)
    decay = optim.matrix_decay * or_one(optim.decay_scale)

    def adamw(lr: float, weight_decay: float) -> GroupRule:
        return GroupRule(AdamW((0.9, 0.95), optim.eps, weight_decay), lr)

    return {
        "matrices": GroupRule(Muon(optim.muon_beta2, decay, optim.muon_steps), optim.matrix_lr * scale),
        "head": adamw(optim.head_lr * scale * width, 0.01),
        "embedding": adamw(optim.embedding_lr * scale * width, 0.001),
        "norms": adamw(optim.residual_lr * scale, 0.0),
    }


RECIPE = Recipe(
    name="llama",
    make_model=Deferred("quern.model.llama:Llama"),
    make_rules=rules,
    make_schedule=Deferred("quern.optim.schedule:warmup_stable_decay"),
    unused=(
        "model.softcap",
        "model.key_offset",
        "model.bigrams",
        "model.bigram_dropout",
        "optim.value_embedding_lr",
        "optim.x0_lr",
        "optim.smear_lr",
        "optim.gate_lr",
        "optim.table_decay_scale",
    ),
    model=ModelRecipe(windows="L", rope_base=10_000.0),
    optim=OptimRecipe(matrix_lr=0.06, head_lr=0.03, embedding_lr=0.03, residual_lr=0.02, batch_exponent=0.5),
)
