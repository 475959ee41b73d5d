"""The `llama` recipe with AdamW for every parameter, one rate, and gradients clipped to a norm of 1.

That is how most Llamas are trained. At width 768 and 16,384 tokens in a batch the rate is 3e-4, as in the usual
from-scratch trainers; from there it follows batch and width, and the decay batch and horizon, like those of `llama`.
Betas and decay are GPT-3's (Brown et al. 2020, arXiv 2005.14165); norms do not decay. `--optim.matrix-lr` is the rate
of all parameters here. The same seam (`make_rules`) of `gpt`: experiments/adamw_everywhere.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from quern.optim.constants import or_one
from quern.recipe import OptimRecipe, Resolved
from quern.recipes import llama

if TYPE_CHECKING:
    from quern.optim.groups import GroupRule


def rules(recipe: Resolved) -> dict[str, GroupRule]:
    """group → its rule and peak learning rate. Unresolved scales (None) count as 1."""
    from quern.optim.adamw import AdamW
    from quern.optim.groups import GroupRule

    optim = recipe.optim
    lr = optim.matrix_lr * or_one(optim.lr_scale) * or_one(optim.width_scale)
    decay = optim.matrix_decay * or_one(optim.decay_scale)

    def adamw(weight_decay: float) -> GroupRule:
        return GroupRule(AdamW((0.9, 0.95), optim.eps, weight_decay), lr)

    return {name: adamw(decay) for name in ("matrices", "head", "embedding")} | {"norms": adamw(0.0)}


ONE_RATE = ("optim.head_lr", "optim.embedding_lr", "optim.residual_lr", "optim.muon_beta2", "optim.muon_steps")
RECIPE = replace(
    llama.RECIPE,
    name="llama_adamw",
    make_rules=rules,
    unused=(*llama.RECIPE.unused, *ONE_RATE),
    optim=OptimRecipe(matrix_lr=3e-4 * math.sqrt(2**19 / 2**14), matrix_decay=0.1, batch_exponent=0.5, eps=1e-8),
    train=replace(llama.RECIPE.train, clip_norm=1.0),
)
