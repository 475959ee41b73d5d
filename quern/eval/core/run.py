"""Runs CORE: every task on one model, per-item answers on disk, and the mean of the centred accuracies.

The mean is called CORE only if all questions of all 22 tasks were asked. An interrupted evaluation continues with the
next task: the answers of a finished task are kept in a file, with the settings that they depend on.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quern.eval.core.prompts import Example, make_example, shuffled
from quern.eval.core.scoring import Answer, score_examples
from quern.eval.core.tasks import BY_NAME, TASKS, VERSIONS, CoreTask, find_file, read_rows
from quern.eval.score import Score, accuracy, prompt_hash
from quern.machine import Machine
from quern.model.base import LanguageModel
from quern.temporaries import sha256_of, write_whole
from quern.terminal import Meter, duration
from quern.text.tokenizer import Tokenizer

CONFIDENT = 1.96
"""Standard errors on each side of a mean."""


@dataclass(frozen=True)
class Subject:
    """The model that is asked.

    Args:
        model: In evaluation mode.
        tokenizer: Its tokenizer.
        machine: The machine that computes.
        identity: JSON values that name the model, such as run, stage and step; answers of another one are not reused.
    """

    model: LanguageModel
    tokenizer: Tokenizer
    machine: Machine
    identity: dict[str, Any]


@dataclass(frozen=True)
class TaskResult:
    """One task's score. seconds: of scoring; tokens: read by the model, shared ones once."""

    task: CoreTask
    score: Score
    seconds: float
    tokens: int

    def error(self, version: str) -> float:
        """The standard error of the centred accuracy."""
        share, count = self.score.value or 0.0, self.score.count
        return math.sqrt(share * (1 - share) / count) / (1 - self.task.baseline(version))

    def centred(self, version: str) -> float:
        assert self.score.value is not None
        return self.task.centred(self.score.value, version)


def run_core(
    subject: Subject,
    bundle: Path,
    records: Path,
    log: Callable[[str], None],
    *,
    names: Sequence[str] = (),
    limit: int | None = None,
) -> list[Score]:
    """Asks CORE's tasks.

    Args:
        subject: The model.
        bundle: A folder with the tasks' files.
        records: A folder for the answers, one file per task.
        log: Takes lines for the user.
        names: Tasks by name; none are all whose file the bundle has.
        limit: The most items of each task.

    Returns:
        A score for each task, then the means by version.

    Raises:
        ValueError: A task does not exist, or its file is missing or damaged.
    """
    tasks = [_named(name) for name in names] or [task for task in TASKS if find_file(bundle, task)]
    absent = [task.name for task in tasks if find_file(bundle, task) is None]
    if absent or not tasks:
        raise ValueError(f"{bundle} has no file for {', '.join(absent) or 'any task of CORE'}: give its folder")
    missing = [task.name for task in TASKS if task not in tasks]
    if missing:
        log(f"not asked: {', '.join(missing)}")
    results = []
    for number, task in enumerate(tasks, start=1):
        result = _run_task(subject, task, bundle, records, limit, f"{task.name} ({number} of {len(tasks)})")
        results.append(result)
        log(f"  {_line(result)}")
    means = [_mean(results, version, missing, limit) for version in VERSIONS]
    for score in means:
        if score.value is not None:
            log(f"  {score.task}: {score.value:.4f} ({score.low:.4f} to {score.high:.4f})")
    return [*(result.score for result in results), *means]


def _named(name: str) -> CoreTask:
    if name not in BY_NAME:
        raise ValueError(f"CORE has no task '{name}': use {', '.join(BY_NAME)}")
    return BY_NAME[name]


def _run_task(
    subject: Subject, task: CoreTask, bundle: Path, records: Path, limit: int | None, label: str
) -> TaskResult:
    path = find_file(bundle, task)
    assert path is not None
    context = int(subject.model.shape.context or 0)
    header = {
        **subject.identity,
        "task": task.name,
        "data": sha256_of(path)[:16],
        "tokenizer": subject.tokenizer.fingerprint[:16],
        "context": context,
        "limit": limit,
    }
    target = records / f"{task.name}.jsonl"
    if kept := _kept(target, header):
        return _result(task, kept)
    rows = shuffled(read_rows(path, task))
    asked = range(len(rows) if limit is None else min(limit, len(rows)))
    made = [make_example(task, rows, item, subject.tokenizer, context) for item in asked]
    examples = [example for example in made if example is not None]
    start = time.monotonic()
    with Meter(label, len(examples), "questions") as meter:
        answers = score_examples(
            subject.model, examples, subject.machine, subject.tokenizer.vocab_size, progress=meter.at
        )
    summary = {
        "skipped": len(made) - len(examples),
        "cropped": sum(example.cropped for example in examples),
        "seconds": round(time.monotonic() - start, 3),
        "tokens": sum(_tokens(example) for example in examples),
        "prompts": prompt_hash([row for example in examples for row in example.rows]),
        "bos": all(row[0] == subject.tokenizer.bos for example in examples for row in example.rows),
        "chance": _chance(examples),
    }
    lines = [header | summary, *(_item(one, answer) for one, answer in zip(examples, answers, strict=True))]
    records.mkdir(parents=True, exist_ok=True)
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


def _chance(examples: Sequence[Example]) -> float:
    """The accuracy of a blind guess; 0 for a task without options."""
    shares = [1 / len(example.rows) if len(example.rows) > 1 else 0.0 for example in examples]
    return sum(shares) / len(shares) if shares else 0.0


def _kept(path: Path, header: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The lines of a finished task, if they are of the same model, data and settings."""
    if not path.is_file():
        return None
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return lines if {name: lines[0].get(name) for name in header} == header else None


def _result(task: CoreTask, lines: list[dict[str, Any]]) -> TaskResult:
    summary, items = lines[0], lines[1:]
    name = f"core/{task.name}"
    if not items:
        score = Score(name, "accuracy", None, None, None, 0, None, shots=task.shots, skipped=summary["skipped"])
        return TaskResult(task, score, summary["seconds"], 0)
    score = accuracy(name, [one["correct"] for one in items], [summary["chance"]] * len(items), [], bos=0)
    score = replace(
        score,
        prompt_hash=summary["prompts"],
        bos=summary["bos"],
        shots=task.shots,
        cropped=summary["cropped"],
        skipped=summary["skipped"],
    )
    return TaskResult(task, score, summary["seconds"], summary["tokens"])


def _line(result: TaskResult) -> str:
    score = result.score
    if score.value is None:
        return f"{result.task.name:32} none of its {score.skipped} questions fits the context"
    centred = ", ".join(f"{version} {result.centred(version):+.3f}" for version in VERSIONS)
    left = f", {score.skipped} left out" if score.skipped else ""
    cut = f", {score.cropped} cut to the context" if score.cropped else ""
    speed = f"{result.tokens / result.seconds:,.0f} tokens/s" if result.seconds else ""
    return (
        f"{result.task.name:32} {score.value:.3f} ({score.low:.3f} to {score.high:.3f}), centred {centred}; "
        f"{score.count:,} questions{left}{cut} in {duration(result.seconds)}, {speed}"
    )


def _mean(results: Sequence[TaskResult], version: str, missing: Sequence[str], limit: int | None) -> Score:
    """The mean of the centred accuracies. It is CORE only if nothing is missing."""
    measured = [result for result in results if result.score.value is not None]
    whole = not missing and limit is None and not any(result.score.skipped for result in results)
    name = f"CORE {version}" if whole else f"mean of {len(measured)} of CORE's {len(TASKS)} tasks, {version}"
    name += "" if limit is None else f", {limit} questions each"
    if not measured:
        return Score(name, "centred accuracy", None, None, None, 0, None)
    value = sum(result.centred(version) for result in measured) / len(measured)
    error = math.sqrt(sum(result.error(version) ** 2 for result in measured)) / len(measured)
    questions = sum(result.score.count for result in measured)
    return Score(name, "centred accuracy", value, value - CONFIDENT * error, value + CONFIDENT * error, questions, 0.0)
