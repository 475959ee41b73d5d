"""The chat tasks as `Task`s, their run on one model, and ChatCORE.

ChatCORE is the mean of the centred accuracies (p − b) / (1 − b) of ARC-Easy, ARC-Challenge, MMLU (b = 0.25), GSM8K and
HumanEval (b = 0), as in nanochat. It has the name only if all questions of the five tasks were asked.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from quern.eval import gsm8k
from quern.eval.answers import ENDING, write_answers, write_items
from quern.eval.chat.files import read_items
from quern.eval.chat.humaneval import BASE_STOP, RunPrograms, passed, sampled_scores
from quern.eval.on_ranks import is_main
from quern.eval.run_task import prompt_ids, run_task
from quern.eval.score import CONFIDENT, Score
from quern.eval.task import Item, Task
from quern.eval.tasks import tinyworld
from quern.generate.engine import Engine
from quern.generate.sandbox import Sandbox, SandboxError
from quern.mesh import ProcessGroup
from quern.runs.public_data import fetch_tests
from quern.terminal import counted
from quern.text.sources import find_file
from quern.text.tinyworld.corpus import questions

CHAT = "chat"
GENERATED = 256
"""Questions of spelling and of counting, without a limit."""
ORDER_SEED = 1337


@dataclass(frozen=True)
class ChatTask:
    """One task.

    Args:
        name: Its score is "chat/NAME".
        baseline: The accuracy that counts as 0 in ChatCORE; None: the task is no part of it.
        max_tokens: The largest number of tokens of a reply.
        has_file: Whether its questions are in a file. The others are made.
    """

    name: str
    baseline: float | None = None
    max_tokens: int = 96
    has_file: bool = True


TASKS = (
    ChatTask("arc_easy", 0.25),
    ChatTask("arc_challenge", 0.25),
    ChatTask("mmlu", 0.25),
    ChatTask("gsm8k", 0.0, 512),
    ChatTask("humaneval", 0.0, 512),
    ChatTask("spelling", has_file=False),
    ChatTask("counting", has_file=False),
)
PARTS = tuple(task for task in TASKS if task.baseline is not None)
"""Of ChatCORE."""


@dataclass(frozen=True)
class Asked:
    """A task with its items in the order in which they are asked. whole: they are all that the task has."""

    task: ChatTask
    items: list[Item]
    whole: bool


def find_chat_tasks(
    folder: Path | None, out: Path, names: Sequence[str], limit: int | None, log: Callable[[str], None]
) -> list[Asked]:
    """Tasks with their items.

    Args:
        folder: Has the files, also in its subfolders. None: they are downloaded.
        out: The output folder, for downloads.
        names: Tasks by name; none are all that can be asked. Those that cannot are logged.
        limit: The most items of each task: the first ones of an order that is always the same.
        log: Takes lines for the user.

    Raises:
        ValueError: A task does not exist, has no file or several, or its file is damaged.
        OSError: A file cannot be downloaded.
        SandboxError: HumanEval is named, and no sandbox works on this machine.
    """
    unknown = [name for name in names if name not in {task.name for task in TASKS}]
    if unknown:
        raise ValueError(f"chat has no task '{unknown[0]}': use {', '.join(task.name for task in TASKS)}")
    wanted = [task for task in TASKS if task.name in names or not names]
    with_files = [task.name for task in wanted if task.has_file]
    folder = folder or fetch_tests(with_files, out)
    paths = {name: find_file(folder, name, f"{name}_test", inside=(name, f"openai_{name}")) for name in with_files}
    absent = [name for name, path in paths.items() if path is None]
    if absent and names:
        raise ValueError(f"{folder} has no file for {', '.join(absent)}: give its folder, or leave the task out")
    if paths.get("humaneval") is not None:
        try:
            Sandbox(workers=1).close()
        except SandboxError as error:
            if names:
                raise
            absent.append("humaneval")
            log(f"no programs are run: {error}")
    if absent:
        log(f"not asked: {', '.join(f'{CHAT}/{name}' for name in absent)}")
    return [_asked(task, paths.get(task.name), limit) for task in wanted if task.name not in absent]


def _asked(task: ChatTask, path: Path | None, limit: int | None) -> Asked:
    if path is None:
        count = GENERATED if limit is None else min(limit, GENERATED)
        return Asked(task, [Item(**vars(one)) for one in questions(0, task.name, count)], count == GENERATED)
    items = read_items(path, task.name)
    random.Random(ORDER_SEED).shuffle(items)
    return Asked(task, items[:limit], limit is None or limit >= len(items))


def make_task(asked: Asked, run: RunPrograms) -> Task:
    """The task for `run_task`. run: runs the programs of HumanEval."""
    name = asked.task.name
    task = Task(CHAT, lambda seed, count: asked.items, max_tokens=asked.task.max_tokens)
    if name == "humaneval":
        grade_all = partial(passed, run=run)
        return replace(task, base_prompt=lambda item: item.question, base_stop=BASE_STOP, grade_all=grade_all)
    if name == "gsm8k":
        return replace(task, grade=gsm8k.is_right, base_stop=("\nQuestion:",))
    if asked.task.has_file:
        return replace(task, base_prompt=lambda item: f"{item.question}\nAnswer:")
    return replace(task, grade=tinyworld.grade, base_prompt=tinyworld.base_prompt)


def run_chat(
    engine: Engine,
    tasks: Sequence[Asked],
    records: Path,
    settings: dict[str, Any],
    *,
    base: bool,
    samples: int = 1,
    programs: RunPrograms | None = None,
    group: ProcessGroup | None = None,
) -> list[Score]:
    """Asks chat tasks.

    Args:
        engine: The model.
        tasks: As from `find_chat_tasks`.
        records: A folder for the answers.
        settings: What the answers' files say about the model.
        base: The model was not fine-tuned.
        samples: Replies to each problem of HumanEval, from which pass@k is estimated; 1: none besides the greedy one.
        programs: Runs programs; by default the sandbox does.
        group: The ranks that ask some batches each; rank 0 writes. None is a single process.

    Returns:
        A score for each task, then the mean of ChatCORE's tasks, if there is one.
    """
    scores: dict[str, Score] = {}
    sampled: list[Score] = []
    with ExitStack() as stack:
        run = programs or _refuse
        if programs is None and any(asked.task.name == "humaneval" for asked in tasks):
            run = _runner(stack.enter_context(Sandbox(workers=2)))
        for asked in tasks:
            task = make_task(asked, run)
            graded = run_task(engine, task, count=len(asked.items), base=base, group=group)
            scores[asked.task.name] = graded.scores[0]
            if is_main(group):
                write_answers(records, CHAT, settings, graded.replies)
            if asked.task.name == "humaneval" and samples > 1:
                sampled += _sampled(engine, task, asked, samples, run, base, records, settings, group)
    mean = chat_core(tasks, scores)
    return [*scores.values(), *sampled, *([mean] if mean else [])]


def _runner(sandbox: Sandbox) -> RunPrograms:
    return lambda programs: [outcome.passed for outcome in sandbox.run(programs)]


def _refuse(programs: Sequence[Any]) -> list[bool]:
    raise AssertionError("only HumanEval runs programs")


def _sampled(
    engine: Engine,
    task: Task,
    asked: Asked,
    samples: int,
    run: RunPrograms,
    base: bool,
    records: Path,
    settings: dict[str, Any],
    group: ProcessGroup | None,
) -> list[Score]:
    """pass@k of HumanEval, and the share of right replies to each problem on disk."""
    name = f"{CHAT}/{asked.task.name}"
    prompts = [(item, prompt_ids(engine, task, item, base)) for item in asked.items]
    fits = [(item, ids) for item, ids in prompts if len(ids) < engine.context]
    if not fits:
        return []
    items, ids = map(list, zip(*fits, strict=True))
    stop = task.base_stop if base else None
    scores, right = sampled_scores(
        engine, items, ids, samples, run=run, task=name, max_tokens=task.max_tokens, stop=stop, group=group
    )
    scored = [(item, f"{count} of {samples}", count / samples) for item, count in zip(items, right, strict=True)]
    header = {**settings, "task": f"{name}, pass@1 of {samples} samples"}
    if is_main(group):
        write_items(records / CHAT / f"{asked.task.name}.samples{ENDING}", header, scored)
    return [replace(score, skipped=len(prompts) - len(fits)) for score in scores]


def chat_core(tasks: Sequence[Asked], scores: dict[str, Score]) -> Score | None:
    """The mean of the centred accuracies. It is called ChatCORE only if all questions of its tasks were asked.

    Args:
        tasks: The tasks that were asked.
        scores: Their scores by name.
    """
    whole = {asked.task.name for asked in tasks if asked.whole}
    parts = [(task, scores[task.name]) for task in PARTS if task.name in scores]
    parts = [(task, score) for task, score in parts if score.value is not None]
    if not parts:
        return None
    skipped = sum(scores[task.name].skipped for task in PARTS if task.name in scores)
    name = "ChatCORE"
    if len(parts) < len(PARTS) or skipped or not {task.name for task, _ in parts} <= whole:
        name = f"mean of {len(parts)} of ChatCORE's {len(PARTS)} tasks"
        name += "" if {task.name for task, _ in parts} <= whole else ", not all questions"
        name += f", {counted(skipped, 'question')} left out" if skipped else ""
    centred, variance = 0.0, 0.0
    for task, score in parts:
        share, scale = score.value or 0.0, 1 - (task.baseline or 0.0)
        centred += (share - (task.baseline or 0.0)) / scale / len(parts)
        variance += share * (1 - share) / score.count / (scale * len(parts)) ** 2
    error = CONFIDENT * math.sqrt(variance)
    count = sum(score.count for _, score in parts)
    return Score(name, "centred accuracy", centred, centred - error, centred + error, count, 0.0)
