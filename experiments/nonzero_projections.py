"""Ablation: the projections into the residual stream do not start at zero.

Hypothesis: with zeros, every block starts as the identity, and early gradients reach the embedding and the head
undisturbed.
Source: modded-nanogpt's walkthrough and nanochat start them at zero. Here they start uniform with 0.4 of the
deviation 1/sqrt(inputs), as the first matrix of the feed-forward does.
Expected effect: slightly worse early, no difference later.
Verdict: undecided on rung 0 (-0.0028 bits per byte, 8 pairs); undecided on rung 1 (+0.0022 bits per byte, 5 pairs);
multiplier × 0.980 [0.957, 1.003], unclear. Study ladder-2. Before: old baseline: undecided on rung 0 (-0.0071 bits per
byte, 3 pairs); undecided on rung 1 (-0.0005 bits per byte, 3 pairs); multiplier × 1.004 [0.937, 1.055], unclear. Study
ladder-offset. Before: old baseline: better, small on rung 0 (-0.0032 bits per byte, 8 pairs); multiplier × 1.019
[1.007, 1.029]. Study ladder.
"""

import math
from dataclasses import replace

from quern.model.gpt import GPT, CausalSelfAttention
from quern.model.layers import Draw, SquaredReluMLP
from quern.recipes.gpt import RECIPE as BASELINE

OWN_INITIAL_VALUES = ("blocks.*.attention.out.weight", "blocks.*.mlp.down.weight")
SHARE = 0.4


class Attention(CausalSelfAttention):
    def init_parameters(self, draw: Draw) -> None:
        super().init_parameters(draw)
        bound = SHARE * math.sqrt(3.0 / self.out.in_features)
        draw.uniform(self.out.weight, -bound, bound)


class MLP(SquaredReluMLP):
    def init_parameters(self, draw: Draw) -> None:
        super().init_parameters(draw)
        bound = SHARE * math.sqrt(3.0 / self.down.in_features)
        draw.uniform(self.down.weight, -bound, bound)


class NonzeroGPT(GPT):
    attention_type, mlp_type = Attention, MLP


RECIPE = replace(BASELINE, name="nonzero_projections", make_model=NonzeroGPT)
