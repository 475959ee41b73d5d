"""Evaluates the stages of a run and the untrained model: bits per byte, the questions of tasks, samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from quern.data.loader import windows
from quern.eval.answers import write_answers
from quern.eval.bits_per_byte import bits_per_byte
from quern.eval.chat.run import CHAT, Asked, find_chat_tasks, run_chat
from quern.eval.contamination import WORDS, contaminated_shares, passage
from quern.eval.core.bundle import core_bundle
from quern.eval.core.prompts import core_passages
from quern.eval.core.run import Subject, run_core
from quern.eval.core.tasks import CoreTask, find_tasks
from quern.eval.run_task import run_task
from quern.eval.score import Score
from quern.eval.task import Task
from quern.eval.tasks import load_task, task_names
from quern.generate.engine import Engine
from quern.generate.sample import GREEDY, Sampling
from quern.machine import Machine
from quern.mixture.sources import read_rows
from quern.recipe import Recipe
from quern.runs.against import ANSWERS, CORE
from quern.runs.load import LoadedModel, load
from quern.runs.run_dir import STAGES, RunDir
from quern.stages.open_data import data_of_run
from quern.stages.prepare import Prepared
from quern.terminal import Meter
from quern.text.chat import Message, render_prompt, render_text
from quern.train import checkpoint
from quern.train.state import build_model

CHAT_STAGES = ("sft", "rl")
UNTRAINED_QUESTIONS = 60

OPENINGS = ("Once upon a time", "The river", "My favourite", "In the morning", "Question:")

CHATS: tuple[tuple[str, ...], ...] = (
    ("Who are you?",),
    ("What is 384 + 527?",),
    ("Where does Barnaby live?", "And what kind of animal is he?"),
    ("How do you spell garden?",),
    ("Tell me a story about Agatha.",),
)
SHOWN_CHATS = len(CHATS)


def run(
    run_dir: RunDir,
    machine: Machine,
    *,
    questions: int,
    log: Callable[[str], None],
    callables: Mapping[str, Callable[..., Any]] | None = None,
    tasks: Sequence[str] = (),
    stage: str | None = None,
    bundle: Path | None = None,
    limit: int | None = None,
    harness: Sequence[str] = (),
    chat_data: Path | None = None,
    samples: int = 1,
    contamination: bool = False,
) -> list[dict[str, Any]]:
    """Scores the stages of a run, logs a table, and appends to evaluate.jsonl and samples.jsonl.

    The answers to the questions are in answers/STAGE/ and core/STAGE/ in the run's folder.

    Args:
        questions: The number of questions of each kind.
        callables: The callables of the recipe, if the user named the recipe's file.
        tasks: Names of built-in tasks, paths of task files, core or core/TASK, chat or chat/TASK. Empty: the built-in
            tasks that suit the recipe.
        stage: The only stage to evaluate. None: the untrained model and every stage of the run.
        bundle: The folder with the files of CORE's tasks. None, or core: the public bundle, which is downloaded.
        limit: The most questions of each task of CORE, of the chat tasks and of lm-eval.
        harness: Tasks of lm-evaluation-harness, by name or file.
        chat_data: The folder with the files of the chat tasks.
        samples: Replies to each problem of HumanEval for pass@k.
        contamination: Also look for the questions in the training text.

    The base model (stage pretrain) answers questions only if `tasks` or `stage` names a task or the stage.

    Returns:
        The lines of evaluate.jsonl.

    Raises:
        FileNotFoundError: The run has no model to evaluate.
        ValueError: A task does not exist, or its file fails.
        ImportError: lm-evaluation-harness is not installed.
    """
    stages = [name for name in STAGES if checkpoint.steps(run_dir.checkpoints(name))]
    if not stages:
        raise FileNotFoundError(run_dir.has_no("model to evaluate"))
    names, chat_names = _named(tasks, CORE), _named(tasks, CHAT)
    chosen = [load_task(name) for name in tasks if name not in (*names, *chat_names)]
    if not names and (bundle is not None or limit is not None and not harness and not chat_names):
        raise ValueError("--bundle and --limit are for CORE: add --tasks core")
    if not chat_names and (chat_data is not None or samples > 1):
        raise ValueError("--chat-data and --samples are for the chat tasks: add --tasks chat")
    if names and (bundle is None or bundle == Path(CORE) and not bundle.is_dir()):
        bundle = core_bundle(run_dir.out, log)
    ask = _harness(machine, harness, limit) if harness else None
    core = find_tasks(bundle, _parts(names, CORE)) if bundle else []
    chat = find_chat_tasks(chat_data, _parts(chat_names, CHAT), limit, log) if chat_names else []
    shares: dict[str, float] | None = None
    lines: list[dict[str, Any]] = []
    prepared: Prepared | None = None
    for name in [stage] if stage else ["untrained", *stages]:
        loaded = load(run_dir, machine, log, stages[0] if name == "untrained" else name, callables)
        prepared = prepared or data_of_run(loaded.recipe, run_dir, lambda line: None)
        if name == "untrained":
            fresh = build_model(loaded.recipe, machine, loaded.recipe.seed).eval()
            loaded = LoadedModel(fresh, loaded.tokenizer, loaded.recipe, name, 0)
        asked = suiting = chosen or [task for task in map(load_task, task_names()) if task.suits(loaded.recipe)]
        if (core or chat or harness) and not chosen or name == "pretrain" and not chosen and not stage:
            asked = []  # a run should not take longer for scores of a model that was never taught to answer
        of_stage = _score(loaded, prepared, machine, run_dir, name, asked, questions, log)
        if core and name != "untrained":
            of_stage += _core(loaded, machine, run_dir, name, core, limit, log)
        if chat and name != "untrained":
            log(f"chat tasks: {name}")
            engine, folder = Engine(loaded.model, loaded.tokenizer, machine), run_dir.folder / ANSWERS / name
            settings = _identity(loaded, run_dir, name)
            scores = run_chat(engine, chat, folder, settings, base=name not in CHAT_STAGES, samples=samples)
            of_stage += _lines(loaded, name, scores, log)
        if ask and name != "untrained":
            log(f"lm-evaluation-harness: {name}")
            of_stage += _lines(loaded, name, ask(loaded), log)
        if contamination and name != "untrained":
            if shares is None:
                shares = _contamination(_passages(suiting, questions, core, chat, limit), prepared)
            of_stage = [line | {"contaminated": shares.get(line["task"])} for line in of_stage]
            log(f"questions of {name} with {WORDS} words in a row that the training text has too:")
            for line in (line for line in of_stage if line["contaminated"] is not None):
                value = "none asked" if line["value"] is None else f"{line['metric']} {line['value']:.3f}"
                log(f"  {line['task']:28} {line['contaminated']:.2%}, {value}")
        run_dir.append("evaluate.jsonl", of_stage)
        lines += of_stage
    return lines


def _score(
    loaded: LoadedModel,
    prepared: Prepared,
    machine: Machine,
    run_dir: RunDir,
    name: str,
    tasks: Sequence[Task],
    questions: int,
    log: Callable[[str], None],
) -> list[dict[str, Any]]:
    context, rows = loaded.recipe.model.context, loaded.recipe.micro_batch_rows
    assert context
    log(f"evaluating: {name}")
    scores = []
    if name not in CHAT_STAGES:  # bits per byte of plain text say little about a chat model
        batches = windows(prepared.val, context, rows=rows)
        measured = bits_per_byte(loaded.model, batches, loaded.tokenizer.token_bytes(), machine)
        scores.append(measured.score("validation", loaded.tokenizer.vocab_size))
    engine = Engine(loaded.model, loaded.tokenizer, machine)
    samples: list[dict[str, Any]] = []
    count = min(questions, UNTRAINED_QUESTIONS) if name == "untrained" else questions
    for task in tasks:
        graded = run_task(engine, task, count=count, base=name == "pretrain")
        scores += graded.scores
        write_answers(run_dir.folder / ANSWERS / name, task.name, _identity(loaded, run_dir, name), graded.replies)
        if name in CHAT_STAGES:
            shown = {reply.item.kind: reply for reply in graded.replies}
            samples += [
                _chat(name, [*r.item.messages, {"role": "assistant", "content": r.parts}]) for r in shown.values()
            ]
    run_dir.append("samples.jsonl", samples + _samples(engine, name, loaded.recipe))
    return _lines(loaded, name, scores, log)


def _lines(loaded: LoadedModel, name: str, scores: Sequence[Score], log: Callable[[str], None]) -> list[dict[str, Any]]:
    """The scores of a stage as lines of evaluate.jsonl, which it logs too."""
    for score in scores:
        log(f"  {score.task:28} {_shown(score, loaded.recipe.model.context or 0)}")
    return [{"stage": name, "step": loaded.step, **asdict(score)} for score in scores]


def _core(
    loaded: LoadedModel,
    machine: Machine,
    run_dir: RunDir,
    name: str,
    tasks: Sequence[tuple[CoreTask, Path]],
    limit: int | None,
    log: Callable[[str], None],
) -> list[dict[str, Any]]:
    log(f"CORE: {name}")
    subject = Subject(loaded.model, loaded.tokenizer, machine, _identity(loaded, run_dir, name))
    scores = run_core(subject, tasks, run_dir.folder / CORE / name, log, limit=limit)
    return [{"stage": name, "step": loaded.step, **asdict(score)} for score in scores]


def _identity(loaded: LoadedModel, run_dir: RunDir, name: str) -> dict[str, Any]:
    return {"run": run_dir.folder.name, "stage": name, "step": loaded.step}


def _named(tasks: Sequence[str], room: str) -> list[str]:
    return [name for name in tasks if name.partition("/")[0] == room and not name.endswith(".py")]


def _parts(names: Sequence[str], room: str) -> list[str]:
    """The tasks of ROOM/TASK; none, for all of them, if the room itself is among the names."""
    return [] if room in names else [name.partition("/")[2] for name in names]


def _passages(
    tasks: Sequence[Task],
    questions: int,
    core: Sequence[tuple[CoreTask, Path]],
    chat: Sequence[Asked],
    limit: int | None,
) -> dict[str, list[str]]:
    """The texts of the questions of each score."""
    texts: dict[str, list[str]] = {}
    items = [(f"{task.name}/{item.kind}", item) for task in tasks for item in task.items(0, questions)]
    items += [(f"{CHAT}/{asked.task.name}", item) for asked in chat for item in asked.items]
    for name, item in items:
        texts.setdefault(name, []).append(passage(item))
    for task, path in core:
        texts[f"{CORE}/{task.name}"] = core_passages(task, path, limit)
    return texts


def _contamination(passages: Mapping[str, Sequence[str]], prepared: Prepared) -> dict[str, float]:
    """The share of each task's questions that are in the training text."""
    train, tokenizer = prepared.train, prepared.tokenizer

    def documents() -> Iterator[str]:
        with Meter("reading the training text", train.num_documents, "documents") as meter:
            for number in range(train.num_documents):
                yield tokenizer.decode(train.gather(number, 1).tolist())
                meter.at(number + 1)

    return contaminated_shares(passages, documents())


def _harness(machine: Machine, names: Sequence[str], limit: int | None) -> Callable[[LoadedModel], list[Score]]:
    """What asks a model the tasks of lm-eval. Fails now if a task or lm-eval itself is missing."""
    from quern.eval.harness import find_harness_tasks, run_harness

    manager, tasks = find_harness_tasks(names)
    return lambda loaded: run_harness(loaded, machine, manager, tasks, limit)


def _chat(name: str, messages: list[Message]) -> dict[str, Any]:
    return {"stage": name, "kind": "chat", "messages": messages}


def _shown(score: Score, context: int) -> str:
    if score.value is None:
        return f"not measured: none of its {score.skipped} questions fits a context of {context} tokens"
    interval = f" ({score.low:.3f} to {score.high:.3f})" if score.low is not None else ""
    chance = f", chance {score.chance:.3f}" if score.chance is not None else ""
    left_out = (
        f"; asked {score.count} of {score.count + score.skipped} questions, the others do not fit a context of "
        f"{context} tokens"
        if score.skipped
        else ""
    )
    return f"{score.metric} {score.value:.3f}{interval}{chance}{left_out}"


def _samples(engine: Engine, name: str, recipe: Recipe) -> list[dict[str, Any]]:
    """Completions of a base model, or conversations with a chat model, for prompts that fit the context."""
    if name not in CHAT_STAGES:
        ids = {text: render_text(engine.tokenizer, text) for text in OPENINGS}
        prompts = {text: prompt for text, prompt in ids.items() if len(prompt) < engine.context}
        done = engine.generate(
            list(prompts.values()), max_tokens=64, sampling=Sampling(0.8, 50), seed=recipe.seed, plain=True
        )
        return [
            {"stage": name, "kind": "completion", "prompt": prompt, "text": row[0].text}
            for prompt, row in zip(prompts, done, strict=True)
        ]
    talks = (converse(engine, chat) for chat in chats(recipe))
    return [_chat(name, messages) for messages in talks if messages]


def chats(recipe: Recipe) -> Sequence[tuple[str, ...]]:
    """The user's turns of the shown conversations: of the built-in world, or first turns of held-out conversations."""
    own = next((one.source for one in recipe.conversations or () if Path(one.source).exists()), None)
    if own is None or recipe.has_built_in_conversations:
        return CHATS
    first = islice(read_rows(Path(own)), SHOWN_CHATS)  # mixture/ holds these out
    asked = [next((m["content"] for m in row.messages if m["role"] == "user"), None) for row in first]
    return [(text,) for text in asked if isinstance(text, str)]


def converse(engine: Engine, questions: tuple[str, ...]) -> list[Message]:
    """Asks the questions one by one, greedily, and returns the conversation, cut where the context is full."""
    messages: list[Message] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        prompt = render_prompt(engine.tokenizer, messages)
        if len(prompt) >= engine.context:
            return messages[:-1]
        reply = engine.generate([prompt], max_tokens=128, sampling=GREEDY)[0][0]
        messages.append({"role": "assistant", "content": list(reply.parts)})
    return messages
