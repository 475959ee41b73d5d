"""Scores by likelihood: examples of several rows in batches, and multiple choice, the continuation of smallest loss.

The shared beginning of each example goes through the model once and fills a key-value cache (generate/cache.py); its
rows continue from copies of it. Rows are padded on the right, which changes no prediction. Logits are computed for the
scored tokens only. Nothing is sampled. Units: nats.

In multiple choice the loss of a continuation is summed given its prompt, then divided by a length: 1 for letters, bytes
or tokens for phrases, because a longer phrase always costs more.
Source: GPT-3 (Brown et al., 2020, arXiv 2005.14165, section 2.4).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quern import compiler
from quern.eval.on_ranks import is_main, on_ranks
from quern.eval.score import Score, accuracy
from quern.generate.cache import KVCache, PrefillContext, pad
from quern.machine import Machine
from quern.mesh import ProcessGroup
from quern.model.base import LanguageModel
from quern.terminal import Meter

BATCH_TOKENS = 8192
"""Tokens in one forward pass, padding included."""
CACHED_TOKENS = 4 * BATCH_TOKENS
"""Tokens in the caches of all rows of a batch: each row has a copy of what its example shares."""


@dataclass(frozen=True)
class Example:
    """One item.

    Args:
        item: Its number in the shuffled order.
        rows: Token ids of each option, from BOS on; one row in language modelling.
        starts: For each row, the index of the first token that is scored; the span ends with the row.
        gold: The right option; 0 in language modelling.
        shared: Leading tokens that all rows share, which are read once; 0 for a single row. The token before the first
            scored one is not among them, because that one is predicted from it.
        cropped: Whether tokens were cut from the left.
    """

    item: int
    rows: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]
    gold: int
    shared: int
    cropped: bool


def common(rows: Sequence[tuple[int, ...]]) -> int:
    """The length of the longest beginning that all rows share."""
    return len(os.path.commonprefix(rows))


def fit(item: int, rows: Sequence[tuple[int, ...]], starts: Sequence[int], gold: int, context: int) -> Example | None:
    """An example whose rows are cut from the left to what the model reads.

    The last token of a row is predicted and not read, so a row may have context + 1 tokens. Rows that lose unequal
    numbers of tokens have different contexts: what they still share is read once, most often nothing.
    """
    starts = [max(1, min(start, len(row) - 1)) for start, row in zip(starts, rows, strict=True)]
    cuts = [max(0, len(row) - (context + 1)) for row in rows]
    first = tuple(start - cut for start, cut in zip(starts, cuts, strict=True))
    if min(first) < 1:
        return None
    kept = tuple(row[cut:] for row, cut in zip(rows, cuts, strict=True))
    shared = min(common(kept), min(first) - 1) if len(kept) > 1 else 0
    return Example(item, kept, first, gold, shared, max(cuts) > 0)


@dataclass(frozen=True)
class Answer:
    """What the model answers to an example.

    Args:
        item: The example's number.
        losses: Mean loss of the scored tokens of each row, in nats.
        pick: The row with the lowest loss, the first of equal ones.
        correct: Whether that is the right one; in language modelling, whether every scored token is the likeliest.
        greedy: For each row, whether every scored token is the likeliest one.
    """

    item: int
    losses: tuple[float, ...]
    pick: int
    correct: bool
    greedy: tuple[bool, ...]


def score_examples(
    model: LanguageModel,
    examples: Sequence[Example],
    machine: Machine,
    vocab_size: int,
    progress: Callable[[int], None] = lambda done: None,
    group: ProcessGroup | None = None,
) -> list[Answer]:
    """Scores examples.

    Args:
        model: In evaluation mode.
        examples: In any order.
        machine: The machine that computes.
        vocab_size: Tokens of the tokenizer; the model's vocabulary may be padded.
        progress: Called with the number of examples that are scored.
        group: The ranks that score some batches each; None is a single process.

    Returns:
        The answers, in the order of the examples.
    """

    def compute(batch: Sequence[int]) -> list[Answer]:
        chosen = [examples[at] for at in batch]
        losses, right = _score(model, chosen, machine, vocab_size)
        answers, first = [], 0
        for example in chosen:
            last = first + len(example.rows)
            own = losses[first:last]
            pick = int(np.argmin(own))
            correct = pick == example.gold if len(example.rows) > 1 else bool(right[first])
            greedy = tuple(map(bool, right[first:last]))
            answers.append(Answer(example.item, tuple(map(float, own)), pick, correct, greedy))
            first = last
        return answers

    with torch.inference_mode(), compiler.eager():
        return on_ranks(list(_batches(examples)), compute, group, progress)


def _batches(examples: Sequence[Example]) -> Iterator[list[int]]:
    """Groups of examples of similar length, the longest first, each of at most `BATCH_TOKENS` tokens."""
    shared = [example.shared for example in examples]
    rest = [max(map(len, example.rows)) - own for example, own in zip(examples, shared, strict=True)]
    batch: list[int] = []
    widest = longest = rows = 0
    for at in sorted(range(len(examples)), key=lambda at: (shared[at] == 0, -shared[at], -rest[at])):
        widest, longest = max(widest, shared[at]), max(longest, rest[at])
        rows += len(examples[at].rows)
        kind_changes = batch and (shared[batch[0]] == 0) != (shared[at] == 0)
        if batch and (kind_changes or _too_large(len(batch) + 1, rows, widest, longest)):
            yield batch
            batch, widest, longest, rows = [], shared[at], rest[at], len(examples[at].rows)
        batch.append(at)
    if batch:
        yield batch


def _too_large(examples: int, rows: int, widest: int, longest: int) -> bool:
    """Whether a batch has too many tokens in a forward pass, or in the caches of its rows."""
    passes = max(examples * widest, rows * longest)
    return passes > BATCH_TOKENS or widest * rows > CACHED_TOKENS


def _score(
    model: LanguageModel, examples: Sequence[Example], machine: Machine, vocab_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """The mean loss of each row's span, and whether every token of it is the likeliest one."""
    device = model.embedding.weight.device
    shared = [example.shared for example in examples]
    rows = [row[own:] for example, own in zip(examples, shared, strict=True) for row in example.rows]
    starts = [start - own for example, own in zip(examples, shared, strict=True) for start in example.starts]
    tokens_BT, lengths_B = pad([row[:-1] for row in rows], 0, device)
    if not max(shared):
        context = model.context(tokens_BT).with_backend(machine.attention, tokens_BT, model.windows)
        x_BTD = model(tokens_BT, context)
    else:
        prefixes, prefix_lengths = pad(
            [example.rows[0][:own] for example, own in zip(examples, shared, strict=True)], 0, device
        )
        cache = KVCache.for_model(model, len(examples), prefixes.size(1) + tokens_BT.size(1))
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
    losses = np.array([part.mean() for part in np.split(nats_N, cuts)])
    return losses, np.array([part.all() for part in np.split(likeliest_N, cuts)])


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


@dataclass(frozen=True)
class MultipleChoice:
    """A prompt (token ids), its continuations as text and as ids, and the index of the right one."""

    kind: str
    prompt: list[int]
    choices: tuple[str, ...]
    continuations: tuple[list[int], ...]
    correct: int


def whole(text: str, ids: Sequence[int]) -> float:
    """No normalisation: right for letters, or when the choices are equally long."""
    return 1.0


def per_byte(text: str, ids: Sequence[int]) -> float:
    """The loss per UTF-8 byte, which does not depend on how the tokenizer splits the phrase."""
    return float(len(text.encode("utf-8")))


def choice_nats(
    model: LanguageModel,
    questions: Sequence[MultipleChoice],
    machine: Machine,
    *,
    task: str,
    context: int,
    vocab_size: int,
    group: ProcessGroup | None = None,
) -> list[np.ndarray]:
    """Returns the loss in nats of each continuation of each question.

    Args:
        model: In evaluation mode.
        questions: Their prompts begin with BOS. A prompt that does not fit before a continuation loses its middle: BOS
            and its end stay.
        machine: The machine that computes.
        task: A name for the progress.
        context: The most tokens that the model reads.
        vocab_size: Tokens of the tokenizer.
        group: The ranks that compute some batches each; None is a single process.

    Raises:
        ValueError: A continuation does not fit the context, or is empty.
    """
    examples = [_example(at, question, context) for at, question in enumerate(questions)]
    with Meter(task, len(examples), "questions", silent=not is_main(group)) as meter:
        answers = score_examples(model, examples, machine, vocab_size, meter.at, group)
    return [
        np.array([mean * len(ids) for mean, ids in zip(answer.losses, question.continuations, strict=True)])
        for answer, question in zip(answers, questions, strict=True)
    ]


def multiple_choice(
    model: LanguageModel,
    questions: Sequence[MultipleChoice],
    machine: Machine,
    *,
    task: str,
    bos: int,
    context: int,
    vocab_size: int,
    length: Callable[[str, Sequence[int]], float] = whole,
    group: ProcessGroup | None = None,
) -> tuple[Score, list[int]]:
    """The accuracy, and the index picked for each question (the first of equal ones). Arguments: see `choice_nats`."""
    nats = choice_nats(model, questions, machine, task=task, context=context, vocab_size=vocab_size, group=group)
    picks = []
    for item, losses in zip(questions, nats, strict=True):
        lengths = [length(text, ids) for text, ids in zip(item.choices, item.continuations, strict=True)]
        picks.append(int(np.argmin(losses / lengths)))
    pairs = [(item.prompt, ids) for item in questions for ids in item.continuations]
    score = accuracy(
        task,
        [pick == item.correct for pick, item in zip(picks, questions, strict=True)],
        [1 / len(item.choices) for item in questions],
        [[*prompt, *ids] for prompt, ids in pairs],
        bos=bos,
        cropped=sum(len(prompt) + len(ids) > context + 1 for prompt, ids in pairs),
    )
    return score, picks


def _example(number: int, question: MultipleChoice, context: int) -> Example:
    rows = [tuple(_fit(question.prompt, ids, context)) for ids in question.continuations]
    starts = [len(row) - len(ids) for row, ids in zip(rows, question.continuations, strict=True)]
    example = fit(number, rows, starts, question.correct, context)
    assert example is not None  # every continuation fits
    return example


def _fit(prompt: Sequence[int], continuation: Sequence[int], context: int) -> list[int]:
    if not prompt or not continuation:
        raise ValueError("a prompt needs at least one token (BOS), and so does each of its continuations")
    excess = len(prompt) + len(continuation) - (context + 1)
    if excess >= len(prompt):
        raise ValueError(
            f"a continuation of {len(continuation)} tokens does not fit a context of {context}; "
            "use a model with a longer context or leave the question out"
        )
    kept = [*prompt[:1], *prompt[1 + excess :]] if excess > 0 else list(prompt)
    return [*kept, *continuation]
