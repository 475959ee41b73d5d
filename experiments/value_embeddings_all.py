"""Every layer has a value embedding.

Hypothesis: more of what helps helps more.
Source: nanochat's experiment log, 2026-01-17: of all layers, alternating, U, front and back, alternating worked
best.
Expected effect: slightly worse than alternating layers.
Verdict: better on rung 0 (-0.0077 bits per byte, 5 pairs); undecided on rung 1 (+0.0016 bits per byte, 3 pairs);
multiplier × 0.985 [0.958, 1.015], fades. Study ladder-2. Before: old baseline: undecided on rung 0 (-0.0084 bits per
byte, 3 pairs); multiplier × 1.070 [1.009, 1.142]. Study ladder-offset. Before: old baseline: better on rung 0 (-0.0101
bits per byte, 3 pairs); undecided on rung 1 (+0.0102 bits per byte, 3 pairs); multiplier × 0.937 [0.860, 1.021], fades.
Study ladder.
"""

from dataclasses import replace

from quern.model.gpt import GPT
from quern.recipes.gpt import RECIPE as BASELINE


class ValueLayersGPT(GPT):
    def has_value_embedding(self, layer: int) -> bool:
        return True


RECIPE = replace(BASELINE, name="value_embeddings_all", make_model=ValueLayersGPT)
