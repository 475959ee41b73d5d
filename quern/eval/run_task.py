"""Runs an evaluation task on a model: asks its items, grades the replies, and computes one score per kind.

Replies are greedy, and the Engine's rows do not depend on each other, so scores are the same at any batch size. Tool
calls run inside the Engine; the graded text is the assistant's text without the calls and their outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quern.eval.likelihood import choice_example, score_examples
from quern.eval.score import Score, accuracy, is_main, on_ranks, prompt_settings
from quern.eval.task import Item, Task
from quern.generate.engine import Engine
from quern.generate.reply import Completion
from quern.generate.sampling import GREEDY
from quern.mesh import ProcessGroup
from quern.terminal import Meter
from quern.text.chat import ContentPart, render_prompt, render_text

BATCH_ROWS = 32
"""Replies that are generated together."""


@dataclass(frozen=True)
class Answered:
    """An item with the model's reply: `parts` are the reply's text, tool calls and outputs; `text` is its text."""

    item: Item
    parts: list[ContentPart]
    text: str
    correct: bool


@dataclass(frozen=True)
class Graded:
    """One Score per kind, in the order in which the kinds first appear, and every reply."""

    scores: list[Score]
    replies: list[Answered]


def run_task(
    engine: Engine, task: Task, *, count: int = 200, base: bool = False, group: ProcessGroup | None = None
) -> Graded:
    """Asks the items of a task.

    An item whose prompt leaves the context no room for a reply is not asked. `Score.skipped` counts these items; if no
    item of a kind fits, the Score has a count of 0 and no value.

    Args:
        engine: The model.
        task: The task.
        count: The largest number of items of each kind.
        base: Ask by the task's `base_prompt` instead of in the chat format, for a model without fine-tuning.
        group: The ranks that ask some batches each, and all get every reply; None is a single process.

    Raises:
        ValueError: The task has no items, or a kind has items with and without choices.
    """
    items = task.items(0, count)
    if not items:
        raise ValueError(f"{task.name}: no questions to score; ask for at least one")
    graded = Graded([], [])
    for kind in dict.fromkeys(item.kind for item in items):
        name, of_kind = f"{task.name}/{kind}", [item for item in items if item.kind == kind]
        if len({item.choices is None for item in of_kind}) == 2:
            raise ValueError(f"{name}: some items have choices and some have none; give them different kinds")
        asked = fitting(engine, task, of_kind, base)
        prompts, settings = [ids for _, ids in asked], dict[str, object]()
        if not asked:
            replies = []
        elif of_kind[0].choices is None:
            replies = _generated(engine, task, asked, name, base, group)
            settings = prompt_settings(prompts, engine.tokenizer.bos)
        else:
            replies, settings = _likeliest(engine, asked, name, base, group)
        chances = [item.chance if item.choices is None else 1 / len(item.choices) for item, _ in asked]
        settings["skipped"] = len(of_kind) - len(asked)
        graded.scores.append(accuracy(name, [reply.correct for reply in replies], chances, **settings))
        graded.replies.extend(replies)
    return graded


def fitting(engine: Engine, task: Task, items: Sequence[Item], base: bool) -> list[tuple[Item, list[int]]]:
    """The items that leave room for a reply, each with the token ids of its prompt, from BOS on."""
    tokenizer = engine.tokenizer
    prompts = [
        render_text(tokenizer, task.base_prompt(i)) if base else render_prompt(tokenizer, i.messages) for i in items
    ]
    return [(item, ids) for item, ids in zip(items, prompts, strict=True) if len(ids) < engine.context]


def _generated(
    engine: Engine,
    task: Task,
    asked: Sequence[tuple[Item, list[int]]],
    name: str,
    base: bool,
    group: ProcessGroup | None,
) -> list[Answered]:
    """The model's own words, which rank 0 grades: programs run once, and a limit of time cannot divide the ranks."""
    items, prompts = [item for item, _ in asked], [ids for _, ids in asked]
    order = sorted(range(len(asked)), key=lambda row: len(prompts[row]))  # similar lengths: less padding

    def compute(rows: Sequence[int]) -> list[Completion]:
        stop = task.base_stop if base else ()
        how = {"max_tokens": task.max_tokens, "sampling": GREEDY, "stop": stop, "plain": base}
        return [samples[0] for samples in engine.generate([prompts[row] for row in rows], **how)]

    with Meter(name, len(asked), "questions", silent=not is_main(group)) as meter:
        batches = [order[first : first + BATCH_ROWS] for first in range(0, len(order), BATCH_ROWS)]
        done = on_ranks(batches, compute, group, meter.at)
    right = list[bool]()
    if is_main(group):
        texts = [reply.text for reply in done]
        right = task.grade_all(items, texts) if task.grade_all else map(task.grade, items, texts)
        right = list(map(bool, right))
    right = right if group is None else group.broadcast_object(right)
    return [
        Answered(item, list(reply.parts), reply.text, correct)
        for item, reply, correct in zip(items, done, right, strict=True)
    ]


def _likeliest(
    engine: Engine, asked: Sequence[tuple[Item, list[int]]], name: str, base: bool, group: ProcessGroup | None
) -> tuple[list[Answered], dict[str, object]]:
    """The choices of least loss per byte: a model that knows the answer but not how to reply is measured fairly.

    The loss of a phrase is divided by its bytes because a longer one always costs more.
    Source: GPT-3 (Brown et al., 2020, arXiv 2005.14165, section 2.4).
    """
    examples, rows = [], list[list[int]]()
    for item, prompt in asked:
        choices = item.choices or ()
        if item.answer not in choices:
            raise ValueError(f"{name}: the answer {item.answer!r} is not one of {', '.join(choices)}")
        ids = [engine.tokenizer.encode(f" {choice}" if base else choice) for choice in choices]
        examples.append(choice_example(prompt, ids, choices.index(item.answer), engine.context))
        rows += [[*prompt, *own] for own in ids]
    with Meter(name, len(examples), "questions", silent=not is_main(group)) as meter:
        vocab_size = engine.tokenizer.vocab_size
        answers = score_examples(engine.model, examples, engine.machine, vocab_size, meter.at, group)
    replies = []
    for (item, _), example, answer in zip(asked, examples, answers, strict=True):
        sizes = [len(choice.encode("utf-8")) for choice in item.choices or ()]
        text = (item.choices or ())[int(np.argmin(answer.nats(example) / sizes))]
        replies.append(Answered(item, [{"type": "text", "text": text}], text, text == item.answer))
    cropped = sum(len(row) > engine.context + 1 for row in rows)
    return replies, {**prompt_settings(rows, engine.tokenizer.bos), "cropped": cropped}
