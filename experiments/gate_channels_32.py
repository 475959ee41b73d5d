"""The gate of value embeddings reads 32 channels, and its range is 2.

Hypothesis: a gate that sees more decides better.
Source: nanochat's experiment log, 2026-01-17, when the gate came with 32 channels and a range of 2; nanochat's later
default is 12 and 3.
Expected effect: no difference.
Verdict: no difference on rung 0 (-0.0005 bits per byte, 8 pairs); multiplier × 1.004 [0.985, 1.024]. Study ladder-2.
Before: old baseline: no difference on rung 0 (+0.0007 bits per byte, 5 pairs); multiplier × 0.996 [0.985, 1.007]. Study
ladder.

The width must be at least 32.
"""

from dataclasses import replace

from quern.model.gpt import GPT, CausalSelfAttention
from quern.recipes.gpt import RECIPE as BASELINE


class WideGateAttention(CausalSelfAttention):
    gate_channels = 32
    gate_range = 2.0


class WideGateGPT(GPT):
    attention_type = WideGateAttention


RECIPE = replace(BASELINE, name="gate_channels_32", make_model=WideGateGPT)
