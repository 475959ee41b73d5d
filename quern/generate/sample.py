"""Chooses the next token of every row in a batch (`choose`).

The filters run in this order: temperature, top-k, top-p (nucleus sampling: Holtzman et al., 2020,
https://arxiv.org/abs/1904.09751), min-p (Nguyen et al., 2024, "Turning Up the Heat: Min-p Sampling",
https://arxiv.org/abs/2407.01082). A filter also keeps the tokens that tie with the smallest weight it keeps.

The draw is an exponential race: with u uniform and E = -log(u), the index of the largest weight / E is a sample in
proportion to the weights (the Gumbel-max trick without its logarithms; Maddison et al., 2014,
https://arxiv.org/abs/1411.0030). A first race picks a span of the vocabulary by the spans' sums, a second race picks a
token of that span. The distribution is the same, and a row needs some two hundred random numbers instead of one per
token. Inverting the cumulative distribution would need a single number, but every rounding of a logit would move
thousands of its boundaries; here rounding matters only when the two best candidates are that close.

Each row has its own generator, seeded by (seed, prompt, sample). The row's position in the batch plays no part: a row
draws the same tokens alone and in any batch, except where bf16 rounds otherwise. Two samples of one prompt differ.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quern.generate.reply import Row
from quern.generate.sampling import Sampling

SPAN = 128  # tokens of the vocabulary that share one entry in the first race
LEAST_TEMPERATURE = 1e-30  # logits up to 1e8 divided by it are finite in fp32


def choose(rows: Sequence[Row], logits_BV: Tensor) -> list[int]:
    """Samples every row's next token, each with its own settings."""
    allowed = [row.reply.allowed() for row in rows]
    changed = [at for at, row in enumerate(rows) if row.bias or row.sampling.penalises or allowed[at] is not None]
    if changed:
        logits_BV = logits_BV.clone()
        for at in changed:
            row, mask_V = rows[at], allowed[at]
            penalise(row.sampling, logits_BV[at], row.tokens, row.reply.ids)
            if row.bias:
                ids = torch.tensor(list(row.bias), device=logits_BV.device)
                logits_BV[at, ids] += torch.tensor(list(row.bias.values()), device=logits_BV.device)
            if mask_V is not None:
                logits_BV[at].masked_fill_(torch.from_numpy(~mask_V).to(logits_BV.device), -torch.inf)
    groups: dict[Sampling, list[int]] = {}
    for at, row in enumerate(rows):
        groups.setdefault(row.sampling, []).append(at)
    picked = [0] * len(rows)
    for sampling, group in groups.items():
        own_BV = logits_BV if len(group) == len(rows) else logits_BV[group]
        uniform_BN = None
        if sampling.temperature > 0:
            uniform_BN = draw([rows[at].random for at in group], own_BV.size(-1)).to(own_BV.device)
        for at, token in zip(group, sample(own_BV, sampling, uniform_BN).tolist(), strict=True):
            picked[at] = token
    return picked


def penalise(sampling: Sampling, logits_V: Tensor, prompt: Sequence[int], reply: Sequence[int]) -> None:
    """Changes a row's logits in place by the penalties, before the temperature (Keskar et al., 2019,
    https://arxiv.org/abs/1909.05858, for the repetition penalty; OpenAI's API for the others).
    """
    if sampling.repetition_penalty != 1:
        seen = torch.tensor(sorted({*prompt, *reply}), device=logits_V.device)
        old = logits_V[seen]
        logits_V[seen] = torch.where(old > 0, old / sampling.repetition_penalty, old * sampling.repetition_penalty)
    if reply and (sampling.presence_penalty or sampling.frequency_penalty):
        ids, counts = torch.tensor(reply, device=logits_V.device).unique(return_counts=True)
        logits_V[ids] -= sampling.presence_penalty + sampling.frequency_penalty * counts


def generator(seed: int, prompt: Sequence[int], sample: int) -> np.random.Generator:
    """The random number generator of one row: sample number `sample` of a prompt."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{seed} {sample} ".encode())
    digest.update(np.asarray(prompt, dtype=np.int64).tobytes())
    return np.random.Generator(np.random.SFC64(int.from_bytes(digest.digest(), "little")))


def draw(generators: Sequence[np.random.Generator], vocabulary: int) -> Tensor:
    """Random numbers of one step in [0, 1): fp32 (B, spans of the vocabulary + SPAN), row b from generators[b]."""
    uniform_BN = np.empty((len(generators), -(-vocabulary // SPAN) + SPAN), dtype=np.float32)
    for row, own in zip(uniform_BN, generators, strict=True):
        own.random(out=row, dtype=np.float32)
    return torch.from_numpy(uniform_BN)


def sample(logits_BV: Tensor, sampling: Sampling, uniform_BN: Tensor | None = None) -> Tensor:
    """Picks one token per row, ids (B,), int64. uniform_BN: from `draw`; None is enough at temperature 0."""
    if sampling.temperature == 0:
        return _argmax(logits_BV)
    assert uniform_BN is not None
    if sampling.temperature != 1:
        # Below LEAST_TEMPERATURE only the largest logit would have weight, which is already so at that temperature.
        logits_BV = logits_BV / max(sampling.temperature, LEAST_TEMPERATURE)
    weights_BV = torch.softmax(logits_BV, dim=-1)
    least_of_min_p_B1 = sampling.min_p * weights_BV.amax(-1, keepdim=True) if sampling.min_p > 0 else None
    for least_B1 in (_least_of_top(weights_BV, sampling), least_of_min_p_B1):
        if least_B1 is not None:
            weights_BV.masked_fill_(weights_BV < least_B1, 0)
    return _race(weights_BV, uniform_BN)


def _least_of_top(weights_BV: Tensor, sampling: Sampling) -> Tensor | None:
    """The smallest weight that top-k and then top-p keep, (B, 1); None when both are off."""
    if 0 < sampling.top_k < weights_BV.size(-1):
        ordered_BN = weights_BV.topk(sampling.top_k, dim=-1).values
    elif sampling.top_p < 1:
        ordered_BN = weights_BV.sort(dim=-1, descending=True).values
    else:
        return None
    if sampling.top_p == 1:
        return ordered_BN[:, -1:]
    # A candidate stays while the candidates before it hold less than top_p; the first always stays.
    cumulative_BN = ordered_BN.cumsum(-1)
    kept_B1 = (cumulative_BN - ordered_BN < sampling.top_p * cumulative_BN[:, -1:]).sum(-1, keepdim=True)
    return ordered_BN.gather(-1, kept_B1.clamp(min=1) - 1)


def _race(weights_BV: Tensor, uniform_BN: Tensor) -> Tensor:
    """The winners (B,): the spans race by their sums, then the tokens of the winning span race."""
    B, V = weights_BV.shape
    spans = -(-V // SPAN)
    times_BN = -uniform_BN.clamp(min=2**-25).log()  # of a draw of 0, too: by infinity, all quotients would be 0
    if V % SPAN:
        weights_BV = torch.nn.functional.pad(weights_BV, (0, spans * SPAN - V))
    weights_BGS = weights_BV.view(B, spans, SPAN)
    span_B = _argmax(weights_BGS.sum(-1) / times_BN[:, :spans])
    inside_BS = weights_BGS[torch.arange(B, device=span_B.device), span_B]
    return span_B * SPAN + _argmax(inside_BS / times_BN[:, spans:])


def _argmax(x_BV: Tensor) -> Tensor:
    """The first maximum of each row. On a CPU NumPy's argmax is some ten times faster than torch's."""
    return torch.from_numpy(x_BV.numpy().argmax(-1)) if x_BV.device.type == "cpu" else x_BV.argmax(-1)


def log_probabilities(
    logits_BV: Tensor, tokens: Sequence[int], top: int
) -> list[tuple[float, list[tuple[int, float]]]]:
    """The log-probability of each row's token at temperature 1, and the `top` likeliest tokens with theirs."""
    log_BV = logits_BV.float().log_softmax(-1)
    tokens_B1 = torch.tensor(tokens, device=logits_BV.device).unsqueeze(-1)
    own = log_BV.gather(-1, tokens_B1).squeeze(-1).tolist()
    best = log_BV.topk(min(top, log_BV.size(-1)), dim=-1)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [(value, list(zip(ids, values, strict=True))) for value, (ids, values) in zip(own, pairs, strict=True)]
