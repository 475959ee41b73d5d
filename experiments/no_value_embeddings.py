"""Ablation: no value embeddings.

Hypothesis: value embeddings add capacity at almost no cost, so a model without them is worse at equal steps and at
equal time.
Source: nanochat's experiment log, 2026-01-17: the models love value embeddings, and every attempt to make them
smaller failed.
Expected effect: clearly worse at equal steps and FLOPs; many parameters fewer.
Verdict: worse on rung 0 (+0.0826 bits per byte, 3 pairs); worse on rung 1 (+0.0584 bits per byte, 3 pairs); worse on
rung 2 (+0.0420 bits per byte, 3 pairs); multiplier × 0.656 [0.638, 0.674], grows. Study ladder-2. Before: old baseline:
worse on rung 0 (+0.1111 bits per byte, 3 pairs); multiplier × 0.417 [0.385, 0.449]. Study ladder-offset. Before: old
baseline: worse on rung 0 (+0.0451 bits per byte, 3 pairs); worse on rung 1 (+0.0978 bits per byte, 3 pairs); multiplier
× 0.544 [0.496, 0.595], fades. Study ladder.
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
