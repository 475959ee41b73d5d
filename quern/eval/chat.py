"""Chat tasks: ARC, MMLU, GSM8K, HumanEval, spelling and counting, and ChatCORE, the mean of the first five.

Each is one entry of TASKS. Their files, or those of CORE with the same questions, have rows such as

    choice     {"question": …, "choices": {"text": […], "label": […]}, "answerKey": "B"}     ARC
               {"question": …, "choices": […], "answer": 2}                                  MMLU
               {"query": …, "choices": […], "gold": 2}                                       CORE's files
    gsm8k      {"question": …, "answer": "… #### 12"}
    humaneval  {"task_id": …, "prompt": …, "entry_point": …, "canonical_solution": …, "test": …}

Options get the letters A, B, …, and the answer is a letter, as `quern sft` teaches it. ChatCORE is the mean of centred
accuracies (docs/evaluation.md). Source of HumanEval: Chen et al., 2021, "Evaluating Large Language Models Trained on
Code", https://arxiv.org/abs/2107.03374.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from string import ascii_uppercase
from typing import Any, NamedTuple

import numpy as np

from quern.eval.answers import Answered, answers_file, write_answers
from quern.eval.run_task import Records, fitting, run_task
from quern.eval.score import SINGLE, Prompts, Score, interval, on_ranks, suite_score
from quern.eval.task import Item, Task, question, world_grade, world_items, world_prompt
from quern.generate.engine import Engine
from quern.generate.sampling import Sampling
from quern.generate.sandbox import Program, SandboxError
from quern.mesh import ProcessGroup
from quern.mixture.sources import multiple_choice
from quern.rl.environment import is_right_number, open_sandbox, program_in, word_problem
from quern.rl.rollouts import pass_at_k
from quern.runs.public_data import fetch_tests
from quern.terminal import Meter
from quern.text.documents import read_rows
from quern.text.sources import find_file

CHAT = "chat"
COLUMNS = "question query choices answerKey answer gold prompt entry_point test task_id canonical_solution".split()
LABEL = "Question: "  # CORE's files begin their questions with it
GENERATED = 256  # questions of spelling and of counting, without a limit
ORDER_SEED = 1337
BASE_STOP = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")  # a base model's function ends before, as in the paper
SAMPLING = Sampling(temperature=0.8, top_p=0.95)  # for pass@k, as in the paper for many samples
K = (1, 10, 100)


@dataclass(frozen=True)
class ProgramItem(Item):
    """A function to write. answer: a right body; question: the beginning, with the docstring; entry_point: the
    function's name; test: source that defines `check(function)`."""

    entry_point: str = ""
    test: str = ""


def _choice(name: str, row: Mapping[str, Any]) -> Item:
    asked = row["question"] if row.get("question") is not None else row["query"]
    choices = row["choices"]
    if isinstance(choices, Mapping):
        options, labels, key = choices["text"], list(choices["label"]), row["answerKey"]
        if key not in labels:
            raise ValueError(f"answerKey {key!r} is none of its labels, {', '.join(map(str, labels))}")
        gold = labels.index(key)
    else:
        options, gold = choices, row["gold"] if row.get("gold") is not None else row["answer"]
        if isinstance(gold, str) and len(gold) == 1:
            gold = ascii_uppercase.find(gold)
    if not isinstance(options, list) or not all(isinstance(text, str) and text for text in (asked, *options)):
        raise ValueError("its question or an option is no text, or empty")
    if type(gold) is not int or not (2 <= len(options) <= len(ascii_uppercase) and 0 <= gold < len(options)):
        raise ValueError(f"the answer {gold!r} is none of its {len(options)} options")
    letters = tuple(ascii_uppercase[: len(options)])
    return question(multiple_choice(asked.removeprefix(LABEL), options), letters[gold], letters, name)


def _program(row: Mapping[str, Any]) -> Item:
    texts = [row[key] for key in ("prompt", "canonical_solution", "entry_point", "test")]
    if not all(isinstance(text, str) for text in texts) or not texts[2].isidentifier():
        raise ValueError("its prompt, canonical_solution or test is no text, or its entry_point no name")
    prompt, solution, entry_point, test = texts
    return ProgramItem("humaneval", [{"role": "user", "content": prompt}], solution, entry_point=entry_point, test=test)


def program_of(item: Item, reply: str) -> Program:
    """The program of a reply (`program_in`), with its check: a whole function, or a body that continues the prompt.

    The prompt is before both, since it has imports and functions that the tests use.
    """
    assert isinstance(item, ProgramItem)
    code, name = program_in(reply), item.entry_point
    whole = re.search(rf"^def {re.escape(name)}\b", code, re.MULTILINE)
    check = f"{item.question}\n{name} = program.{name}\n{item.test}\ncheck({name})"
    return Program(f"{item.question}\n{code}" if whole else item.question + code, check)


def _passed(items: Sequence[Item], replies: Sequence[str]) -> list[bool]:
    programs = [program_of(item, reply) for item, reply in zip(items, replies, strict=True)]
    return [outcome.passed for outcome in open_sandbox(workers=2).run(programs)]


@dataclass(frozen=True)
class ChatTask:
    """One entry. read: makes an item of a row of its file, None if its questions are made; baseline: the accuracy that
    counts as 0 in ChatCORE, None if the task is no part of it; how: arguments of `Task`."""

    name: str
    read: Callable[[Mapping[str, Any]], Item] | None
    baseline: float | None
    how: Mapping[str, Any]

    def task(self, items: Sequence[Item]) -> Task:
        """The task with these items."""
        return Task(CHAT, lambda seed, count: items, **self.how)


_LETTERS = {"base_prompt": lambda item: f"{item.question}\nAnswer:"}
_WORDS = {"grade": world_grade, "base_prompt": world_prompt}
_NUMBER = {"max_tokens": 512, "grade": is_right_number, "base_stop": ("\nQuestion:",)}
_CODE = {"max_tokens": 512, "grade_all": _passed, "base_prompt": lambda item: item.question, "base_stop": BASE_STOP}
TASKS = (
    *(ChatTask(name, partial(_choice, name), 0.25, _LETTERS) for name in ("arc_easy", "arc_challenge", "mmlu")),
    ChatTask("gsm8k", word_problem, 0.0, _NUMBER),
    ChatTask("humaneval", _program, 0.0, _CODE),
    ChatTask("spelling", None, None, _WORDS),
    ChatTask("counting", None, None, _WORDS),
)
BY_NAME = {task.name: task for task in TASKS}
PARTS = [task for task in TASKS if task.baseline is not None]
"""The parts of ChatCORE."""


class Asked(NamedTuple):
    """A task with its items in the order in which they are asked. whole: they are all that the task has."""

    task: ChatTask
    items: list[Item]
    whole: bool


def read_items(path: Path, name: str) -> list[Item]:
    """The items of a task's file, in the file's order. Raises as `read_rows`."""
    read = BY_NAME[name].read
    assert read is not None  # the other tasks have no file
    return read_rows(path, name, COLUMNS, read)


def find_chat_tasks(
    folder: Path | None, out: Path, names: Sequence[str], limit: int | None, log: Callable[[str], None]
) -> list[Asked]:
    """Finds tasks with their items.

    Args:
        folder: Has the files, also in its subfolders. None: they are downloaded into `out`, the output folder.
        names: Tasks by name; none are all that can be asked. Those that cannot are logged.
        limit: The most items of each task: the first ones of an order that is always the same.

    Raises:
        ValueError: A task does not exist, has no file or several, or its file is damaged.
        OSError: A file cannot be downloaded.
        SandboxError: HumanEval is named, and no sandbox works on this machine.
    """
    unknown = [name for name in names if name not in BY_NAME]
    if unknown:
        raise ValueError(f"chat has no task '{unknown[0]}': use {', '.join(BY_NAME)}")
    wanted = [task for task in TASKS if task.name in names or not names]
    with_files = [task.name for task in wanted if task.read]
    apart, folder = folder is None, folder or fetch_tests(with_files, out)
    paths = {
        name: find_file(folder / name if apart else folder, name, f"{name}_test", inside=(name, f"openai_{name}"))
        for name in with_files
    }
    absent = [name for name, path in paths.items() if path is None]
    if absent and names:
        raise ValueError(f"{folder} has no file for {', '.join(absent)}: give its folder, or leave the task out")
    if paths.get("humaneval") is not None:
        try:
            open_sandbox(workers=2)
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
        items = world_items(0, GENERATED, [task.name])
    else:
        items = read_items(path, task.name)
        random.Random(ORDER_SEED).shuffle(items)
    return Asked(task, items[:limit], limit is None or limit >= len(items))


def run_chat(
    engine: Engine,
    tasks: Sequence[Asked],
    records: Records,
    *,
    base: bool,
    samples: int = 1,
    group: ProcessGroup = SINGLE,
) -> list[Score]:
    """Asks chat tasks.

    Args:
        tasks: The tasks, by `find_chat_tasks`.
        records: The folder of the answers, and what their files say about the model.
        base: The model was not fine-tuned.
        samples: Replies to each problem of HumanEval, from which pass@k is estimated; 1: none besides the greedy one.
        group: The ranks that ask some batches each; rank 0 writes.

    Returns:
        A score for each task, pass@k of the samples, then the mean of ChatCORE's tasks, if there is one.
    """
    scores: dict[str, Score] = {}
    sampled: list[Score] = []
    for asked in tasks:
        name, task = asked.task.name, asked.task.task(asked.items)
        count = len(asked.items)
        [scores[name]], _ = run_task(engine, task, count=count, base=base, group=group, records=records)
        if name != "humaneval" or samples == 1:
            continue
        sampled, right = sampled_scores(engine, task, asked.items, samples, base=base, group=group)
        if right and group.rank == 0:
            header = {**records.identity, "task": f"{CHAT}/{name}, pass@1 of {samples} samples"}
            scored = [
                (Answered(asked.items[number], [], f"{n} of {samples}", n == samples, number), n / samples)
                for number, n in right.items()
            ]
            write_answers(answers_file(records.folder, CHAT, f"{name}.samples"), header, scored)
    mean = chat_core(tasks, scores)
    return [*scores.values(), *sampled, *([mean] if mean else [])]


def sampled_scores(
    engine: Engine, task: Task, items: Sequence[Item], samples: int, *, base: bool, group: ProcessGroup = SINGLE
) -> tuple[list[Score], dict[int, int]]:
    """Estimates pass@k of sampled programs, for each k of `K` up to their number, with intervals over the problems.
    Also returns the number of right replies to each problem that leaves room for one."""
    asked = fitting(engine, task, items, base)
    if not asked:
        return [], {}
    prompts, name = [ids for _, ids in asked], f"{CHAT}/{items[0].kind}"

    def compute(batch: Sequence[int]) -> list[int]:
        (at,) = batch
        stop = task.base_stop if base else ()
        how = {"max_tokens": task.max_tokens, "sampling": SAMPLING, "stop": stop, "plain": base}
        (replies,) = engine.generate([prompts[at]], samples=samples, **how)
        return [sum(_passed([items[asked[at][0]]] * samples, [reply.text for reply in replies]))]

    with Meter(f"{name}, {samples} samples", len(asked), "problems", silent=group.rank != 0) as meter:
        right = on_ranks([[at] for at in range(len(asked))], compute, group, meter.at)
    scores = []
    for k in (k for k in K if k <= samples):
        shares = np.array([pass_at_k(one, samples, k) for one in right])
        mean, error = float(shares.mean()), float(shares.std()) / max(1, len(shares) - 1) ** 0.5
        settings = {**Prompts(engine.tokenizer.bos, prompts).settings(), "skipped": len(items) - len(asked)}
        scores.append(Score(name, f"pass@{k}", mean, *interval(mean, error, 0.0, 1.0), len(asked), 0.0, **settings))
    return scores, {number: one for (number, _), one in zip(asked, right, strict=True)}


def chat_core(tasks: Sequence[Asked], scores: Mapping[str, Score]) -> Score | None:
    """The mean of the centred accuracies of ChatCORE's tasks; None if none of them has a value."""
    parts = [(one, scores[one.task.name], one.task.baseline) for one in tasks if one.task.baseline is not None]
    if all(score.value is None for _, score, _ in parts):
        return None
    whole = all(one.whole for one, _, _ in parts)
    based = [(score, baseline) for _, score, baseline in parts]
    return suite_score("ChatCORE", len(PARTS), based, whole, limited="" if whole else "not all questions")
