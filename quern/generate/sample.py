"""Picking the next token of every row of a batch.

The draw is an exponential race: with u uniform and E = -log(u), the largest weight / E is a draw by weight (the
Gumbel-max trick without its logarithms; Maddison et al., 2014, https://arxiv.org/abs/1411.0030). It is run twice,
between spans of the vocabulary by their sums and between the tokens of the span that won, which is the same draw
with some two hundred numbers instead of one for every token. They come from a generator of the row's own, seeded by
(seed, prompt, sample) and never by a row's place in the batch, so a row draws the same tokens alone as among any
batch mates, and two samples of one prompt differ. Inverting the cumulative distribution would need one number only,
but every rounding of a logit moves thousands of its boundaries; here it matters only where the two best are within
that rounding.

The order of the filters is temperature, then top-k, then top-p (nucleus sampling: Holtzman et al., 2020,
https://arxiv.org/abs/1904.09751). Tokens that weigh as much as the last one kept are kept as well.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

SPAN = 128  # tokens of the vocabulary that race as one first
LEAST_TEMPERATURE = 1e-30  # logits up to 1e8 divided by it are finite in fp32


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
    """The next step's numbers in [0, 1), fp32 (B, spans of the vocabulary + SPAN), row b from generator b."""
    uniform_BN = np.empty((len(generators), -(-vocabulary // SPAN) + SPAN), dtype=np.float32)
    for row, own in zip(uniform_BN, generators, strict=True):
        own.random(out=row, dtype=np.float32)
    return torch.from_numpy(uniform_BN)


def sample(logits_BV: Tensor, sampling: Sampling, uniform_BN: Tensor | None = None) -> Tensor:
    """Token ids (B,), int64, picked from fp32 logits (B, V) by the numbers of `draw`; greedy needs none."""
    if sampling.temperature == 0:
        return _argmax(logits_BV)
    if uniform_BN is None:
        raise ValueError("sampling at a temperature above 0 needs the rows' numbers: pass draw(generators, V)")
    if sampling.temperature != 1:
        # Below the least only the largest logit would have weight, as it has at the least.
        logits_BV = logits_BV / max(sampling.temperature, LEAST_TEMPERATURE)
    weights_BV = torch.softmax(logits_BV, dim=-1)
    least_B1 = _least_kept(weights_BV, sampling)
    if least_B1 is not None:
        weights_BV.masked_fill_(weights_BV < least_B1, 0)
    return _race(weights_BV, uniform_BN)


def _least_kept(weights_BV: Tensor, sampling: Sampling) -> Tensor | None:
    """The smallest weight that top-k and then top-p keep, (B, 1); None when both are off."""
    if 0 < sampling.top_k < weights_BV.size(-1):
        ordered_BN = weights_BV.topk(sampling.top_k, dim=-1).values
    elif sampling.top_p < 1:
        ordered_BN = weights_BV.sort(dim=-1, descending=True).values
    else:
        return None
    if sampling.top_p == 1:
        return ordered_BN[:, -1:]
    # A candidate stays while those before it hold less than top_p: the first always does.
    cumulative_BN = ordered_BN.cumsum(-1)
    kept_B1 = (cumulative_BN - ordered_BN < sampling.top_p * cumulative_BN[:, -1:]).sum(-1, keepdim=True)
    return ordered_BN.gather(-1, kept_B1.clamp(min=1) - 1)


def _race(weights_BV: Tensor, uniform_BN: Tensor) -> Tensor:
    """The winners (B,): first the spans race by their sums, then the tokens of the winning one."""
    B, V = weights_BV.shape
    spans = -(-V // SPAN)
    times_BN = -uniform_BN.log()
    if V % SPAN:
        weights_BV = torch.nn.functional.pad(weights_BV, (0, spans * SPAN - V))
    weights_BGS = weights_BV.view(B, spans, SPAN)
    span_B = _argmax(weights_BGS.sum(-1) / times_BN[:, :spans])
    inside_BS = weights_BGS[torch.arange(B, device=span_B.device), span_B]
    return span_B * SPAN + _argmax(inside_BS / times_BN[:, spans:])


def _argmax(x_BV: Tensor) -> Tensor:
    """The first largest of each row. On a CPU NumPy's is some ten times faster than torch's."""
    return torch.from_numpy(x_BV.numpy().argmax(-1)) if x_BV.device.type == "cpu" else x_BV.argmax(-1)
