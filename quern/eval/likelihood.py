"""Scores by likelihood: the one scorer of CORE, of multiple choice, and of lm-eval's requests.

The shared beginning of each example goes through the model once and fills a key-value cache (generate/cache.py); its
rows continue from copies of it. Rows are padded on the right, which changes no prediction. Logits are computed for the
scored tokens only. Nothing is sampled. Units: nats.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quern import compiler
from quern.eval.score import SINGLE, on_ranks
from quern.generate.cache import KVCache, PrefillContext, pad
from quern.machine import Machine
from quern.mesh import ProcessGroup
from quern.model.base import LanguageModel

BATCH_TOKENS = 8192
"""Tokens in one forward pass, padding included, or one example."""
CACHED_TOKENS = 4 * BATCH_TOKENS
"""Tokens in the caches of all rows of a batch: each row has a copy of what its example shares."""


@dataclass(frozen=True)
class Example:
    """One question.

    Args:
        rows: Token ids of each option, from BOS on; one row in language modelling.
        starts: For each row, the index of the first token that is scored; the span ends with the row.
        gold: The right option.
        shared: Leading tokens that all rows share, which are read once. The token before the first scored one is not
            among them, because that one is predicted from it.
        cropped: Whether tokens were cut.
    """

    rows: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]
    gold: int
    shared: int
    cropped: bool


@dataclass(frozen=True)
class Answer:
    """The model's answer to an example. losses: mean nats of the scored tokens of each row; pick: the row of the least;
    greedy: for each row, whether every scored token is the likeliest one; correct: the pick is the right one, or, in
    language modelling, every token is the likeliest."""

    losses: tuple[float, ...]
    pick: int
    correct: bool
    greedy: tuple[bool, ...]

    def nats(self, example: Example) -> np.ndarray:
        """The summed loss of the scored tokens of each row."""
        spans = [len(row) - start for row, start in zip(example.rows, example.starts, strict=True)]
        return np.array(self.losses) * spans


def common(rows: Sequence[tuple[int, ...]]) -> int:
    """The length of the longest beginning that all rows share."""
    return len(os.path.commonprefix(rows))


def fit(rows: Sequence[Sequence[int]], starts: Sequence[int], gold: int, context: int, keep: int = 0) -> Example | None:
    """An example whose rows are cut to what the model reads, behind their first `keep` tokens.

    The last token of a row is predicted and not read, so a row may have context + 1 tokens. Rows that lose unequal
    numbers of tokens have different contexts: what they still share is read once, most often nothing. None if a scored
    span, with one token before it, does not fit.
    """
    starts = [max(1, min(start, len(row) - 1)) for start, row in zip(starts, rows, strict=True)]
    cuts = [max(0, len(row) - (context + 1)) for row in rows]
    first = tuple(start - cut for start, cut in zip(starts, cuts, strict=True))
    if min(first) < 1:
        return None
    kept = tuple((*row[:keep], *row[keep + cut :]) for row, cut in zip(rows, cuts, strict=True))
    shared = min(common(kept), min(first) - 1) if len(kept) > 1 else 0
    return Example(kept, first, gold, shared, max(cuts) > 0)


def choice_example(
    prompt: Sequence[int], continuations: Sequence[Sequence[int]], gold: int, context: int
) -> Example | None:
    """The continuations of a prompt that begins with BOS. One that does not fit costs the prompt its middle; None if it
    does not fit without the prompt either. Raises ValueError for an empty prompt or continuation."""
    if not prompt or not all(continuations):
        raise ValueError("a prompt needs at least one token (BOS), and so does each of its continuations")
    rows = [(*prompt, *ids) for ids in continuations]
    return fit(rows, [len(prompt)] * len(rows), gold, context, keep=1)


def score_examples(
    model: LanguageModel,
    examples: Sequence[Example],
    machine: Machine,
    vocab_size: int,
    progress: Callable[[int], None] = lambda done: None,
    group: ProcessGroup = SINGLE,
) -> list[Answer]:
    """The answers to examples, in their order.

    The model is in evaluation mode. vocab_size: tokens of the tokenizer, since the model's vocabulary may be padded;
    progress: called with the number of examples that are scored; group: the ranks that score some batches each.
    """

    def compute(batch: Sequence[int]) -> list[Answer]:
        return _score(model, [examples[at] for at in batch], machine, vocab_size)

    with torch.inference_mode(), compiler.eager():
        return on_ranks(list(_batches(examples)), compute, group, progress)


def _batches(examples: Sequence[Example]) -> Iterator[list[int]]:
    """Groups of examples of similar length, the longest first, of at most `BATCH_TOKENS` tokens or one example each."""
    shared = [example.shared for example in examples]
    rest = [max(map(len, example.rows)) - own for example, own in zip(examples, shared, strict=True)]
    batch: list[int] = []
    widest = longest = rows = 0
    for at in sorted(range(len(examples)), key=lambda at: (shared[at] == 0, -shared[at], -rest[at])):
        widest, longest = max(widest, shared[at]), max(longest, rest[at])
        rows += len(examples[at].rows)
        kind_changes = batch and (shared[batch[0]] == 0) != (shared[at] == 0)
        passes = max((len(batch) + 1) * widest, rows * longest)
        if batch and (kind_changes or passes > BATCH_TOKENS or widest * rows > CACHED_TOKENS):
            yield batch
            batch, widest, longest, rows = [], shared[at], rest[at], len(examples[at].rows)
        batch.append(at)
    if batch:
        yield batch


def _score(model: LanguageModel, examples: Sequence[Example], machine: Machine, vocab_size: int) -> list[Answer]:
    """Scores a batch in one forward pass, or in two where rows share a beginning."""
    device = model.embedding.weight.device
    shared = [example.shared for example in examples]
    rows = [row[own:] for example, own in zip(examples, shared, strict=True) for row in example.rows]
    starts = [start - own for example, own in zip(examples, shared, strict=True) for start in example.starts]
    tokens_BT, lengths_B = pad([row[:-1] for row in rows], 0, device)
    if not max(shared):
        context = model.context(tokens_BT).with_backend(machine.attention)
        x_BTD = model(tokens_BT, context)
    else:
        prefixes, prefix_lengths = pad(
            [example.rows[0][:own] for example, own in zip(examples, shared, strict=True)], 0, device
        )
        cache = KVCache(model, len(examples), prefixes.size(1) + tokens_BT.size(1))
        cache.prefill(model, prefixes, prefix_lengths, machine.attention)
        owner = [at for at, example in enumerate(examples) for _ in example.rows]
        cache = cache.take(torch.tensor(owner, device=device))
        x_BTD = model(tokens_BT, PrefillContext(cache, lengths_B))
    spans = [len(row) - start for row, start in zip(rows, starts, strict=True)]
    row_N = torch.arange(len(rows), device=device).repeat_interleave(torch.tensor(spans, device=device))
    place_N = torch.cat([torch.arange(start - 1, len(row) - 1) for row, start in zip(rows, starts, strict=True)])
    targets_N = torch.tensor([id for row, start in zip(rows, starts, strict=True) for id in row[start:]], device=device)
    nats_N, likeliest_N = _token_scores(model, x_BTD[row_N, place_N.to(device)], targets_N, vocab_size)
    cuts = np.cumsum(spans)[:-1]
    losses = [float(part.mean()) for part in np.split(nats_N, cuts)]
    greedy = [bool(part.all()) for part in np.split(likeliest_N, cuts)]
    answers, first = [], 0
    for example in examples:
        last = first + len(example.rows)
        pick = int(np.argmin(losses[first:last]))
        correct = pick == example.gold if len(example.rows) > 1 else greedy[first]
        answers.append(Answer(tuple(losses[first:last]), pick, correct, tuple(greedy[first:last])))
        first = last
    return answers


def _token_scores(
    model: LanguageModel, x_ND: Tensor, targets_N: Tensor, vocab_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """The loss of each target (float64), and whether it is the likeliest token."""
    nats, likeliest = [], []
    for x_MD, targets_M in zip(x_ND.split(BATCH_TOKENS // 8), targets_N.split(BATCH_TOKENS // 8), strict=True):
        logits_MV = model.logits(x_MD)[:, :vocab_size]
        nats.append(torch.nn.functional.cross_entropy(logits_MV, targets_M, reduction="none"))
        likeliest.append(logits_MV.argmax(-1) == targets_M)
    return torch.cat(nats).cpu().double().numpy(), torch.cat(likeliest).cpu().numpy()
