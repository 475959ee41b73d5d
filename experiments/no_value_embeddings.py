"""Ablation: no value embeddings.

Hypothesis: value embeddings add capacity at almost no cost, so a model without them is worse at equal steps and at
equal time.
Source: nanochat's experiment log, 2026-01-17: the models love value embeddings, and every attempt to make them
smaller failed.
Expected effect: clearly worse at equal steps and FLOPs; many parameters fewer.
Verdict: worse on rung 0 (+0.0450 bits per byte, 3 pairs); multiplier × 0.777 [0.755, 0.799]. Study ladder.
"""

from dataclasses import replace

from quern.model.gpt import GPT
from quern.recipes.gpt import RECIPE as BASELINE


class PlainValuesGPT(GPT):
    def has_value_embedding(self, layer: int) -> bool:
        return False


RECIPE = replace(
    BASELINE,
    name="no_value_embeddings",
    make_model=PlainValuesGPT,
    unused=(*BASELINE.unused, "optim.value_embedding_lr", "optim.gate_lr"),
)
