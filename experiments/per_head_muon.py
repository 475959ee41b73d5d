"""Muon orthogonalises the updates of queries, keys and values head by head.

Hypothesis: heads are independent, so their updates should not be orthogonal to one another by force.
Source: Kimi K3. nanochat's experiment log, 2026-08-02: neutral from depth 12 to 16, and 1.3% more compute at depth
20 to 24.
Expected effect: no difference.
Verdict: better on rung 0 (-0.0078 bits per byte, 5 pairs); undecided on rung 1 (-0.0044 bits per byte, 3 pairs);
undecided on rung 2 (-0.0033 bits per byte, 3 pairs); multiplier × 1.070 [1.044, 1.098], unclear. Study ladder-2.
Before: old baseline: undecided on rung 0 (-0.0051 bits per byte, 5 pairs); undecided on rung 1 (-0.0055 bits per byte,
3 pairs); multiplier × 1.070 [1.025, 1.113], unclear. Study ladder-offset. Before: old baseline: better on rung 0
(-0.0086 bits per byte, 5 pairs); undecided on rung 1 (-0.0212 bits per byte, 3 pairs); undecided on rung 2 (-0.0013
bits per byte, 3 pairs); multiplier × 1.044 [1.020, 1.071], unclear. Study ladder.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from quern.model.gpt import GPT, CausalSelfAttention
from quern.optim.groups import GroupRule, table
from quern.optim.muon import Orthogonalize, polar_express
from quern.recipe import Resolved
from quern.recipes.gpt import RECIPE as BASELINE


class Attention(CausalSelfAttention):
    optimizer_groups: ClassVar = {
        **CausalSelfAttention.optimizer_groups,
        "query": "heads",
        "key": "heads",
        "value": "heads",
    }


class PerHeadGPT(GPT):
    group_kinds: ClassVar[Mapping[str, str]] = {**GPT.group_kinds, "heads": "matrices"}
    attention_type = Attention


def by_head(head_dim: int) -> Orthogonalize:
    def orthogonalize(x_NRC: Tensor, steps: int) -> Tensor:
        return polar_express(x_NRC.reshape(-1, head_dim, x_NRC.size(-1)), steps).view_as(x_NRC)

    return orthogonalize


def rules(recipe: Resolved) -> dict[str, GroupRule]:
    rules, head_dim = table(recipe), recipe.model.head_dim
    assert head_dim
    matrices = rules["matrices"]
    return rules | {"heads": matrices._replace(rule=replace(matrices.rule, orthogonalize=by_head(head_dim)))}


RECIPE = replace(BASELINE, name="per_head_muon", make_model=PerHeadGPT, make_rules=rules)
