"""CORE's prompts: solved examples, then the question, as rows of token ids with the span that is scored.

The shots of item i are drawn from all other rows by `random.Random(1234 + i)`, where i is the item's number in the
order of `random.Random(1337)`. Every row begins with BOS. A row that does not fit is cut from its left, by itself, as
nanochat and lm-evaluation-harness do.

Source: the evaluation code of DCLM (arXiv 2406.11794) and of nanochat, which define delimiters, seeds and spans.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quern.eval.core.tasks import CoreTask, read_rows
from quern.eval.likelihood import Example, common, fit
from quern.text.tokenizer import Tokenizer

ORDER_SEED, SHOTS_SEED = 1337, 1234


def shuffled(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows in the order in which they are numbered and asked."""
    order = list(rows)
    random.Random(ORDER_SEED).shuffle(order)
    return order


def make_example(
    task: CoreTask, rows: Sequence[dict[str, Any]], item: int, tokenizer: Tokenizer, context: int
) -> Example | None:
    """Builds one item.

    Args:
        task: The task.
        rows: All rows, shuffled.
        item: Index of the item.
        tokenizer: Of the model.
        context: The most tokens that the model reads.

    Returns:
        The example; None if a scored span, with one token before it, does not fit the context.
    """
    drawn = random.Random(SHOTS_SEED + item).sample(range(len(rows) - 1), task.shots)
    shots = [rows[at + (at >= item)] for at in drawn]  # of all rows but this one
    before = "".join(f"{_solved(task, shot)}\n\n" for shot in shots)
    asked = rows[item]
    if task.kind == "language":
        question = (before + asked["context"].strip() + task.delimiter).strip()
        answered = before + asked["context"].strip() + task.delimiter + asked["continuation"]
        prompt, whole = _ids(tokenizer, question), _ids(tokenizer, answered)
        return fit(item, [whole], [common([prompt, whole])], 0, context)
    if task.kind == "choice":
        texts = [f"{before}{asked['query']}{task.delimiter}{choice}" for choice in asked["choices"]]
        ids = [_ids(tokenizer, text) for text in texts]
        # Of two options that begin alike, one may end where the other goes on: its last token is still scored.
        start = min(common(ids), min(map(len, ids)) - 1)
        return fit(item, ids, [start] * len(ids), asked["gold"], context)
    texts = [f"{before}{option}{task.delimiter}{asked['continuation']}" for option in asked["context_options"]]
    ids = [_ids(tokenizer, text) for text in texts]
    ending = common([row[::-1] for row in ids])
    return fit(item, ids, [len(row) - ending for row in ids], asked["gold"], context)


def core_passages(task: CoreTask, path: Path, limit: int | None = None) -> list[str]:
    """The texts of a task's questions, with their answers, that are looked for in the training text.

    Raises:
        ValueError: The file is damaged.
    """
    return [_passage(task, row) for row in shuffled(read_rows(path, task))[:limit]]


def _passage(task: CoreTask, row: dict[str, Any]) -> str:
    if task.kind == "choice":
        return f"{row['query'].removeprefix('Question: ')} {row['choices'][row['gold']]}"
    if task.kind == "schema":
        return f"{row['context_options'][row['gold']]} {row['continuation']}"
    return f"{row['context']} {row['continuation']}"


def _solved(task: CoreTask, row: dict[str, Any]) -> str:
    if task.kind == "choice":
        return f"{row['query']}{task.delimiter}{row['choices'][row['gold']]}"
    if task.kind == "schema":
        return f"{row['context_options'][row['gold']]}{task.delimiter}{row['continuation']}"
    return f"{row['context'].strip()}{task.delimiter}{row['continuation']}"


def _ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return (tokenizer.bos, *tokenizer.encode(text))
