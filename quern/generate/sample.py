"""Picking the next token of every row of a batch.

One uniform number per row, step and token decides, by the exponential race: with E = -log(u), the largest
weight / E is a draw by weight (the Gumbel-max trick without its logarithms; Maddison et al., 2014,
https://arxiv.org/abs/1411.0030). The numbers come from a generator of the row's own, seeded by (seed, prompt,
sample) and never by a row's place in the batch, so a row draws the same tokens alone as among any batch
mates, and two samples of one prompt differ. Inverting the cumulative distribution would need one number only,
but every rounding of a logit moves thousands of its boundaries; here it matters only where the two best are
within that rounding.

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


def generator(seed: int, prompt: Sequence[int], sample: int) -> np.random.Generator:
    """The row's own source of numbers."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{seed} {sample} ".encode())
    digest.update(np.asarray(prompt, dtype=np.int64).tobytes())
    return np.random.Generator(np.random.SFC64(int.from_bytes(digest.digest(), "little")))


def draw(generators: Sequence[np.random.Generator], vocabulary: int) -> Tensor:
    """The next step's numbers in [0, 1), fp32 (B, V), row b from generator b."""
    uniform_BV = np.empty((len(generators), vocabulary), dtype=np.float32)
    for row, own in zip(uniform_BV, generators, strict=True):
        own.random(out=row, dtype=np.float32)
    return torch.from_numpy(uniform_BV)


def sample(logits_BV: Tensor, sampling: Sampling, uniform_BV: Tensor | None = None) -> Tensor:
    """Token ids (B,), int64, picked from fp32 logits (B, V) by numbers in [0, 1); greedy needs none."""
    if sampling.temperature == 0:
        return _argmax(logits_BV)
    if uniform_BV is None:
        raise ValueError("sampling at a temperature above 0 needs the rows' numbers: pass draw(generators, V)")
    candidates_BN: Tensor | None = None
    if 0 < sampling.top_k < logits_BV.shape[-1]:
        logits_BV, candidates_BN = logits_BV.topk(sampling.top_k, dim=-1)
    elif sampling.top_p < 1:
        logits_BV, candidates_BN = logits_BV.sort(dim=-1, descending=True)
    # The largest logit goes to zero first: a tiny temperature then cannot overflow.
    weights = ((logits_BV - logits_BV.amax(-1, keepdim=True)) / sampling.temperature).exp()
    if sampling.top_p < 1:
        # A candidate stays while those before it hold less than top_p: the first always does.
        cumulative = weights.cumsum(-1)
        weights = weights.masked_fill(cumulative - weights >= sampling.top_p * cumulative[:, -1:], 0)
    if candidates_BN is None:
        return _argmax(weights / -uniform_BV.log())
    # A number belongs to a token, not to a rank: two nearly equal logits may swap ranks.
    best_B1 = (weights / -uniform_BV.gather(-1, candidates_BN).log()).argmax(-1, keepdim=True)
    return candidates_BN.gather(-1, best_B1).squeeze(-1)


def _argmax(x_BV: Tensor) -> Tensor:
    """The first largest of each row. On a CPU NumPy's is some ten times faster than torch's."""
    return torch.from_numpy(x_BV.numpy().argmax(-1)) if x_BV.device.type == "cpu" else x_BV.argmax(-1)
