"""Questions that the model answers in its own words, and the accuracy of its replies.

Replies are greedy. The Engine's rows do not depend on each other, so the accuracy is the same at any batch size. Tool
calls run inside the Engine; the graded text is the assistant's text without the calls and their outputs. Accuracies
are shares from 0 to 1.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from quern.eval.score import Score, accuracy
from quern.eval.task import Item
from quern.generate.engine import Engine
from quern.generate.reply import Completion
from quern.generate.sample import GREEDY
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
) -> tuple[Score, list[Answered]]:
    """Answers every item greedily and grades the replies.

    Args:
        prompts: The token ids of each item's prompt, from BOS on.
        grade: (items, replies) → whether each reply is right.
        task: The score's name.
        base_stop: The prompts are plain text: a reply ends before any of these texts, and no tool is called. None: the
            prompts are in the chat format.

    Raises:
        ValueError: There are no items.
    """
    done = list(_complete(engine, prompts, max_tokens, batch_rows, base_stop, task))
    right = grade(items, [completion.text for completion in done])
    replies = [
        Answered(item, list(completion.parts), completion.text, bool(correct))
        for item, completion, correct in zip(items, done, right, strict=True)
    ]
    chances = [item.chance for item in items]
    score = accuracy(task, [reply.correct for reply in replies], chances, prompts, bos=engine.tokenizer.bos)
    return score, replies


def _complete(
    engine: Engine,
    prompts: Sequence[list[int]],
    max_tokens: int,
    batch_rows: int,
    base_stop: Sequence[str] | None,
    title: str,
) -> Iterator[Completion]:
    """Greedy completions in the order of `prompts`. Prompts of similar length share a batch: less padding."""
    order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
    options: dict[str, Any] = {"max_tokens": max_tokens, "sampling": GREEDY}
    options |= {"stop": base_stop or (), "plain": base_stop is not None}
    done: dict[int, Completion] = {}
    with Meter(title, len(prompts), "questions") as meter:
        for first in range(0, len(order), batch_rows):
            rows = order[first : first + batch_rows]
            groups = engine.generate([prompts[row] for row in rows], **options)
            done.update((row, samples[0]) for row, samples in zip(rows, groups, strict=True))
            meter.at(len(done))
    return (done[row] for row in range(len(prompts)))
