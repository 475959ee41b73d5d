"""Every element of the gradients is clipped.

Hypothesis: clipping elements guards against outliers that a global norm hides.
Source: nanochat's experiment log, 2026-01-08: no benefit at any bound, since the gradient's norm stays below 1. The log
names bounds for norms only, 0.25 to 2; here the smallest of them bounds each element.
Expected effect: no difference.
Changed: 2026-11-25T20:00, the bound was 0.001, which no source names.
Verdict: worse on rung 0 (+0.0100 bits per byte, 5 pairs); multiplier × 0.919 [0.894, 0.947]. Study ladder-2. Before:
old baseline: worse, small on rung 0 (+0.0038 bits per byte, 8 pairs); multiplier × 0.979 [0.970, 0.989]. Study ladder.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from quern.optim.adamw import AdamW
from quern.optim.groups import GroupRule, table
from quern.optim.muon import Muon
from quern.recipe import Resolved
from quern.recipes.gpt import RECIPE as BASELINE

LIMIT = 0.25


class ClippedMuon(Muon):
    def update_(self, master: Tensor, grad: Tensor, *rest: Any, **options: Any) -> None:
        super().update_(master, grad.clamp(-LIMIT, LIMIT), *rest, **options)


class ClippedAdamW(AdamW):
    def update_(self, master: Tensor, grad: Tensor, *rest: Any, **options: Any) -> None:
        super().update_(master, grad.clamp(-LIMIT, LIMIT), *rest, **options)


def rules(recipe: Resolved) -> dict[str, GroupRule]:
    kinds = {Muon: ClippedMuon, AdamW: ClippedAdamW}
    return {
        name: group._replace(rule=kinds[type(group.rule)](**vars(group.rule))) for name, group in table(recipe).items()
    }


RECIPE = replace(BASELINE, name="elementwise_clip", make_rules=rules)
