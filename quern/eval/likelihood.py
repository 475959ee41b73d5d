"""Multiple choice by likelihood: the model picks the continuation with the smallest loss.

The loss of a continuation is summed (nats) given its prompt, then divided by a length: 1 for letters, bytes or tokens
for phrases, because a longer phrase always costs more. Rows are padded on the right, which changes no prediction.
Nothing is sampled. Units: nats.
Source: GPT-3 (Brown et al., 2020, arXiv 2005.14165, section 2.4).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quern import compiler
from quern.eval.bits_per_byte import batch_losses
from quern.eval.on_ranks import batched, is_main, on_ranks
from quern.eval.score import Score, accuracy
from quern.generate.cache import pad
from quern.machine import Machine
from quern.mesh import ProcessGroup
from quern.model.base import LanguageModel
from quern.terminal import Meter

# Every batch has batch_rows rows, of a length that is a multiple of this: compiled code sees few shapes.
PAD_MULTIPLE = 32


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


def continuation_nats(
    model: LanguageModel,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    machine: Machine,
    *,
    context: int,
    batch_rows: int = 32,
    group: ProcessGroup | None = None,
) -> np.ndarray:
    """The loss in nats (float64, one per pair) of each (prompt, continuation), prompts not empty.

    A pair longer than `context` + 1 tokens loses the middle of its prompt: the first token (BOS) and its end stay.
    group: the ranks that compute some batches each; None is a single process.

    Raises:
        ValueError: A continuation does not fit the context, or is empty.
    """
    rows = [_fit(prompt, continuation, context) for prompt, continuation in pairs]
    order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
    batch_rows = min(batch_rows, max(1, len(rows)))

    def compute(chosen: Sequence[int]) -> list[float]:
        longest = max(len(rows[row]) for row in chosen) - 1
        width = min(-(-longest // PAD_MULTIPLE) * PAD_MULTIPLE, context)
        padded = np.zeros((batch_rows, width + 1), dtype=np.int64)
        counts = np.zeros((batch_rows, width), dtype=bool)
        for line, row in enumerate(chosen):
            length = len(rows[row])
            padded[line, :length] = rows[row]
            counts[line, length - 1 - len(pairs[row][1]) : length - 1] = True
        losses = batch_losses(model, padded[:, :-1], padded[:, 1:], machine)
        return np.where(counts, losses, 0.0).sum(axis=1)[: len(chosen)].tolist()

    return np.array(on_ranks(batched(order, batch_rows), compute, group))


def letter_nats(
    model: LanguageModel,
    questions: Sequence[MultipleChoice],
    machine: Machine,
    *,
    task: str,
    context: int,
    batch_rows: int = 32,
    group: ProcessGroup | None = None,
) -> np.ndarray:
    """As `continuation_nats`, for continuations of one token: each question is read once, not once for each choice."""
    rows = [_fit(item.prompt, item.continuations[0], context)[:-1] for item in questions]
    order = sorted(range(len(rows)), key=lambda row: len(rows[row]))

    def compute(chosen: Sequence[int]) -> list[list[float]]:
        logs_BV = _next_log_probs(model, [rows[row] for row in chosen], machine)
        pairs = zip(chosen, logs_BV, strict=True)
        return [[-float(logs_V[ids[0]]) for ids in questions[row].continuations] for row, logs_V in pairs]

    with Meter(task, len(rows), "questions", silent=not is_main(group)) as meter:
        nats = on_ranks(batched(order, batch_rows), compute, group, meter.at)
    return np.array([loss for losses in nats for loss in losses])


def multiple_choice(
    model: LanguageModel,
    questions: Sequence[MultipleChoice],
    machine: Machine,
    *,
    task: str,
    bos: int,
    context: int,
    length: Callable[[str, Sequence[int]], float] = whole,
    batch_rows: int = 32,
    group: ProcessGroup | None = None,
) -> tuple[Score, list[int]]:
    """The accuracy, and the index picked for each question (the first of equal ones)."""
    pairs = [(item.prompt, ids) for item in questions for ids in item.continuations]
    if all(len(ids) == 1 for _, ids in pairs):
        nats = letter_nats(model, questions, machine, task=task, context=context, batch_rows=batch_rows, group=group)
    else:
        nats = continuation_nats(model, pairs, machine, context=context, batch_rows=batch_rows, group=group)
    picks, start = [], 0
    for item in questions:
        stop = start + len(item.choices)
        lengths = [length(text, ids) for text, ids in zip(item.choices, item.continuations, strict=True)]
        picks.append(int(np.argmin(nats[start:stop] / lengths)))
        start = stop
    score = accuracy(
        task,
        [pick == item.correct for pick, item in zip(picks, questions, strict=True)],
        [1 / len(item.choices) for item in questions],
        [[*prompt, *ids] for prompt, ids in pairs],
        bos=bos,
        cropped=sum(len(prompt) + len(ids) > context + 1 for prompt, ids in pairs),
    )
    return score, picks


def _next_log_probs(model: LanguageModel, prompts: Sequence[Sequence[int]], machine: Machine) -> torch.Tensor:
    """The log-probabilities (B, V) of the token after each prompt."""
    tokens_BT, lengths_B = pad(prompts, 0, machine.device)
    with torch.no_grad(), compiler.eager():
        context = model.context(tokens_BT).with_backend(machine.attention, tokens_BT, model.windows)
        x_BTD = model(tokens_BT, context)
        x_BD = x_BTD[torch.arange(len(prompts), device=machine.device), lengths_B - 1]
        return torch.log_softmax(model.logits(x_BD).float(), -1).cpu()


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
