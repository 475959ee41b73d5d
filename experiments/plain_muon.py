"""Ablation: Muon as first published, without any of the later additions.

Hypothesis: row norms, Polar Express, variance reduction and cautious decay together are a clear gain.
Source: Jordan et al. 2024; modded-nanogpt's walkthrough. nanochat's experiment log, 2026-01-10, added the
improvements one by one.
Expected effect: worse.
Verdict: worse on rung 0 (+0.0746 bits per byte, 3 pairs); worse on rung 1 (+0.0080 bits per byte, 3 pairs); multiplier
× 0.929 [0.902, 0.956], grows. Study ladder-2. Before: old baseline: worse on rung 0 (+0.0298 bits per byte, 3 pairs);
multiplier × 0.845 [0.818, 0.873]. Study ladder.
"""

from dataclasses import replace

from quern.optim.groups import GroupRule, table
from quern.optim.muon import PlainMuon
from quern.recipe import Resolved
from quern.recipes.gpt import RECIPE as BASELINE


def rules(recipe: Resolved) -> dict[str, GroupRule]:
    rules = table(recipe)
    return rules | {"matrices": rules["matrices"]._replace(rule=PlainMuon(recipe.optim.muon_steps))}


RECIPE = replace(
    BASELINE,
    name="plain_muon",
    make_rules=rules,
    unused=(*BASELINE.unused, "optim.muon_beta2", "optim.matrix_decay"),
)
