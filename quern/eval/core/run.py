"""Runs CORE: every task on one model, per-item answers on disk, and the mean of the centred accuracies.

The mean is called CORE only if all questions of all 22 tasks were asked. An interrupted evaluation continues with the
next task: the answers of a finished task are kept in a file, with the settings that they depend on.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quern.eval.core.prompts import make_example, shuffled
from quern.eval.core.tasks import BY_NAME, TASKS, VERSIONS, CoreTask, read_rows
from quern.eval.likelihood import Answer, Example, score_examples
from quern.eval.on_ranks import is_main
from quern.eval.score import CONFIDENT, Score, accuracy, prompt_hash
from quern.machine import Machine
from quern.mesh import ProcessGroup
from quern.model.base import LanguageModel
from quern.records import read_lines
from quern.temporaries import sha256_of, write_whole
from quern.terminal import Meter, counted, duration
from quern.text.tokenizer import Tokenizer

CHUNK = 256
"""Items whose prompts are in memory at a time."""
FORMAT = 2
"""Of the answers. Higher numbers for other prompts or spans: answers of an old format are not reused."""


@dataclass(frozen=True)
class Subject:
    """The model that is asked.

    Args:
        model: In evaluation mode.
        tokenizer: Its tokenizer.
        machine: The machine that computes.
        identity: JSON values that name the model, such as run, stage and step; answers of another one are not reused.
        group: The ranks that score some batches each; rank 0 writes. None is a single process.
    """

    model: LanguageModel
    tokenizer: Tokenizer
    machine: Machine
    identity: dict[str, Any]
    group: ProcessGroup | None = None


@dataclass(frozen=True)
class TaskResult:
    """One task's score. seconds: of scoring; tokens: read by the model, shared ones once; whole: all questions were
    asked."""

    task: CoreTask
    score: Score
    seconds: float
    tokens: int
    whole: bool = False

    def error(self, version: str) -> float:
        """The standard error of the centred accuracy."""
        share, count = self.score.value or 0.0, self.score.count
        return math.sqrt(share * (1 - share) / count) / (1 - self.task.baseline(version))

    def centred(self, version: str) -> float:
        assert self.score.value is not None
        return self.task.centred(self.score.value, version)


def run_core(
    subject: Subject,
    tasks: Sequence[tuple[CoreTask, Path]],
    records: Path,
    log: Callable[[str], None],
    *,
    limit: int | None = None,
) -> list[Score]:
    """Asks CORE's tasks.

    Args:
        subject: The model.
        tasks: With their files, as from `find_tasks`.
        records: A folder for the answers, one file per task.
        log: Takes lines for the user.
        limit: The most items of each task.

    Returns:
        A score for each task, then the means by version.

    Raises:
        ValueError: A file is damaged.
    """
    asked = {task for task, _ in tasks}
    missing = [task.name for task in TASKS if task not in asked]
    if missing:
        log(f"not asked: {', '.join(missing)}")
    results = []
    for number, (task, path) in enumerate(tasks, start=1):
        label = f"{task.name} ({number} of {len(tasks)})"
        results.append(_run_task(subject, task, path, records / f"{task.name}.answers.jsonl", limit, label))
        log(f"  {_line(results[-1])}")
    means = [_mean(results, version, limit) for version in VERSIONS]
    for score in means:
        if score.value is not None:
            log(f"  {score.task}: {score.value:.4f} ({score.low:.4f} to {score.high:.4f})")
    return [*(result.score for result in results), *means]


def _run_task(subject: Subject, task: CoreTask, path: Path, target: Path, limit: int | None, label: str) -> TaskResult:
    model, tokenizer, machine, group = subject.model, subject.tokenizer, subject.machine, subject.group
    context = int(model.shape.context or 0)
    header = {
        **subject.identity,
        "format": FORMAT,
        "task": task.name,
        "data": sha256_of(path)[:16],
        "tokenizer": tokenizer.fingerprint[:16],
        "context": context,
        "limit": limit,
        "device": machine.device.type,
        "dtype": str(model.embedding.weight.dtype).removeprefix("torch."),
    }
    kept = _kept(target, header) if is_main(group) else None
    if kept := kept if group is None else group.broadcast_object(kept):
        return _result(task, kept)
    rows = shuffled(read_rows(path, task))
    asked = range(len(rows) if limit is None else min(limit, len(rows)))
    lines: list[dict[str, Any]] = []
    skipped = cropped = tokens = 0
    begins_with_bos, start = True, time.monotonic()
    with Meter(label, len(asked), "questions", silent=not is_main(group)) as meter:
        for first in range(0, len(asked), CHUNK):
            items = asked[first : first + CHUNK]
            made = [make_example(task, rows, item, tokenizer, context) for item in items]
            examples = [example for example in made if example is not None]
            answers = score_examples(
                model, examples, machine, tokenizer.vocab_size, lambda done, at=first: meter.at(at + done), group
            )
            lines += [_item(example, answer) for example, answer in zip(examples, answers, strict=True)]
            skipped += len(made) - len(examples)
            cropped += sum(example.cropped for example in examples)
            tokens += sum(_tokens(example) for example in examples)
            begins_with_bos &= all(row[0] == tokenizer.bos for example in examples for row in example.rows)
    summary = {
        "rows": len(rows),
        "skipped": skipped,
        "cropped": cropped,
        "seconds": round(time.monotonic() - start, 3),
        "tokens": tokens,
        "bos": begins_with_bos,
    }
    lines = [header | summary, *lines]
    if is_main(group):
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, "".join(json.dumps(line) + "\n" for line in lines))
    return _result(task, lines)


def _item(example: Example, answer: Answer) -> dict[str, Any]:
    return {
        "item": example.item,
        "prompt": prompt_hash(example.rows),
        "pick": answer.pick,
        "gold": example.gold,
        "correct": answer.correct,
        "losses": [round(loss, 6) for loss in answer.losses],
    }


def _tokens(example: Example) -> int:
    return example.shared + sum(len(row) - 1 - example.shared for row in example.rows)


def _kept(path: Path, header: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The lines of a finished task, if they are whole, and of the same model, data and settings."""
    if not path.is_file():
        return None
    try:
        first, *items = lines = read_lines(path)
        asked = first["rows"] if header["limit"] is None else min(header["limit"], first["rows"])
        same = {name: first.get(name) for name in header} == header and len(items) == asked - first["skipped"]
        _result(BY_NAME[header["task"]], lines)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None  # damaged: the task is asked again
    return lines if same else None


def _result(task: CoreTask, lines: list[dict[str, Any]]) -> TaskResult:
    summary, items = lines[0], lines[1:]
    name = f"core/{task.name}"
    if not items:
        score = Score(name, "accuracy", None, None, None, 0, None, shots=task.shots, skipped=summary["skipped"])
        return TaskResult(task, score, summary["seconds"], 0)
    chances = [1 / len(one["losses"]) if len(one["losses"]) > 1 else 0.0 for one in items]
    score = accuracy(name, [one["correct"] for one in items], chances, [], bos=0)
    score = replace(
        score,
        prompt_hash=hashlib.sha256("".join(one["prompt"] for one in items).encode("ascii")).hexdigest()[:16],
        bos=summary["bos"],
        shots=task.shots,
        cropped=summary["cropped"],
        skipped=summary["skipped"],
    )
    return TaskResult(task, score, summary["seconds"], summary["tokens"], len(items) == summary["rows"])


def _line(result: TaskResult) -> str:
    score = result.score
    if score.value is None:
        return f"{result.task.name:32} none of its {counted(score.skipped, 'question')} fits the context"
    centred = ", ".join(f"{version} {result.centred(version):+.3f}" for version in VERSIONS)
    left = f", {score.skipped} left out" if score.skipped else ""
    cut = f", {score.cropped} cut to the context" if score.cropped else ""
    speed = f"{result.tokens / result.seconds:,.0f} tokens/s" if result.seconds else ""
    return (
        f"{result.task.name:32} {score.value:.3f} ({score.low:.3f} to {score.high:.3f}), centred {centred}; "
        f"{counted(score.count, 'question')}{left}{cut} in {duration(result.seconds)}, {speed}"
    )


def _mean(results: Sequence[TaskResult], version: str, limit: int | None) -> Score:
    """The mean of the centred accuracies. It is CORE only if all questions of all tasks were asked.

    The interval takes the tasks as independent, although two of them ask the same questions, with and without shots.
    """
    measured = [result for result in results if result.score.value is not None]
    name = f"CORE {version}"
    if len(measured) < len(TASKS) or not all(result.whole for result in results):
        skipped = sum(result.score.skipped for result in results)
        name = f"mean of {len(measured)} of CORE's {len(TASKS)} tasks, {version}"
        name += "" if limit is None else f", {counted(limit, 'question')} each"
        name += f", {counted(skipped, 'question')} left out" if skipped else ""
    if not measured:
        return Score(name, "centred accuracy", None, None, None, 0, None)
    value = sum(result.centred(version) for result in measured) / len(measured)
    error = math.sqrt(sum(result.error(version) ** 2 for result in measured)) / len(measured)
    questions = sum(result.score.count for result in measured)
    return Score(name, "centred accuracy", value, value - CONFIDENT * error, value + CONFIDENT * error, questions, 0.0)
