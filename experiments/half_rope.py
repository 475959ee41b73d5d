"""Half of each head's pairs do not rotate.

Hypothesis: channels without a position match contents at any distance.
Source: modded-nanogpt's walkthrough (half-truncated RoPE with base 1,024). nanochat's experiment log, 2026-01-16: no
improvement.
Expected effect: no difference.
Verdict: no difference on rung 0 (+0.0009 bits per byte, 8 pairs); multiplier × 0.995 [0.985, 1.006]. Study ladder.
"""

from dataclasses import replace

from torch import Tensor

from quern.model.gpt import GPT
from quern.model.unet import half_rotary_table
from quern.recipes.gpt import RECIPE as BASELINE


class HalfRopeGPT(GPT):
    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return half_rotary_table(positions, self.head_dim, base=1024.0)


RECIPE = replace(BASELINE, name="half_rope", make_model=HalfRopeGPT, unused=(*BASELINE.unused, "model.rope_base"))
