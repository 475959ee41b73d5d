"""CORE's questions and scores, written a second time from nanochat's core_eval.py: one row at a time, no cache, fp32.

`verdict` and `questions` share no code with quern/eval/core: texts are joined, tokenized, compared and scored here.
"""

import gzip
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path
from typing import Any

import torch

from quern.eval.core import CoreTask
from quern.model.base import LanguageModel
from quern.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Question:
    """rows: the ids of each option before any cut; starts: where the scored span of each begins, to the row's end."""

    item: int
    rows: list[list[int]]
    starts: list[int]
    gold: int


@dataclass(frozen=True)
class Verdict:
    """losses: mean nats of each option. margin: of the two best losses, or, in language modelling, the least distance
    (nats) between a token's logit and the best other one: how far the verdict is from a tie."""

    losses: list[float]
    correct: bool
    margin: float


def questions(path: Path, task: CoreTask, tokenizer: Tokenizer) -> list[Question]:
    """The questions of a task's file, in the order of the random numbers of nanochat."""
    content = path.read_bytes()
    lines = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8").splitlines()
    data = [json.loads(line) for line in lines if line.strip()]
    random.Random(1337).shuffle(data)
    return [_question(data, item, task, tokenizer) for item in range(len(data))]


def _question(data: Sequence[dict[str, Any]], item: int, task: CoreTask, tokenizer: Tokenizer) -> Question:
    others = [at for at in range(len(data)) if at != item]
    shots = [data[at] for at in random.Random(1234 + item).sample(others, task.shots)]
    row, gap = data[item], task.delimiter
    if task.kind == "language":
        solved = [f"{shot['context'].strip()}{gap}{shot['continuation']}" for shot in shots]
        ask = "\n\n".join([*solved, f"{row['context'].strip()}{gap}"])
        texts, gold = [ask.strip(), ask + row["continuation"]], 0
    elif task.kind == "schema":
        solved = [f"{shot['context_options'][shot['gold']]}{gap}{shot['continuation']}" for shot in shots]
        options = [f"{context}{gap}{row['continuation']}" for context in row["context_options"]]
        texts, gold = ["\n\n".join([*solved, option]) for option in options], row["gold"]
    else:
        solved = [f"{shot['query']}{gap}{shot['choices'][shot['gold']]}" for shot in shots]
        options = [f"{row['query']}{gap}{choice}" for choice in row["choices"]]
        texts, gold = ["\n\n".join([*solved, option]) for option in options], row["gold"]
    ids = [[tokenizer.bos, *tokenizer.encode(text)] for text in texts]
    if task.kind == "language":
        return Question(item, ids[1:], [len(commonprefix(ids))], gold)
    if task.kind == "schema":
        ending = len(commonprefix([each[::-1] for each in ids]))
        return Question(item, ids, [len(each) - ending for each in ids], gold)
    # An option that is the beginning of another one keeps its last token.
    start = min(len(commonprefix(ids)), *(len(each) - 1 for each in ids))
    return Question(item, ids, [start] * len(ids), gold)


def verdict(model: LanguageModel, question: Question, kind: str, context: int, vocab_size: int) -> Verdict:
    """Scores a question: every option goes through the whole model alone, without a cache."""
    losses, says, margin = [], True, float("inf")
    for ids, start in zip(question.rows, question.starts, strict=True):
        row = ids[-(context + 1) :]
        first = start - (len(ids) - len(row))
        tokens = torch.tensor([row[:-1]])
        with torch.no_grad():
            x_BTD = model(tokens, model.context(tokens))
            logits_NV = model.logits(x_BTD[0, first - 1 :])[:, :vocab_size].float()
        targets = torch.tensor(row[first:])
        losses.append(torch.nn.functional.cross_entropy(logits_NV.double(), targets).item())
        own_N = logits_NV.gather(1, targets[:, None])[:, 0]
        best_N = logits_NV.scatter(1, targets[:, None], float("-inf")).amax(1)
        says = says and bool((own_N > best_N).all())
        margin = min(margin, (own_N - best_N).abs().min().item())
    if kind == "language":
        return Verdict(losses, says, margin)
    best, second = sorted(losses)[:2]
    return Verdict(losses, losses.index(best) == question.gold, second - best)
