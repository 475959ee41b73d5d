"""Ablation: AdamW in place of Muon.

Hypothesis: orthogonalised updates learn more per step than elementwise ones.
Source: modded-nanogpt's walkthrough: no strong theory, but the records. Rate, betas and decay here are those usual
for AdamW (GPT-3, arXiv 2005.14165), scaled with batch and width as the other groups are.
Expected effect: clearly worse at equal steps; the update takes less time.
Verdict: worse on rung 0 (+0.0894 bits per byte, 3 pairs); worse on rung 1 (+0.0488 bits per byte, 3 pairs); multiplier
× 0.693 [0.672, 0.714], grows. Study ladder-2. Before: old baseline: worse on rung 0 (+0.1019 bits per byte, 3 pairs);
multiplier × 0.469 [0.435, 0.504]. Study ladder-offset. Before: old baseline: worse on rung 0 (+0.0447 bits per byte, 5
pairs); multiplier × 0.816 [0.802, 0.829]. Study ladder.
"""

from dataclasses import replace

from quern.optim.adamw import AdamW
from quern.optim.constants import muon_rate
from quern.optim.groups import GroupRule, table
from quern.recipe import OptimRecipe, Resolved
from quern.recipes.gpt import RECIPE as BASELINE


def rules(recipe: Resolved) -> dict[str, GroupRule]:
    lr, decay = muon_rate(recipe.optim)
    width = recipe.optim.width_scale or 1.0
    rule = AdamW((0.9, 0.95), recipe.optim.eps, decay)
    return table(recipe) | {"matrices": GroupRule(rule, lr * width)}


RECIPE = replace(
    BASELINE,
    name="adamw_everywhere",
    make_rules=rules,
    unused=(*BASELINE.unused, "optim.muon_beta2", "optim.muon_steps"),
    optim=OptimRecipe(matrix_lr=0.003, matrix_decay=0.1),
)
