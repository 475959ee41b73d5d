"""Constants of the update rules that PyTorch and JAX share: Muon's polynomials and the `gpt` table of AdamW groups.

Plain numbers: this file imports neither library. The methods and their sources are in muon.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from quern.recipe import SMALL_DEPTH, ResolvedOptim

TINY = 1e-30
"""Prevents 0/0 in all-zero matrices. Far below any norm that occurs, so the update ignores the loss's scale."""

# Odd quintics p(x) = a·x + b·x³ + c·x⁵, one per step: each is the best approximation of the sign function on
# the interval that the previous one leaves. Amsel et al. 2025 (arXiv 2505.16932), computed for 5 steps with
# safety factor 2e-2 (rounding may push a singular value above 1) and cushion 2 (intervals widened so that
# small values don't stall).
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
# The limit of that sequence: the quintic with p(1) = 1 and p'(1) = p''(1) = 0, which converges to 1 with order 3.
CONVERGENT = (1.875, -1.25, 0.375)
POLAR_MARGIN = 1.02
"""The iteration starts at a Frobenius norm of 1 / POLAR_MARGIN."""
# One quintic for all steps, with the steepest slope at 0 for which singular values stay in a band around 1
# (it does not converge to 1). Jordan et al. 2024.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
ROW_FLOOR = 1e-6
"""Rows below this share of the norms' root mean square are divided by that share, so they stay shorter than 1."""
MOST_DECAY = 0.1
"""Share of the head and the value embeddings that decays in one step, at most; runs of a few steps reach it."""
BIGRAM_DECAY = 4
"""The decay of the bigrams' rows, in that of the value embeddings (experiments/bigram_decay.py)."""
VARIANCE_EPS = 1e-10
"""The constant added to the second moment of Muon's variance reduction."""


def polar_coefficients(steps: int) -> list[tuple[float, float, float]]:
    """(a, b, c) of each step of polar_express."""
    return [POLAR_EXPRESS[i] if i < len(POLAR_EXPRESS) else CONVERGENT for i in range(steps)]


@dataclass(frozen=True)
class AdamWGroup:
    """Peak learning rate and constants of a group that AdamW updates."""

    lr: float
    beta1: float
    beta2: float
    weight_decay: float


def adamw_groups(recipe: ResolvedOptim, depth: int) -> dict[str, AdamWGroup]:
    """The AdamW groups of the `gpt` architecture by name. Scales that are not resolved (None) count as 1.

    The values are those that nanochat tuned on small models, at width 768 and a batch of 2^19 tokens. The scale of the
    head's rate is theirs; below depth 8 it is the root of the other rates' scale, which measured too low there. The
    decay of the head and of the value embeddings follows `resolve.table_decay_rule`, that of the bigrams is
    BIGRAM_DECAY times as large. The embedding's scale has no effect, since a norm follows it.
    """
    scale, width, decay = or_one(recipe.lr_scale), or_one(recipe.width_scale), or_one(recipe.table_decay_scale)

    head_scale = math.sqrt(scale) if depth < SMALL_DEPTH else scale

    def table(lr: float, beta2: float, share: float = 0.01) -> AdamWGroup:
        return AdamWGroup(lr, 0.8, beta2, min(share * decay, MOST_DECAY / max(lr, TINY)))

    return {
        "head": table(recipe.head_lr * head_scale * width, 0.96),
        "embedding": AdamWGroup(recipe.embedding_lr * scale * width, 0.8, 0.995, 0.001),
        "value_embeddings": table(recipe.value_embedding_lr * scale * width, 0.995),
        "bigrams": table(recipe.value_embedding_lr * scale * width, 0.995, 0.01 * BIGRAM_DECAY),
        "residual_scales": AdamWGroup(recipe.residual_lr * scale, 0.8, 0.95, 0.05),
        "x0_scales": AdamWGroup(recipe.x0_lr * scale, 0.96, 0.95, 0.0),
        "gates": AdamWGroup(recipe.gate_lr * scale, 0.8, 0.95, 0.0),
        # nanochat's is unscaled; at batches of some thousand tokens its loss then spikes, and scaled it measured 0.003
        # and 0.019 bits per byte better over two seeds
        "smear": AdamWGroup(recipe.smear_lr * scale, 0.8, 0.95, 0.0),
    }


def muon_rate(recipe: ResolvedOptim) -> tuple[float, float]:
    """(peak learning rate, weight decay) of the hidden matrices. Scales that are not resolved (None) count as 1."""
    return recipe.matrix_lr * or_one(recipe.lr_scale), recipe.matrix_decay * or_one(recipe.decay_scale)


def or_one(scale: float | None) -> float:
    """The scale; 1 for one that is not resolved."""
    return 1.0 if scale is None else scale
