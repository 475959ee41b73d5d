"""Muon with the fixed quintic of Newton-Schulz in place of Polar Express.

Hypothesis: better polynomials bring singular values closer to 1 in as many steps, and that helps.
Source: Jordan et al. 2024; modded-nanogpt's walkthrough. nanochat's experiment log, 2026-01-10: the change to Polar
Express was in the noise.
Expected effect: no difference.
Verdict: undecided on rung 0 (+0.0020 bits per byte, 8 pairs); multiplier × 0.983 [0.964, 1.002]. Study ladder-2.
Before: old baseline: worse, small on rung 0 (+0.0021 bits per byte, 8 pairs); multiplier × 0.988 [0.982, 0.994]. Study
ladder.
"""

from dataclasses import replace

from quern.optim.groups import GroupRule, table
from quern.optim.muon import newton_schulz
from quern.recipe import Resolved
from quern.recipes.gpt import RECIPE as BASELINE


def rules(recipe: Resolved) -> dict[str, GroupRule]:
    rules = table(recipe)
    matrices = rules["matrices"]
    return rules | {"matrices": matrices._replace(rule=replace(matrices.rule, orthogonalize=newton_schulz))}


RECIPE = replace(BASELINE, name="newton_schulz", make_rules=rules)
