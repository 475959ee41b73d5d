"""The smear's gate reads all channels and has a value for each of them: width² parameters.

Hypothesis: a gate that sees the whole token decides better what to take from the one before.
Source: nanochat's experiment log, 2026-01-16: a tiny improvement that is not worth the parameters. The gate's matrix
is in Muon's group here.
Expected effect: no difference.
Verdict: no difference on rung 0 (+0.0006 bits per byte, 8 pairs); multiplier × 0.984 [0.964, 1.005]. Study ladder-2.
Before: old baseline: no difference on rung 0 (+0.0004 bits per byte, 5 pairs); multiplier × 0.987 [0.977, 0.997]. Study
ladder.
"""

from dataclasses import replace
from typing import ClassVar

from torch import nn

from quern.model.gpt import GPT
from quern.recipe import ResolvedModel
from quern.recipes.gpt import RECIPE as BASELINE


class FullSmearGPT(GPT):
    optimizer_groups: ClassVar = {**GPT.optimizer_groups, "smear_gate": "matrices"}

    def __init__(self, shape: ResolvedModel) -> None:
        super().__init__(shape)
        self.smear_gate = nn.Linear(shape.width, shape.width, bias=False)


RECIPE = replace(BASELINE, name="full_smear", make_model=FullSmearGPT)
