"""Runs an evaluation task on a model: asks its items, grades the replies, and computes one score per kind."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quern.eval.generative import Answered, generative
from quern.eval.likelihood import MultipleChoice, multiple_choice
from quern.eval.score import Score, none_asked
from quern.eval.task import Item, Task
from quern.generate.engine import Engine
from quern.mesh import ProcessGroup
from quern.text.chat import render_prompt, render_text


@dataclass(frozen=True)
class Graded:
    """One Score per kind, in the order in which the kinds first appear, and every reply."""

    scores: list[Score]
    replies: list[Answered]


def run_task(
    engine: Engine,
    task: Task,
    *,
    seed: int = 0,
    count: int = 200,
    base: bool = False,
    batch_rows: int = 32,
    group: ProcessGroup | None = None,
) -> Graded:
    """Asks the items of a task.

    An item whose prompt leaves the context no room for a reply is not asked. `Score.skipped` counts these items; if no
    item of a kind fits, the Score has a count of 0 and no value.

    Args:
        seed: Seed of the items.
        count: The largest number of items of each kind.
        base: Ask by the task's `base_prompt` instead of in the chat format, for a model without fine-tuning.
        group: The ranks that ask some batches each, and all get every reply; None is a single process.

    Raises:
        ValueError: The task has no items, or a kind has items with and without choices.
    """
    items = task.items(seed, count)
    if not items:
        raise ValueError(f"{task.name}: no questions to score; ask for at least one")
    scores: list[Score] = []
    replies: list[Answered] = []
    for kind in dict.fromkeys(item.kind for item in items):
        name, of_kind = f"{task.name}/{kind}", [item for item in items if item.kind == kind]
        if len({item.choices is None for item in of_kind}) == 2:
            raise ValueError(f"{name}: some items have choices and some have none; give them different kinds")
        asked = [(item, ids) for item in of_kind if len(ids := prompt_ids(engine, task, item, base)) < engine.context]
        skipped = len(of_kind) - len(asked)
        if not asked:
            scores.append(none_asked(name, skipped))
            continue
        chosen, prompts = [item for item, _ in asked], [ids for _, ids in asked]
        if chosen[0].choices is None:
            score, answered = generative(
                engine,
                chosen,
                prompts,
                task.grade_all or (lambda items, replies: list(map(task.grade, items, replies))),
                task=name,
                max_tokens=task.max_tokens,
                batch_rows=batch_rows,
                base_stop=task.base_stop if base else None,
                group=group,
            )
        else:
            score, answered = _likeliest(engine, task, chosen, prompts, base, group)
        scores.append(replace(score, skipped=skipped))
        replies += answered
    return Graded(scores, replies)


def prompt_ids(engine: Engine, task: Task, item: Item, base: bool) -> list[int]:
    """The token ids of an item's prompt, from BOS on."""
    if base:
        return render_text(engine.tokenizer, task.base_prompt(item))
    return render_prompt(engine.tokenizer, item.messages)


def _likeliest(
    engine: Engine,
    task: Task,
    items: Sequence[Item],
    prompts: Sequence[list[int]],
    base: bool,
    group: ProcessGroup | None,
) -> tuple[Score, list[Answered]]:
    """Picks the likeliest choice: a model that knows the answer but not how to reply is measured fairly."""
    asked = []
    for item, prompt in zip(items, prompts, strict=True):
        choices = item.choices or ()
        if item.answer not in choices:
            raise ValueError(f"{task.name}/{item.kind}: the answer {item.answer!r} is not one of {', '.join(choices)}")
        ids = tuple(engine.tokenizer.encode(f" {choice}" if base else choice) for choice in choices)
        asked.append(MultipleChoice(item.kind, prompt, choices, ids, choices.index(item.answer)))
    score, picks = multiple_choice(
        engine.model,
        asked,
        engine.machine,
        task=f"{task.name}/{items[0].kind}",
        bos=engine.tokenizer.bos,
        context=engine.context,
        vocab_size=engine.tokenizer.vocab_size,
        length=task.length,
        group=group,
    )
    answered = []
    for item, question, pick in zip(items, asked, picks, strict=True):
        text = question.choices[pick]
        answered.append(Answered(item, [{"type": "text", "text": text}], text, pick == question.correct))
    return score, answered
