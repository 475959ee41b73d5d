"""Documents that share a row do not see each other.

Hypothesis: attention across documents is noise.
Source: nanochat's experiment log, 2026-01-13 (varlen attention): 0.0002 bits per byte better, which is almost noise.
modded-nanogpt masks documents.
Expected effect: no difference.
Verdict: no difference on rung 0 (-0.0000 bits per byte, 8 pairs); multiplier × 1.001 [0.984, 1.021]. Study ladder-2.
Before: old baseline: no difference on rung 0 (-0.0002 bits per byte, 5 pairs); multiplier × 1.002 [0.993, 1.012]. Study
ladder.
"""

from dataclasses import replace

import torch
from torch import Tensor

from quern.model.context import CausalContext
from quern.model.gpt import GPT
from quern.recipes.gpt import RECIPE as BASELINE


class DocumentsGPT(GPT):
    def context(self, tokens_BT: Tensor, progress: float = 1.0) -> CausalContext:
        if self.shape.bos is None:
            raise ValueError("documents are told apart by their BOS: set model.bos to the tokenizer's")
        return CausalContext((tokens_BT == self.shape.bos).cumsum(1, dtype=torch.int32), progress=progress)


RECIPE = replace(BASELINE, name="document_mask", make_model=DocumentsGPT)
