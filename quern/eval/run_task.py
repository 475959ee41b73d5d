"""Runs an evaluation task on a model: asks its items, grades the replies, and computes one score per kind.

Replies are greedy, and the Engine's rows do not depend on each other, so scores are the same at any batch size. Tool
calls run inside the Engine; the graded text is the assistant's text without the calls and their outputs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quern.eval.answers import Answered, answers_file, kept_score, write_answers
from quern.eval.likelihood import Example, choice_example, score_examples
from quern.eval.score import SINGLE, Prompts, Score, accuracy, on_ranks
from quern.eval.task import Item, Task, own_code
from quern.generate.engine import Engine
from quern.generate.reply import Completion
from quern.generate.sampling import GREEDY
from quern.mesh import ProcessGroup
from quern.terminal import Meter, counted
from quern.text.chat import render_prompt, render_text

BATCH_ROWS = 32  # replies that are generated together
CHUNK = 256  # items of scored options whose rows are in memory at a time
FORMAT = 3
"""The version of kept answers. A higher number for other prompts or spans: answers of an old format are not kept."""


@dataclass(frozen=True)
class Records:
    """The folder of the answers, TASK/KIND.answers.jsonl, and what their files say about the model."""

    folder: Path
    identity: Mapping[str, Any]


def run_task(
    engine: Engine,
    task: Task,
    *,
    count: int = 200,
    base: bool = False,
    group: ProcessGroup = SINGLE,
    records: Records | None = None,
) -> tuple[list[Score], list[Answered]]:
    """Asks the items of a task. An item whose prompt leaves the context no room for a reply is counted as skipped.

    Args:
        count: The largest number of items of each kind.
        base: Ask by the task's `base_prompt` instead of in the chat format, for a model without fine-tuning.
        group: The ranks that ask some batches each, and all get every reply.
        records: Where rank 0 writes the answers to each kind once they are complete. Where `task.data` is given, equal
            answers that are there are not asked again. None: nowhere.

    Returns:
        A score per kind, in the order in which the kinds first appear, and every reply that was not there before.

    Raises:
        ValueError: The task has no items, a kind has items with and without choices, or an answer is not among its
            item's choices.
    """
    with own_code(f"items() of task '{task.name}'"):
        items = list(task.items(0, count))
    if not items:
        raise ValueError(f"{task.name}: no questions to score; ask for at least one")
    scores, given = list[Score](), list[Answered]()
    facts = {  # the facts that answers depend on
        **(records.identity if records else {}),
        "format": FORMAT,
        "data": task.data,
        "tokenizer": engine.tokenizer.fingerprint[:16],
        "context": engine.context,
        "device": engine.machine.device.type,
        "dtype": str(engine.model.embedding.weight.dtype).removeprefix("torch."),
    }
    for kind in dict.fromkeys(item.kind for item in items):
        name, of_kind = f"{task.name}/{kind}", [item for item in items if item.kind == kind]
        path = records and answers_file(records.folder, task.name, kind)
        header = facts | {"task": name, "asked": len(of_kind)}
        score = kept_score(path, header) if path and task.data and group.rank == 0 else None
        score = group.broadcast_object(score)
        if score is None:
            options = {item.choices is not None for item in of_kind}
            if task.example is None and len(options) == 2:
                raise ValueError(f"{name}: some items have choices and some have none; give them different kinds")
            ask = _likeliest if task.example is not None or options == {True} else _generated
            replies, settings = ask(engine, task, of_kind, name, base, group)
            chances = [1 / len(one.item.choices) if one.item.choices else one.item.chance for one in replies]
            settings["skipped"] = len(of_kind) - len(replies)
            score = accuracy(name, [reply.correct for reply in replies], chances, **settings)
            given.extend(replies)
            if path and group.rank == 0:
                answers = [(reply, int(reply.correct)) for reply in replies]
                write_answers(path, header | {"score": asdict(score)}, answers)
        scores.append(score)
    return scores, given


def fitting(engine: Engine, task: Task, items: Sequence[Item], base: bool) -> list[tuple[int, list[int]]]:
    """The numbers of the items that leave room for a reply, each with the ids of its prompt, from BOS on."""
    tokenizer = engine.tokenizer
    with own_code(f"{'base_prompt' if base else 'items'}() of task '{task.name}'"):
        prompts = [
            render_text(tokenizer, task.base_prompt(i)) if base else render_prompt(tokenizer, i.messages) for i in items
        ]
    return [(number, ids) for number, ids in enumerate(prompts) if len(ids) < engine.context]


def _generated(
    engine: Engine, task: Task, items: Sequence[Item], name: str, base: bool, group: ProcessGroup
) -> tuple[list[Answered], dict[str, Any]]:
    """The model's own words, which rank 0 grades: programs run once, and a limit of time cannot divide the ranks."""
    asked = fitting(engine, task, items, base)
    prompts = [ids for _, ids in asked]
    order = sorted(range(len(asked)), key=lambda row: len(prompts[row]))  # similar lengths: less padding

    def compute(rows: Sequence[int]) -> list[Completion]:
        stop = task.base_stop if base else ()
        how = {"max_tokens": task.max_tokens, "sampling": GREEDY, "stop": stop, "plain": base}
        return [samples[0] for samples in engine.generate([prompts[row] for row in rows], **how)]

    with Meter(name, len(asked), "questions", silent=group.rank != 0) as meter:
        batches = [order[first : first + BATCH_ROWS] for first in range(0, len(order), BATCH_ROWS)]
        done = on_ranks(batches, compute, group, meter.at)
    right = list[bool]()
    if group.rank == 0:
        own, texts = [items[number] for number, _ in asked], [reply.text for reply in done]
        with own_code(f"{'grade_all' if task.grade_all else 'grade'}() of task '{task.name}'"):
            graded = task.grade_all(own, texts) if task.grade_all else map(task.grade, own, texts)
            right = [bool(one) for one in graded]
        if len(right) != len(own):
            raise ValueError(
                f"grade_all() of task '{task.name}' gave {counted(len(right), 'grade')} for "
                f"{counted(len(own), 'reply')}: return one for each, and evaluate again"
            )
    right = group.broadcast_object(right)
    replies = [
        Answered(items[number], list(reply.parts), reply.text, correct, number)
        for (number, _), reply, correct in zip(asked, done, right, strict=True)
    ]
    return replies, Prompts(engine.tokenizer.bos, prompts).settings() if prompts else {}


def _likeliest(
    engine: Engine, task: Task, items: Sequence[Item], name: str, base: bool, group: ProcessGroup
) -> tuple[list[Answered], dict[str, Any]]:
    """The options of the least loss: a model that knows the answer but not how to reply is measured fairly.

    Of an item's choices, it is the least loss per byte, because a longer phrase always costs more; of a task's own
    `example`, per token. Source: GPT-3 (Brown et al., 2020, arXiv 2005.14165, section 2.4).
    """
    prompts, replies, cropped = Prompts(engine.tokenizer.bos), list[Answered](), 0
    with Meter(name, len(items), "questions", silent=group.rank != 0) as meter:
        for first in range(0, len(items), CHUNK):
            numbers = range(len(items))[first : first + CHUNK]
            made = [(number, _example(engine, task, items[number], name, base)) for number in numbers]
            examples = [(number, example) for number, example in made if example is not None]
            found = score_examples(
                engine.model,
                [example for _, example in examples],
                engine.machine,
                engine.tokenizer.vocab_size,
                lambda done, at=first: meter.at(at + done),
                group,
            )
            for (number, example), answer in zip(examples, found, strict=True):
                item, pick, correct = items[number], answer.pick, answer.correct
                if task.example is None:
                    sizes = [len(choice.encode("utf-8")) for choice in item.choices or ()]
                    pick = int(np.argmin(answer.nats(example) / sizes))
                    correct = (item.choices or ())[pick] == item.answer
                text = item.choices[pick] if item.choices else item.answer if correct else ""
                replies.append(Answered(item, [{"type": "text", "text": text}], text, correct, number, answer.losses))
                prompts.add(example.rows)
                cropped += example.cropped
    return replies, {**prompts.settings(), "cropped": cropped} if replies else {}


def _example(engine: Engine, task: Task, item: Item, name: str, base: bool) -> Example | None:
    """The rows of an item whose options are scored; None if they leave no room in the context."""
    if task.example is not None:
        return task.example(item, engine.tokenizer, engine.context)
    choices = item.choices or ()
    if not all(choices):
        raise ValueError(f"{name}: a choice of the item with the answer {item.answer!r} is empty: give each its text")
    if item.answer not in choices:
        raise ValueError(f"{name}: the answer {item.answer!r} is not one of {', '.join(choices)}")
    prompts = [ids for _, ids in fitting(engine, task, [item], base)]
    ids = [engine.tokenizer.encode(f" {choice}" if base else choice) for choice in choices]
    return choice_example(prompts[0], ids, choices.index(item.answer), engine.context) if prompts else None
