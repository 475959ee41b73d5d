"""Ablation: normed queries and keys are not scaled up by 1.2.

Hypothesis: sharper attention helps, so the factor of 1 is worse.
Source: nanochat's later default of 1.2 on queries and on keys. modded-nanogpt has a fixed scale of 0.12 on products
of heads of 128 in place of 0.088, which is a factor of 1.36; 1.2² is 1.44.
Expected effect: slightly worse.
Verdict: worse on rung 0 (+0.0059 bits per byte, 5 pairs); multiplier × 0.951 [0.928, 0.976]. Study ladder-2. Before:
old baseline: no difference on rung 0 (-0.0000 bits per byte, 5 pairs); multiplier × 1.000 [0.988, 1.013]. Study ladder.
"""

from dataclasses import replace

from quern.model.gpt import GPT, CausalSelfAttention
from quern.recipes.gpt import RECIPE as BASELINE


class PlainScaleAttention(CausalSelfAttention):
    qk_scale = 1.0


class PlainScaleGPT(GPT):
    attention_type = PlainScaleAttention


RECIPE = replace(BASELINE, name="qk_scale_1", make_model=PlainScaleGPT)
