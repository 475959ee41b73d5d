"""The speedrun recipe: the `unet` architecture with the data order, rates and schedule of modded-nanogpt (May 2025).

At its size (12 layers, 768 wide, 8 streams of 48k tokens; runs/speedrun.sh) the rates are the source's own; at another
batch or width they are scaled as those of `gpt` are. Its AdamW has no decay, its Muon nothing that came later.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from quern.field_types import Deferred
from quern.optim.constants import or_one
from quern.optim.schedule import Multipliers, warmup_stable_decay
from quern.recipe import ModelRecipe, OptimRecipe, Recipe, Resolved, ResolvedTrain, TrainRecipe
from quern.resolve import REFERENCE_BATCH_TOKENS

if TYPE_CHECKING:
    from quern.optim.groups import GroupRule

SOURCE_GPU_TOKENS = 48 * 1024
SOURCE_BATCH_TOKENS = 8 * SOURCE_GPU_TOKENS
# Recipes give their rates at the reference batch; this is what the square-root rule takes off again at the source's.
AT_REFERENCE = math.sqrt(REFERENCE_BATCH_TOKENS / SOURCE_BATCH_TOKENS)
MOMENTUM_WARMUP_STEPS = 300
MOMENTUM_WARMUP_SHARE = 300 / 1770
"""The share of the source's run that these steps are; a shorter run warms up for the same share."""


def rules(recipe: Resolved) -> dict[str, GroupRule]:
    """Group → its rule and peak learning rate. Unresolved scales (None) count as 1."""
    from quern.optim.adamw import AdamW
    from quern.optim.groups import GroupRule
    from quern.optim.muon import PlainMuon

    optim = recipe.optim
    scale, width = or_one(optim.lr_scale), or_one(optim.width_scale)
    adam = AdamW((0.8, 0.95), optim.eps, 0.0)
    return {
        "matrices": GroupRule(PlainMuon(optim.muon_steps), optim.matrix_lr * scale),
        "head": GroupRule(adam, optim.head_lr * scale * width),
        "embedding": GroupRule(adam, optim.embedding_lr * scale * width),
        "value_embeddings": GroupRule(adam, optim.value_embedding_lr * scale * width),
        "scales": GroupRule(adam, optim.residual_lr * scale),
    }


def schedule(train: ResolvedTrain) -> Callable[[float], Multipliers]:
    """Rates flat, then linear down; momentum from 0.85 up to 0.95 and there to the end; windows grow all along."""
    told, momentum_steps = warmup_stable_decay(train), min(MOMENTUM_WARMUP_STEPS, MOMENTUM_WARMUP_SHARE * train.steps)
    return lambda step: told(step)._replace(momentum=0.85 + 0.10 * min(1.0, step / momentum_steps), decay=0.0)


RECIPE = Recipe(
    name="unet",
    make_model=Deferred("quern.model.unet:UNet"),
    make_rules=rules,
    make_schedule=schedule,
    unused=(
        "model.mlp_width",
        "model.norm_eps",
        "model.dropout",
        "model.key_offset",
        "model.bigrams",
        "model.bigram_dropout",
        "optim.x0_lr",
        "optim.smear_lr",
        "optim.gate_lr",
        "optim.matrix_decay",
        "optim.decay_scale",
        "optim.table_decay_scale",
        "optim.muon_beta2",
    ),
    model=ModelRecipe(context=2048, windows="LSSSLSSLSSSL", rope_base=1024.0),
    optim=OptimRecipe(
        matrix_lr=0.05 * AT_REFERENCE,
        head_lr=0.22 * AT_REFERENCE,
        embedding_lr=0.6 * AT_REFERENCE,
        value_embedding_lr=0.6 * AT_REFERENCE,
        residual_lr=0.04 * AT_REFERENCE,
        batch_exponent=0.5,
        # The source sums the loss over the tokens of a GPU and averages the GPUs, so its gradients, to which it adds
        # 1e-10, are as many times those of our mean.
        eps=1e-10 / SOURCE_GPU_TOKENS,
    ),
    train=TrainRecipe(packing="stream", warmup_steps=0, warmdown_share=0.4, final_lr=0.1),
)
