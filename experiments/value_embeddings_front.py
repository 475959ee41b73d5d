"""The first half of the layers has value embeddings.

Hypothesis: early layers are where the identity of tokens matters.
Source: nanochat's experiment log, 2026-01-17: of all layers, alternating, U, front and back, alternating worked
best.
Expected effect: slightly worse than alternating layers.
Verdict: worse on rung 0 (+0.0557 bits per byte, 3 pairs); multiplier × 0.629 [0.600, 0.660]. Study ladder-2. Before:
old baseline: no difference on rung 0 (+0.0007 bits per byte, 5 pairs); multiplier × 0.996 [0.986, 1.005]. Study ladder.
"""

from dataclasses import replace

from quern.model.gpt import GPT
from quern.recipes.gpt import RECIPE as BASELINE


class ValueLayersGPT(GPT):
    def has_value_embedding(self, layer: int) -> bool:
        return layer < self.shape.depth // 2


RECIPE = replace(BASELINE, name="value_embeddings_front", make_model=ValueLayersGPT)
