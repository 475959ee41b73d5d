"""Runs CORE: every task on one model, per-item answers on disk, and the mean of the centred accuracies.

The mean is called CORE only if all questions of all 22 tasks were asked. An interrupted evaluation continues with the
next task: the answers of a finished task are kept in a file, with the settings that they depend on.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quern.eval.answers import ENDING, write_lines
from quern.eval.core.tasks import BY_NAME, TASKS, VERSIONS, CoreTask, make_example, read_rows
from quern.eval.likelihood import score_examples
from quern.eval.score import Score, accuracy, is_main, mean_score, prompt_hash
from quern.generate.engine import Engine
from quern.mesh import ProcessGroup
from quern.records import read_lines
from quern.temporaries import sha256_of
from quern.terminal import Meter, counted, duration

CHUNK = 256
"""Items whose prompts are in memory at a time."""
FORMAT = 2
"""The version of the answers. Higher numbers for other prompts or spans: answers of an old format are not reused."""

Lines = list[dict[str, Any]]
"""A file of answers: the settings, then each item."""


def run_core(
    engine: Engine,
    tasks: Sequence[tuple[CoreTask, Path]],
    records: Path,
    identity: dict[str, Any],
    log: Callable[[str], None],
    *,
    limit: int | None = None,
    group: ProcessGroup | None = None,
) -> list[Score]:
    """Asks CORE's tasks.

    Args:
        engine: The model.
        tasks: With their files, as from `find_tasks`.
        records: A folder for the answers, one file per task.
        identity: JSON values that name the model, such as run, stage and step; answers of another one are not reused.
        log: Takes lines for the user.
        limit: The most items of each task.
        group: The ranks that score some batches each; rank 0 writes. None is a single process.

    Returns:
        A score for each task, then the means by version.

    Raises:
        ValueError: A file is damaged.
    """
    asked = {task for task, _ in tasks}
    if missing := [task.name for task in TASKS if task not in asked]:
        log(f"not asked: {', '.join(missing)}")
    scores, whole = [], True
    for number, (task, path) in enumerate(tasks, start=1):
        target, header = records / f"{task.name}{ENDING}", _header(engine, task, path, identity, limit)
        lines = _kept(target, header) if is_main(group) else None
        lines = lines if group is None else group.broadcast_object(lines)
        if lines is None:
            lines = _ask(engine, task, path, header, f"{task.name} ({number} of {len(tasks)})", group)
            if is_main(group):
                write_lines(target, lines)
        scores.append(_score(task, lines))
        whole &= len(lines) - 1 == lines[0]["rows"]
        log(f"  {_told(task, scores[-1], lines[0])}")
    means = [_mean(scores, version, limit, whole) for version in VERSIONS]
    for score in means:
        if score.value is not None:
            log(f"  {score.task}: {score.value:.4f} ({score.low:.4f} to {score.high:.4f})")
    return [*scores, *means]


def _header(engine: Engine, task: CoreTask, path: Path, identity: dict[str, Any], limit: int | None) -> dict[str, Any]:
    """The settings that a task's answers depend on."""
    return {
        **identity,
        "format": FORMAT,
        "task": task.name,
        "data": sha256_of(path)[:16],
        "tokenizer": engine.tokenizer.fingerprint[:16],
        "context": engine.context,
        "limit": limit,
        "device": engine.machine.device.type,
        "dtype": str(engine.model.embedding.weight.dtype).removeprefix("torch."),
    }


def _ask(
    engine: Engine, task: CoreTask, path: Path, header: dict[str, Any], label: str, group: ProcessGroup | None
) -> Lines:
    model, tokenizer, machine = engine.model, engine.tokenizer, engine.machine
    rows, start, lines = read_rows(path, task), time.monotonic(), Lines()
    asked = range(len(rows))[: header["limit"]]
    skipped = cropped = tokens = 0
    bos = True
    with Meter(label, len(asked), "questions", silent=not is_main(group)) as meter:
        for first in range(0, len(asked), CHUNK):
            made = {
                item: make_example(task, rows, item, tokenizer, engine.context) for item in asked[first : first + CHUNK]
            }
            examples = {item: example for item, example in made.items() if example is not None}
            answers = score_examples(
                model,
                list(examples.values()),
                machine,
                tokenizer.vocab_size,
                lambda done, at=first: meter.at(at + done),
                group,
            )
            for (item, example), answer in zip(examples.items(), answers, strict=True):
                known = {"item": item, "prompt": prompt_hash(example.rows), "pick": answer.pick, "gold": example.gold}
                losses = [round(loss, 6) for loss in answer.losses]
                lines.append({**known, "correct": answer.correct, "losses": losses})
                cropped += example.cropped
                tokens += example.shared + sum(len(row) - 1 - example.shared for row in example.rows)
                bos &= all(row[0] == tokenizer.bos for row in example.rows)
            skipped += len(made) - len(examples)
    spent = {"seconds": round(time.monotonic() - start, 3), "tokens": tokens, "bos": bos}
    return [header | {"rows": len(rows), "skipped": skipped, "cropped": cropped} | spent, *lines]


def _kept(path: Path, header: dict[str, Any]) -> Lines | None:
    """The lines of a finished task, if they are whole, and of the same model, data and settings."""
    if not path.is_file():
        return None
    try:
        first, *items = lines = read_lines(path)
        asked = len(range(first["rows"])[: header["limit"]])
        same = {name: first.get(name) for name in header} == header and len(items) == asked - first["skipped"]
        _score(BY_NAME[header["task"]], lines)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None  # damaged: the task is asked again
    return lines if same else None


def _score(task: CoreTask, lines: Lines) -> Score:
    summary, items = lines[0], lines[1:]
    settings: dict[str, Any] = {"shots": task.shots, "skipped": summary["skipped"]}
    if items:
        digest = hashlib.sha256("".join(one["prompt"] for one in items).encode("ascii")).hexdigest()[:16]
        settings |= {"prompt_hash": digest, "bos": summary["bos"], "cropped": summary["cropped"]}
    chances = [1 / len(one["losses"]) if len(one["losses"]) > 1 else 0.0 for one in items]
    return accuracy(f"core/{task.name}", [one["correct"] for one in items], chances, **settings)


def _told(task: CoreTask, score: Score, summary: dict[str, Any]) -> str:
    if score.value is None:
        return f"{task.name:32} none of its {counted(score.skipped, 'question')} fits the context"
    means = (mean_score(version, [(score, task.baseline(version))]).value or 0.0 for version in VERSIONS)
    centred = ", ".join(f"{version} {mean:+.3f}" for version, mean in zip(VERSIONS, means, strict=True))
    left = f", {score.skipped} left out" if score.skipped else ""
    cut = f", {score.cropped} cut to the context" if score.cropped else ""
    seconds = summary["seconds"]
    speed = f"{summary['tokens'] / seconds:,.0f} tokens/s" if seconds else ""
    return (
        f"{task.name:32} {score.value:.3f} ({score.low:.3f} to {score.high:.3f}), centred {centred}; "
        f"{counted(score.count, 'question')}{left}{cut} in {duration(seconds)}, {speed}"
    )


def _mean(scores: Sequence[Score], version: str, limit: int | None, whole: bool) -> Score:
    """The mean of the centred accuracies. It is CORE only if all questions of all tasks were asked."""
    measured = sum(score.value is not None for score in scores)
    name = f"CORE {version}"
    if measured < len(TASKS) or not whole:
        skipped = sum(score.skipped for score in scores)
        name = f"mean of {measured} of CORE's {len(TASKS)} tasks, {version}"
        name += "" if limit is None else f", {counted(limit, 'question')} each"
        name += f", {counted(skipped, 'question')} left out" if skipped else ""
    return mean_score(name, [(score, BY_NAME[score.task.removeprefix("core/")].baseline(version)) for score in scores])
