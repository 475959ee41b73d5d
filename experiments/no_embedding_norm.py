"""Ablation: no norm directly after the embedding.

Hypothesis: the norm gives every token the same length, so that rare tokens with small rows are heard.
Source: modded-nanogpt's walkthrough and nanochat norm the embedding; their logs do not measure it alone.
Expected effect: slightly worse.
Verdict: worse on rung 0 (+0.0080 bits per byte, 5 pairs); multiplier × 0.935 [0.903, 0.967]. Study ladder-2. Before:
old baseline: worse on rung 0 (+0.0080 bits per byte, 5 pairs); multiplier × 0.956 [0.942, 0.969]. Study ladder.
"""

from dataclasses import replace

import torch
from torch import Tensor

from quern.model.context import Context
from quern.model.gpt import GPT
from quern.recipes.gpt import RECIPE as BASELINE


class UnnormedEmbeddingGPT(GPT):
    def enter(self, tokens_BT: Tensor, context: Context) -> Tensor:
        x_BTD = self.embedding(tokens_BT)
        gate_BT1 = torch.sigmoid(self.smear_gate(x_BTD[..., : self.smear_gate.in_features]))
        return x_BTD + self.smear_scale * gate_BT1 * context.previous(x_BTD, "embedding")


RECIPE = replace(BASELINE, name="no_embedding_norm", make_model=UnnormedEmbeddingGPT)
