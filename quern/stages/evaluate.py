"""Evaluates the stages of a run: bits per byte, also of the untrained model, the questions of tasks, samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from quern.data.shards import Corpus
from quern.eval.bits_per_byte import kinds_of_documents, sample, text_scores
from quern.eval.chat import CHAT, Asked, find_chat_tasks, run_chat
from quern.eval.core import CORE, CoreTask, core_bundle, core_passages, find_tasks, named_tasks, run_core
from quern.eval.run_task import Records, run_task
from quern.eval.score import Score
from quern.eval.task import CHAT_STAGES, TINYWORLD, Task, contaminated_shares, knows_world, load_task, passage
from quern.generate.engine import Engine
from quern.generate.sampling import GREEDY
from quern.machine import Machine
from quern.mesh import EVALUATING, Mesh, ProcessGroup, alone
from quern.mixture.sources import own_files, read_rows
from quern.process import waiting
from quern.recipe import Resolved
from quern.runs.load import LoadedModel, load
from quern.runs.run_dir import RunDir
from quern.stages.complete import continuations
from quern.stages.prepare import Prepared, data_of_run
from quern.stages.session import main_first
from quern.terminal import Meter, silent
from quern.text.chat import Message, render_prompt
from quern.text.clean.steps import WORDS
from quern.text.documents import Log
from quern.text.tinyworld.corpus import documents_of_kinds
from quern.train.state import build_model
from quern.validate import refuse_missing

UNTRAINED = "untrained"
CHATS: tuple[tuple[str, ...], ...] = (
    ("Who are you?",),
    ("What is 384 + 527?",),
    ("Where does Barnaby live?", "And what kind of animal is he?"),
    ("How do you spell garden?",),
    ("Tell me a story about Agatha.",),
)
Lines = list[dict[str, Any]]
Harness = Callable[[LoadedModel, Machine], list[Score]]  # asks the tasks of lm-evaluation-harness


@dataclass(frozen=True, kw_only=True)
class Questions:
    """The questions of an evaluation; the flags of `quern evaluate` have these names and meanings."""

    questions: int
    tasks: Sequence[str] = ()
    stage: str | None = None
    bundle: Path | None = None
    limit: int | None = None
    harness: Sequence[str] = ()
    chat_data: Path | None = None
    samples: int = 1
    contamination: bool = False

    def find(
        self, out: Path, mesh: Mesh, log: Log
    ) -> tuple[Sequence[tuple[CoreTask, Path]], Sequence[Asked], Harness | None, Sequence[Task]]:
        """Finds the tasks that are named: of CORE with their files, chat tasks, lm-eval's, others. Needs no model.

        Raises:
            ValueError: A task does not exist, its file fails, or flags do not fit.
            OSError: A file cannot be downloaded.
            ImportError: lm-evaluation-harness is not installed.
            SandboxError: HumanEval is named, and no sandbox works on this machine.
        """
        harness = None
        if self.harness:
            if mesh.world.size > 1:
                raise ValueError("--harness runs in one process: leave --ranks out, or ask its tasks separately")
            from quern.eval.harness import find_harness_tasks, run_harness

            manager, tasks = find_harness_tasks(self.harness)
            harness = partial(run_harness, manager=manager, tasks=tasks, limit=self.limit)
        core, chat = _named(self.tasks, CORE), _named(self.tasks, CHAT)
        chosen = [load_task(name) for name in dict.fromkeys(self.tasks) if name not in (*core, *chat)]
        for number, task in enumerate(chosen):
            if task.name in [other.name for other in chosen[:number]]:
                raise ValueError(f"two tasks have the name '{task.name}': their answers would share a file; rename one")
        bundle = self.bundle
        named_tasks(_parts(core, CORE))  # refuses an unknown name before anything is downloaded
        if bundle is not None and not core:
            raise ValueError("--bundle is for CORE: add --tasks core")
        if self.limit is not None and not (core or chat or self.harness):
            raise ValueError("--limit is for --tasks core or chat and for --harness: for other tasks, give --questions")
        if not chat and (self.chat_data is not None or self.samples > 1):
            raise ValueError("--chat-data and --samples are for the chat tasks: add --tasks chat")
        if self.samples > 1 and not {CHAT, f"{CHAT}/humaneval"} & set(chat):
            raise ValueError("--samples is for HumanEval: add --tasks chat/humaneval")
        for name, path in (("bundle", None if bundle == Path(CORE) else bundle), ("chat_data", self.chat_data)):
            refuse_missing(name, path)
        with main_first(mesh):
            if core and (bundle is None or bundle == Path(CORE) and not bundle.is_dir()):
                bundle = core_bundle(out, log)
            asked = find_chat_tasks(self.chat_data, out, _parts(chat, CHAT), self.limit, log) if chat else []
        return find_tasks(bundle, _parts(core, CORE)) if bundle else [], asked, harness, chosen


def run(
    run_dir: RunDir,
    machine: Machine,
    asked: Questions,
    log: Log,
    callables: Mapping[str, Callable[..., Any]] | None = None,
    mesh: Mesh | None = None,
) -> None:
    """Scores the stages of a run, logs a table, and appends to evaluate.jsonl, samples.jsonl and answers/STAGE/.

    On a mesh every rank calls this and computes some of the batches; rank 0 writes. The base model (stage pretrain)
    answers questions only if a task or the stage is named.

    Args:
        callables: The callables of the recipe, if the user named the recipe's file.

    Raises:
        FileNotFoundError: The run has no model to evaluate, or not this stage.
        ValueError, OSError, ImportError, SandboxError: The errors of `Questions.find`.
    """
    mesh = mesh or alone()
    mesh.progress.begin(EVALUATING)
    stages = run_dir.require_trained(asked.stage)
    core, chat, harness, chosen = asked.find(run_dir.out, mesh, log)
    evaluation = _Evaluation(run_dir, machine, mesh, log, asked, core=core, chat=chat, harness=harness, chosen=chosen)
    prepared, kinds = None, list[str]()
    shares: dict[str, float] | None = None
    for name in stages if asked.stage else [UNTRAINED, *stages]:
        loaded = load(run_dir, machine, log, stages[0] if name == UNTRAINED else name, callables)
        if prepared is None:
            with main_first(mesh):
                prepared = data_of_run(loaded.recipe, run_dir, silent)
            if loaded.recipe.data == "tinyworld":  # the kind of each document
                known = documents_of_kinds(loaded.recipe.seed, loaded.recipe.text.val_megabytes, "val")
                kinds = kinds_of_documents(prepared.val, prepared.tokenizer, known)
        if name == UNTRAINED:
            fresh = build_model(loaded.recipe, machine, loaded.recipe.seed).eval()
            loaded = LoadedModel(fresh, loaded.tokenizer, loaded.recipe, name, 0)
        lines = evaluation.score(loaded, prepared, kinds)
        if asked.contamination and name != UNTRAINED:
            if shares is None:
                shares = evaluation.contamination(loaded.recipe, prepared)
            lines = _with_shares(lines, shares, name, log)
        if mesh.main:
            run_dir.append("evaluate.jsonl", lines)


@dataclass(frozen=True)
class _Evaluation:
    """The questions to every stage of a run, and the machine and the run that answer."""

    run_dir: RunDir
    machine: Machine
    mesh: Mesh
    log: Log
    asked: Questions
    core: Sequence[tuple[CoreTask, Path]]
    chat: Sequence[Asked]
    harness: Harness | None
    chosen: Sequence[Task]

    def suiting(self, recipe: Resolved, stage: str) -> Sequence[Task]:
        return self.chosen or ([TINYWORLD] if knows_world(recipe, stage) else [])

    def tasks(self, loaded: LoadedModel) -> Sequence[Task]:
        """The tasks besides those of CORE, chat and lm-eval. A run should not take longer for scores of a model that
        was never taught to answer; an untrained one answers at random, without an end."""
        if loaded.stage == UNTRAINED:
            return []
        left_out = self.core or self.chat or self.harness or loaded.stage == "pretrain" and not self.asked.stage
        return [] if left_out and not self.chosen else self.suiting(loaded.recipe, loaded.stage)

    def score(self, loaded: LoadedModel, prepared: Prepared, kinds: Sequence[str]) -> Lines:
        """Scores one stage, and returns its lines of evaluate.jsonl."""
        name, log, world = loaded.stage, self.log, self.mesh.world
        chats, engine = name in CHAT_STAGES, Engine(loaded.model, loaded.tokenizer, self.machine)
        identity = {"run": self.run_dir.run, "stage": name, "step": loaded.step, "weights": loaded.weights()}
        records = Records(self.run_dir.answers(name), identity)
        refuse_unequal(identity, world)
        log(f"evaluating: {name}")
        scores = list[Score]()
        if not chats:  # bits per byte say little about a chat model
            scores = text_scores(
                loaded.model,
                loaded.tokenizer,
                self.machine,
                prepared.val,
                None if name == UNTRAINED else sample(prepared.train, prepared.val.num_tokens),
                kinds=kinds,
                context=engine.context,
                rows=loaded.recipe.micro_batch_rows,
                group=world,
            )
        samples: Lines = []
        for task in self.tasks(loaded):
            of_task, replies = run_task(
                engine, task, count=self.asked.questions, base=name == "pretrain", group=world, records=records
            )
            scores += of_task
            if chats:  # one reply of each kind
                shown = {reply.item.kind: reply for reply in replies}.values()
                talks = [[*reply.item.messages, {"role": "assistant", "content": reply.parts}] for reply in shown]
                samples += [{"stage": name, "kind": "chat", "messages": talk} for talk in talks]
        if self.mesh.main:
            with waiting("the model, which writes samples for the report", log=log):
                samples += self._samples(engine, loaded, prepared.val)
            self.run_dir.append("samples.jsonl", samples)
        lines = _lines(loaded, scores, log)
        if name == UNTRAINED:
            return lines
        if self.core:
            log(f"CORE: {name}")
            scores = run_core(engine, self.core, records, log, limit=self.asked.limit, group=world)
            lines += _lines(loaded, scores, silent)
        if self.chat:
            log(f"chat tasks: {name}")
            scores = run_chat(engine, self.chat, records, base=not chats, samples=self.asked.samples, group=world)
            lines += _lines(loaded, scores, log)
        if self.harness:
            log(f"lm-evaluation-harness: {name}")
            lines += _lines(loaded, self.harness(loaded, self.machine), log)
        return lines

    def _samples(self, engine: Engine, loaded: LoadedModel, val: Corpus) -> Lines:
        """Continuations by a base model, or conversations with a chat model, for prompts that fit the context."""
        name, recipe = loaded.stage, loaded.recipe
        if name in CHAT_STAGES:
            try:
                talks = chats(recipe, self.run_dir.out)
            except (ValueError, OSError) as error:  # the user's file is another one now: scores do not depend on it
                self.log(f"no conversations are shown: {error}")
                return []
            found = [messages for chat in talks if (messages := converse(engine, chat))]
            return [{"stage": name, "kind": "chat", "messages": messages} for messages in found]
        pairs = continuations(engine, recipe, val)
        return [{"stage": name, "kind": "completion", "prompt": prompt, "text": text} for prompt, text in pairs]

    def contamination(self, recipe: Resolved, prepared: Prepared) -> dict[str, float]:
        """The share of each task's questions that are in the training text."""
        train, tokenizer, group = prepared.train, prepared.tokenizer, self.mesh.world

        def documents() -> Iterator[str]:
            with Meter("reading the training text", train.num_documents, "documents", not self.mesh.main) as meter:
                for number in range(group.rank, train.num_documents, group.size):
                    yield tokenizer.decode(train.gather(number, 1).tolist())
                    meter.at(number + 1)

        texts: dict[str, list[str]] = {}  # texts of the questions of each score
        suiting = self.suiting(recipe, CHAT_STAGES[0])
        items = [(f"{task.name}/{item.kind}", item) for task in suiting for item in task.items(0, self.asked.questions)]
        items += [(f"{CHAT}/{asked.task.name}", item) for asked in self.chat for item in asked.items]
        for name, item in items:
            texts.setdefault(name, []).append(passage(item))
        for task, path in self.core:
            texts[f"{CORE}/{task.name}"] = core_passages(task, path, self.asked.limit)
        return contaminated_shares(texts, documents(), group)


def refuse_unequal(model: dict[str, Any], group: ProcessGroup) -> None:
    """Raises ValueError, on every rank, if the ranks have loaded different models. model: the facts on this rank's."""
    found = group.gather_objects(model)
    if any(one != found[0] for one in found):
        raise ValueError(f"the ranks loaded different checkpoints of {model['stage']}: evaluate when nothing trains")


def _lines(loaded: LoadedModel, scores: Sequence[Score], log: Log) -> Lines:
    """The scores of a stage as lines of evaluate.jsonl, which it logs too."""
    for score in scores:
        log(f"  {score.task:28} {score.described(loaded.recipe.model.context)}")
    return [{"stage": loaded.stage, "step": loaded.step, **asdict(score)} for score in scores]


def _named(tasks: Sequence[str], room: str) -> list[str]:
    return [name for name in tasks if name.partition("/")[0] == room and not name.endswith(".py")]


def _parts(names: Sequence[str], room: str) -> list[str]:
    """The tasks of ROOM/TASK; none, for all of them, if the room itself is among the names."""
    return [] if room in names else [name.partition("/")[2] for name in names]


def _with_shares(lines: Lines, shares: Mapping[str, float], stage: str, log: Log) -> Lines:
    """The lines with the share of their questions that the training text has, which it logs too."""
    log(f"questions of {stage} with {WORDS} words in a row that the training text has too:")
    for line in (line for line in lines if line["task"] in shares):
        value = "none asked" if line["value"] is None else f"{line['metric']} {line['value']:.3f}"
        log(f"  {line['task']:28} {shares[line['task']]:.2%}, {value}")
    return [line | {"contaminated": shares.get(line["task"])} for line in lines]


def chats(recipe: Resolved, out: Path) -> Sequence[tuple[str, ...]]:
    """The user's turns of the shown conversations: turns of the built-in world, or first turns of held-out ones."""
    own = next((one for one in recipe.conversations or () if Path(one.source).exists()), None)
    if own is None or recipe.has_built_in_conversations:
        return CHATS
    first = islice(read_rows(own_files(own, out), column=own.column), len(CHATS))  # mixture/ holds these out
    asked = [next((m["content"] for m in messages if m["role"] == "user"), None) for messages, _ in first]
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
