"""AdamW's groups are updated on every second step, from the mean gradient of both steps; Muon's on every step.

Hypothesis: embeddings, head and scalars tolerate half as many updates, each from a batch twice as large, so that the
skipped updates and their communication are time saved.
Source: modded-nanogpt (github.com/KellerJordan/modded-nanogpt), whose speedruns update the parameters of Adam on every
second step. There the two gradients are summed; under Adam sum and mean are the same up to epsilon. nanochat's
experiment log, 2026-02-03, with rates times sqrt(1/2): 2% faster at depth 12, each step slightly worse, worse in time.
Expected effect: at equal steps, the same loss or slightly worse. AdamW's share of the update's time and of the bytes
between ranks halves.
Verdict: worse on rung 0 (+0.0163 bits per byte, 3 pairs); multiplier × 0.872 [0.826, 0.923]. Study ladder-2. Before:
old baseline: worse on rung 0 (+0.0162 bits per byte, 3 pairs); multiplier × 0.912 [0.892, 0.933]. Study ladder.
"""

from __future__ import annotations

from dataclasses import replace

from quern.optim.groups import GroupRule, table
from quern.recipe import Resolved
from quern.recipes.gpt import RECIPE as BASELINE


def rules(recipe: Resolved) -> dict[str, GroupRule]:
    """The baseline's rules, those of AdamW on every second step."""
    return {name: rule if rule.rule.stacked else rule._replace(every=2) for name, rule in table(recipe).items()}


RECIPE = replace(BASELINE, name="adamw_every_second", make_rules=rules)
