"""Questions that the model answers in its own words, and the accuracy of its replies.

Replies are greedy. The Engine's rows do not depend on each other, so the accuracy is the same at any batch size. Tool
calls run inside the Engine; the graded text is the assistant's text without the calls and their outputs. Accuracies
are shares from 0 to 1.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from quern.eval.on_ranks import batched, is_main, on_ranks
from quern.eval.score import Score, accuracy
from quern.eval.task import Item
from quern.generate.engine import Engine
from quern.generate.reply import Completion
from quern.generate.sampling import GREEDY
from quern.mesh import ProcessGroup
from quern.terminal import Meter
from quern.text.chat import ContentPart


@dataclass(frozen=True)
class Answered:
    """An item with the model's reply: `parts` are the reply's text, tool calls and outputs; `text` is its text."""

    item: Item
    parts: list[ContentPart]
    text: str
    correct: bool


def generative(
    engine: Engine,
    items: Sequence[Item],
    prompts: Sequence[list[int]],
    grade: Callable[[Sequence[Item], Sequence[str]], Sequence[bool]],
    *,
    task: str,
    max_tokens: int = 96,
    batch_rows: int = 32,
    base_stop: Sequence[str] | None = None,
    group: ProcessGroup | None = None,
) -> tuple[Score, list[Answered]]:
    """Answers every item greedily and grades the replies.

    Args:
        prompts: The token ids of each item's prompt, from BOS on.
        grade: (items, replies) → whether each reply is right.
        task: The score's name.
        base_stop: The prompts are plain text: a reply ends before any of these texts, and no tool is called. None: the
            prompts are in the chat format.
        group: The ranks that answer some batches each; rank 0 grades. None is a single process.

    Raises:
        ValueError: There are no items.
    """
    done = _complete(engine, prompts, max_tokens, batch_rows, base_stop, task, group)
    right = _graded(group, lambda: grade(items, [completion.text for completion in done]))
    replies = [
        Answered(item, list(completion.parts), completion.text, bool(correct))
        for item, completion, correct in zip(items, done, right, strict=True)
    ]
    chances = [item.chance for item in items]
    score = accuracy(task, [reply.correct for reply in replies], chances, prompts, bos=engine.tokenizer.bos)
    return score, replies


def _graded(group: ProcessGroup | None, grade: Callable[[], Sequence[bool]]) -> list[bool]:
    """Rank 0's grades, on every rank: programs run once, and a limit of time cannot divide the ranks."""
    right = list(map(bool, grade())) if is_main(group) else []
    return right if group is None else group.broadcast_object(right)


def _complete(
    engine: Engine,
    prompts: Sequence[list[int]],
    max_tokens: int,
    batch_rows: int,
    base_stop: Sequence[str] | None,
    title: str,
    group: ProcessGroup | None,
) -> list[Completion]:
    """Greedy completions in the order of `prompts`. Prompts of similar length share a batch: less padding."""
    order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
    options: dict[str, Any] = {"max_tokens": max_tokens, "sampling": GREEDY}
    options |= {"stop": base_stop or (), "plain": base_stop is not None}

    def compute(rows: Sequence[int]) -> list[Completion]:
        return [samples[0] for samples in engine.generate([prompts[row] for row in rows], **options)]

    with Meter(title, len(prompts), "questions", silent=not is_main(group)) as meter:
        return on_ranks(batched(order, batch_rows), compute, group, meter.at)
