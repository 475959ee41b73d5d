"""CORE: 22 few-shot tasks for base models, scored by likelihood and averaged (docs/evaluation.md).

A prompt is solved examples, then the question, as rows of token ids with the span that is scored. The shots of item i
are drawn from all other rows by `random.Random(1234 + i)`, where i is the item's number in the order of
`random.Random(1337)`. Every row begins with BOS. A row that does not fit is cut from its left, by itself.

Source: DCLM (Li et al., 2024, arXiv 2406.11794) and nanochat, whose evaluation code defines delimiters, seeds and
spans; the data of LLM Foundry. The files come from nanochat's public bundle, a zip whose core.yaml has a path for each
task.
"""

from __future__ import annotations

import random
import re
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from quern.eval.likelihood import Example, common, fit
from quern.eval.run_task import Records, run_task
from quern.eval.score import SINGLE, Score, mean_score, suite_score
from quern.eval.task import Item, Task
from quern.generate.engine import Engine
from quern.mesh import ProcessGroup
from quern.temporaries import alone_in, sha256_of, sync_path, temporary_folder
from quern.terminal import Meter, counted, duration
from quern.text import documents
from quern.text.downloads import retrieve
from quern.text.sources import find_file
from quern.text.tokenizer import Tokenizer

Kind = Literal["choice", "schema", "language"]
Row = dict[str, Any]
FIELDS: Mapping[Kind, tuple[str, ...]] = {
    "choice": ("query", "choices", "gold"),
    "schema": ("context_options", "continuation", "gold"),
    "language": ("context", "continuation"),
}
"""The keys of a row, by the kind of its task."""
OPTIONS = ("choices", "context_options")
ANSWER = "\nAnswer: "
VERSIONS = ("v1", "v2")
ORDER_SEED, SHOTS_SEED = 1337, 1234
CORE = "core"


@dataclass(frozen=True)
class CoreTask:
    """One task. kind: of one context, the likeliest of several continuations (choice); the context under which the
    continuation is likeliest (schema); every token is the likeliest one (language). v1: the accuracy that counts as 0,
    by version; v2: where it is another one; delimiter: between a question and its answer; data: the name of its file
    without .jsonl, where it is not the task's."""

    name: str
    kind: Kind
    shots: int
    v1: float = 0.0
    v2: float | None = None
    delimiter: str = " "
    data: str | None = None

    @property
    def file(self) -> str:
        return self.data or self.name

    def baseline(self, version: str) -> float:
        return self.v1 if version == "v1" or self.v2 is None else self.v2


TASKS: tuple[CoreTask, ...] = (
    CoreTask("hellaswag_zeroshot", "choice", 0, 0.25, data="hellaswag"),
    CoreTask("jeopardy", "language", 10, delimiter=ANSWER, data="jeopardy_all"),
    CoreTask("bigbench_qa_wikidata", "language", 10),
    CoreTask("arc_easy", "choice", 10, 0.25, delimiter=ANSWER),
    CoreTask("arc_challenge", "choice", 10, 0.25, delimiter=ANSWER),
    CoreTask("copa", "choice", 0, 0.5),
    CoreTask("commonsense_qa", "choice", 10, 0.2, 0.403),
    CoreTask("piqa", "choice", 10, 0.5, delimiter=ANSWER),
    CoreTask("openbook_qa", "choice", 0, 0.25),
    CoreTask("lambada_openai", "language", 0),
    CoreTask("hellaswag", "choice", 10, 0.25),
    CoreTask("winograd", "schema", 0, 0.5, data="winograd_wsc"),
    CoreTask("winogrande", "schema", 0, 0.5),
    CoreTask("bigbench_dyck_languages", "language", 10),
    CoreTask("agi_eval_lsat_ar", "choice", 3, 0.2, 0.25),
    CoreTask("bigbench_cs_algorithms", "language", 10),
    CoreTask("bigbench_operators", "language", 10),
    CoreTask("bigbench_repeat_copy_logic", "language", 10),
    CoreTask("squad", "language", 10),
    CoreTask("coqa", "language", 0),
    CoreTask("boolq", "choice", 10, 0.62, delimiter=ANSWER),
    CoreTask("bigbench_language_identification", "choice", 10, 0.091, 0.25),
)
BY_NAME = {task.name: task for task in TASKS}


def named_tasks(names: Sequence[str]) -> list[CoreTask]:
    """The tasks of these names; no name is all tasks. Raises ValueError for a name that no task has."""
    unknown = [name for name in names if name not in BY_NAME]
    if unknown:
        raise ValueError(f"CORE has no task '{unknown[0]}': use {', '.join(BY_NAME)}")
    return [BY_NAME[name] for name in dict.fromkeys(names)] or list(TASKS)


def find_tasks(folder: Path, names: Sequence[str] = ()) -> list[tuple[CoreTask, Path]]:
    """Tasks with their files.

    Args:
        folder: The files are in it or in its subfolders.
        names: Tasks by name; none are all that the folder has.

    Raises:
        FileNotFoundError: There is no such folder, or it has no file of rows.
        ValueError: A task does not exist, or has no file or several.
    """
    wanted = named_tasks(names)
    found = [(task, find_file(folder, task.file)) for task in wanted]
    there = [(task, path) for task, path in found if path is not None]
    if not there or (names and len(there) < len(found)):
        absent = [task.name for task, path in found if path is None] if names else ["any task of CORE"]
        raise ValueError(f"{folder} has no file for {', '.join(absent)}: give its folder")
    return there


def read_rows(path: Path, task: CoreTask) -> list[Row]:
    """Reads a task's file, in the order in which its rows are numbered and asked. Raises ValueError for a line that is
    no row of this kind of task, and for too few rows for the shots."""
    rows = documents.read_rows(path, task.name, FIELDS[task.kind], lambda row: _checked(row, task.kind))
    if len(rows) <= task.shots:
        raise ValueError(
            f"{path} has {len(rows)} rows, too few for {task.shots} shots of {task.name}: take the whole file"
        )
    random.Random(ORDER_SEED).shuffle(rows)
    return rows


def _checked(row: Row, kind: Kind) -> Row:
    texts = [row[field] for field in FIELDS[kind] if field not in (*OPTIONS, "gold")]
    if not all(isinstance(text, str) for text in texts) or row.get("continuation") == "":
        raise ValueError("a text of it is empty, or no text")
    for options in (row[field] for field in FIELDS[kind] if field in OPTIONS):
        if not isinstance(options, list) or not all(isinstance(text, str) and text for text in options):
            raise ValueError("its options are no list of texts")
        if type(row["gold"]) is not int or not (len(options) > 1 and 0 <= row["gold"] < len(options)):
            raise ValueError(f"gold {row['gold']!r} is none of its {len(options)} options")
    return row


def make_example(task: CoreTask, rows: Sequence[Row], item: int, tokenizer: Tokenizer, context: int) -> Example | None:
    """The item with an index in a task's rows; None if a scored span, with one token before it, does not fit the
    context (tokens that the model reads)."""
    drawn = random.Random(SHOTS_SEED + item).sample(range(len(rows) - 1), task.shots)
    shots = [rows[at + (at >= item)] for at in drawn]  # from all rows but this one
    before = "".join(f"{task.delimiter.join(_parts(task, shot))}\n\n" for shot in shots)
    row = rows[item]

    def ids(text: str) -> tuple[int, ...]:
        return (tokenizer.bos, *tokenizer.encode(text))

    if task.kind == "language":
        asked, ending = _parts(task, row)
        prompt, whole = ids(f"{before}{asked}{task.delimiter}".strip()), ids(f"{before}{asked}{task.delimiter}{ending}")
        return fit([whole], [common([prompt, whole])], 0, context)
    if task.kind == "choice":
        options = [ids(f"{before}{row['query']}{task.delimiter}{choice}") for choice in row["choices"]]
        # Of two options that begin alike, one may end where the other goes on: its last token is still scored.
        start = min(common(options), min(map(len, options)) - 1)
        return fit(options, [start] * len(options), row["gold"], context)
    options = [ids(f"{before}{begin}{task.delimiter}{row['continuation']}") for begin in row["context_options"]]
    ending = common([option[::-1] for option in options])
    return fit(options, [len(option) - ending for option in options], row["gold"], context)


def _parts(task: CoreTask, row: Row) -> tuple[str, str]:
    """The question of a row and its right answer."""
    if task.kind == "choice":
        return row["query"], row["choices"][row["gold"]]
    if task.kind == "schema":
        return row["context_options"][row["gold"]], row["continuation"]
    return row["context"].strip(), row["continuation"]


def as_task(task: CoreTask, rows: Sequence[Row], data: str, limit: int | None = None) -> Task:
    """The first rows of a task's file as a task. data: the fingerprint of the file."""
    items: list[Item] = []
    for number, row in enumerate(rows[:limit]):
        asked, answer = _parts(task, row)
        options = next((tuple(row[field]) for field in FIELDS[task.kind] if field in OPTIONS), None)
        answer = options[row["gold"]] if options else answer
        items.append(Item(task.name, [{"role": "user", "content": asked}], answer, options, number=number))

    def example(item: Item, tokenizer: Tokenizer, context: int) -> Example | None:
        return make_example(task, rows, item.number, tokenizer, context)

    return Task(CORE, lambda seed, count: items, example=example, data=data)


def run_core(
    engine: Engine,
    tasks: Sequence[tuple[CoreTask, Path]],
    records: Records,
    log: Callable[[str], None],
    *,
    limit: int | None = None,
    group: ProcessGroup = SINGLE,
) -> list[Score]:
    """Asks CORE's tasks. An interrupted evaluation continues with the next task.

    Args:
        tasks: With their files, as from `find_tasks`.
        records: Where the answers are kept.
        limit: The most items of each task.
        group: The ranks that score some batches each; rank 0 writes.

    Returns:
        A score for each task, then the means by version.

    Raises:
        ValueError: A file is damaged.
    """
    asked = {task for task, _ in tasks}
    if missing := [task.name for task in TASKS if task not in asked]:
        log(f"not asked: {', '.join(missing)}")
    scores, whole = list[Score](), True
    for task, path in tasks:
        began, rows = time.monotonic(), read_rows(path, task)
        items = as_task(task, rows, sha256_of(path)[:16], limit)
        [score], _ = run_task(engine, items, base=True, group=group, records=records)
        scores.append(replace(score, shots=task.shots))
        whole &= score.count == len(rows)
        log(f"  {_told(task, scores[-1], engine.context, time.monotonic() - began)}")
    limited, means = "" if limit is None else f"{counted(limit, 'question')} each", list[Score]()
    for version in VERSIONS:
        parts = [(score, task.baseline(version)) for score, (task, _) in zip(scores, tasks, strict=True)]
        means.append(mean := suite_score("CORE", len(TASKS), parts, whole, version, limited))
        if mean.value is not None:
            ends = f" ({mean.low:.4f} to {mean.high:.4f})" if mean.low is not None else ""
            log(f"  {mean.task}: {mean.value:.4f}{ends}")
    return [*scores, *means]


def _told(task: CoreTask, score: Score, context: int, seconds: float) -> str:
    said = f"{task.name:32} {score.described(context)}"
    if score.value is None:
        return said
    means = (mean_score(version, [(score, task.baseline(version))]).value or 0.0 for version in VERSIONS)
    centred = ", ".join(f"{version} {mean:+.3f}" for version, mean in zip(VERSIONS, means, strict=True))
    cut = f", {score.cropped} cut to the context" if score.cropped else ""
    return f"{said}; centred {centred}; {counted(score.count, 'question')}{cut} in {duration(seconds)}"


def core_passages(task: CoreTask, path: Path, limit: int | None = None) -> list[str]:
    """The texts of a task's questions, with their answers, that are looked for in the training text."""
    parts = [_parts(task, row) for row in read_rows(path, task)[:limit]]
    label = "Question: " if task.kind == "choice" else ""
    return [f"{asked.removeprefix(label)} {answer}" for asked, answer in parts]


ARCHIVE, CONFIG = "eval_bundle.zip", "core.yaml"
BUNDLE = (
    f"https://karpathy-public.s3.us-west-2.amazonaws.com/{ARCHIVE}",
    "90a7c19e28ee7a52b4f6e1f87658deb9fde7f63deba2379045bdb1fe9ea5d200",
)
"""The address of the files of CORE's 22 tasks, and the SHA-256 of what is there."""


def core_bundle(out: Path, log: Callable[[str], None], bundle: tuple[str, str] = BUNDLE) -> Path:
    """The folder with the files of CORE's tasks; downloads and unpacks the bundle if the folder is not there.

    Args:
        log: Called with a line when this process waits for another one's download.
        bundle: The address and the SHA-256 of what is downloaded.

    Raises:
        OSError: The bundle cannot be downloaded; the message says what to do.
    """
    folder = out / "downloads" / "core"
    unpacked = folder / "eval_data"
    try:
        with alone_in(folder, log), Meter("fetching the evaluation bundle", None, "MB of this file") as meter:
            if not unpacked.is_dir():
                retrieve(*bundle, folder / ARCHIVE, lambda file, done: meter.at(done / 1e6, file))
                _unpack(folder / ARCHIVE, unpacked)
    except OSError as error:
        raise OSError(f"{error}; or name a folder with CORE's files with --bundle") from error
    return unpacked


def _unpack(archive: Path, target: Path) -> None:
    """Writes the files of the tasks to a temporary folder; whole, it gets its name."""
    wanted = {f"{task.file}.jsonl" for task in TASKS}
    with temporary_folder(target) as temporary:
        with zipfile.ZipFile(archive) as opened:  # its hash was checked: it has no member that leaves the folder
            config = next(name for name in opened.namelist() if PurePosixPath(name).name == CONFIG)
            # Files that the configuration does not list have the same names and other rows.
            listed = re.findall(r"dataset_uri:\s*[\"']?([^\s\"'#]+)", opened.read(config).decode("utf-8"))
            for name in opened.namelist():
                if PurePosixPath(name).name in wanted and any(f"/{name}".endswith(f"/{uri}") for uri in listed):
                    sync_path(Path(opened.extract(name, temporary / target.name)))
        (temporary / target.name).rename(target)
        sync_path(target.parent)
