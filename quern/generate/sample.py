"""Picking the next token of every row of a batch.

One uniform number in [0, 1) per row and step decides, by inverting the cumulative distribution. The numbers
come from a counter-based generator keyed by (seed, prompt, sample), never by a row's place in the batch,
so a row draws the same tokens alone as among any batch mates, and two samples of one prompt differ.

The order of the filters is temperature, then top-k, then top-p (nucleus sampling: Holtzman et al., 2020,
https://arxiv.org/abs/1904.09751).
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How to pick: temperature 0 is greedy, top_k 0 and top_p 1 switch their filters off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and 0 <= self.temperature <= 100):
            raise ValueError(f"temperature must lie between 0 (greedy) and 100, not {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or a positive count of tokens, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1 (off), not {self.top_p}")


def uniforms(seed: int, prompt: Sequence[int], sample: int, count: int) -> np.ndarray:
    """The row's own numbers in [0, 1), float32 (count,); number i decides token i of the completion."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{seed} {sample} ".encode())
    digest.update(np.asarray(prompt, dtype=np.int64).tobytes())
    key = int.from_bytes(digest.digest(), "little")
    return np.random.Generator(np.random.Philox(key=key)).random(count, dtype=np.float32)


def sample(logits_BV: Tensor, sampling: Sampling, uniform_B: Tensor) -> Tensor:
    """Token ids (B,), int64, picked from fp32 logits (B, V) by the numbers `uniform_B` in [0, 1)."""
    if sampling.temperature == 0:
        return logits_BV.argmax(-1)
    vocabulary = logits_BV.shape[-1]
    candidates_BN: Tensor | None = None
    if 0 < sampling.top_k < vocabulary:
        logits_BV, candidates_BN = logits_BV.topk(sampling.top_k, dim=-1)
    elif sampling.top_p < 1:
        logits_BV, candidates_BN = logits_BV.sort(dim=-1, descending=True)
    # The largest logit goes to zero first: a tiny temperature then cannot overflow.
    shifted = logits_BV - logits_BV.amax(-1, keepdim=True)
    weights = (shifted / sampling.temperature).exp()
    cumulative = weights.cumsum(-1)
    if sampling.top_p < 1:
        # A candidate stays while those before it hold less than top_p: the first always does.
        before = cumulative - weights
        weights = weights.masked_fill(before >= sampling.top_p * cumulative[:, -1:], 0)
        cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    # Rounding must not lift the threshold to the total, beyond the last candidate of weight above zero.
    threshold = torch.minimum(uniform_B[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    index_B1 = torch.searchsorted(cumulative, threshold, right=True)
    return (index_B1 if candidates_BN is None else candidates_BN.gather(-1, index_B1)).squeeze(-1)
