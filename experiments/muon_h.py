"""MuonH: Muon on the sphere; every matrix keeps its initial norm, without weight decay.

Hypothesis: a fixed norm makes the relative size of a step exact, so that no decay is needed.
Source: the post on Hyperball. nanochat's experiment log, 2026-01-29: worse at depth 12, also over rates from 2.5e-3
to 1e-2. As there, the projections do not start at zero. The rate is the middle of the log's; the log's sweep is
`quern lab sweep experiments/muon_h.py --space experiments/studies/muon_h.toml`.
Expected effect: worse.
Verdict: worse on rung 0 (+0.2222 bits per byte, 3 pairs); multiplier × 0.170 [0.159, 0.185]. Study ladder-2. Before:
old baseline: worse on rung 0 (+0.0907 bits per byte, 3 pairs); multiplier × 0.604 [0.589, 0.619]. Study ladder.
"""

from dataclasses import replace

from quern.model.gpt import GPT, CausalSelfAttention
from quern.model.layers import Draw, SquaredReluMLP
from quern.optim.groups import GroupRule, table
from quern.optim.muon import MuonH
from quern.recipe import OptimRecipe, Resolved
from quern.recipes.gpt import RECIPE as BASELINE

OWN_INITIAL_VALUES = ("blocks.*.attention.out.weight", "blocks.*.mlp.down.weight")


class Attention(CausalSelfAttention):
    def init_parameters(self, draw: Draw) -> None:
        super().init_parameters(draw)
        draw.normal(self.out.weight, 0.4 * self.out.in_features**-0.5)


class MLP(SquaredReluMLP):
    def init_parameters(self, draw: Draw) -> None:
        super().init_parameters(draw)
        draw.normal(self.down.weight, 0.4 * self.down.in_features**-0.5)


class NonzeroGPT(GPT):
    attention_type, mlp_type = Attention, MLP


def rules(recipe: Resolved) -> dict[str, GroupRule]:
    rules = table(recipe)
    return rules | {"matrices": rules["matrices"]._replace(rule=MuonH(recipe.optim.muon_steps))}


RECIPE = replace(
    BASELINE,
    name="muon_h",
    make_model=NonzeroGPT,
    make_rules=rules,
    optim=OptimRecipe(matrix_lr=0.005),
    unused=(*BASELINE.unused, "optim.muon_beta2", "optim.matrix_decay"),
)
