"""The last half of the layers has value embeddings.

Hypothesis: late layers have lost the identity of tokens and want it back.
Source: nanochat's experiment log, 2026-01-17: of all layers, alternating, U, front and back, alternating worked
best.
Expected effect: slightly worse than alternating layers.
Verdict: undecided on rung 0 (-0.0030 bits per byte, 8 pairs); multiplier × 1.026 [1.001, 1.051]. Study ladder-2.
Before: old baseline: no difference on rung 0 (+0.0012 bits per byte, 8 pairs); multiplier × 0.993 [0.979, 1.008]. Study
ladder.
"""

from dataclasses import replace

from quern.model.gpt import GPT
from quern.recipes.gpt import RECIPE as BASELINE


class ValueLayersGPT(GPT):
    def has_value_embedding(self, layer: int) -> bool:
        return layer >= self.shape.depth // 2


RECIPE = replace(BASELINE, name="value_embeddings_back", make_model=ValueLayersGPT)
