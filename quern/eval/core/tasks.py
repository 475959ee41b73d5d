"""The 22 tasks of CORE: files, shots, delimiters and baselines, and the reader of their files.

Two versions of the baselines exist. v1 is that of the paper and of most published numbers, GPT-2's 0.2565 among
them; v2 corrects three tasks. Both are always reported, with the version's name.

Source: DCLM (Li et al., 2024, arXiv 2406.11794), its evaluation code of 2025-09, and the data of LLM Foundry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from quern.text import formats
from quern.text.sources import find_file

Kind = Literal["choice", "schema", "language"]
FIELDS: Mapping[Kind, tuple[str, ...]] = MappingProxyType(
    {
        "choice": ("query", "choices", "gold"),
        "schema": ("context_options", "continuation", "gold"),
        "language": ("context", "continuation"),
    }
)
"""The keys of a row, by the kind of its task."""
OPTIONS = ("choices", "context_options")
ANSWER = "\nAnswer: "
VERSIONS = ("v1", "v2")


@dataclass(frozen=True)
class CoreTask:
    """One task.

    Args:
        name: As in the paper.
        file: The name of its data without .jsonl.
        kind: choice: one context, the likeliest of several continuations. schema: several contexts, the one under which
            the continuation is likeliest. language: every token of the continuation is the likeliest one.
        shots: Solved examples before the question.
        delimiter: Between a question and its answer.
        v1, v2: The accuracy that counts as 0, by version.
    """

    name: str
    file: str
    kind: Kind
    shots: int
    delimiter: str = " "
    v1: float = 0.0
    v2: float = 0.0

    def baseline(self, version: str) -> float:
        return self.v1 if version == "v1" else self.v2

    def centred(self, accuracy: float, version: str) -> float:
        """The accuracy as a share of the way from the baseline to 1."""
        return (accuracy - self.baseline(version)) / (1 - self.baseline(version))


def _choice(name: str, file: str, shots: int, v1: float, v2: float | None = None, delimiter: str = " ") -> CoreTask:
    return CoreTask(name, file, "choice", shots, delimiter, v1, v1 if v2 is None else v2)


TASKS: tuple[CoreTask, ...] = (
    _choice("hellaswag_zeroshot", "hellaswag", 0, 0.25),
    CoreTask("jeopardy", "jeopardy_all", "language", 10, ANSWER),
    CoreTask("bigbench_qa_wikidata", "bigbench_qa_wikidata", "language", 10),
    _choice("arc_easy", "arc_easy", 10, 0.25, delimiter=ANSWER),
    _choice("arc_challenge", "arc_challenge", 10, 0.25, delimiter=ANSWER),
    _choice("copa", "copa", 0, 0.5),
    _choice("commonsense_qa", "commonsense_qa", 10, 0.2, 0.403),
    _choice("piqa", "piqa", 10, 0.5, delimiter=ANSWER),
    _choice("openbook_qa", "openbook_qa", 0, 0.25),
    CoreTask("lambada_openai", "lambada_openai", "language", 0),
    _choice("hellaswag", "hellaswag", 10, 0.25),
    CoreTask("winograd", "winograd_wsc", "schema", 0, v1=0.5, v2=0.5),
    CoreTask("winogrande", "winogrande", "schema", 0, v1=0.5, v2=0.5),
    CoreTask("bigbench_dyck_languages", "bigbench_dyck_languages", "language", 10),
    _choice("agi_eval_lsat_ar", "agi_eval_lsat_ar", 3, 0.2, 0.25),
    CoreTask("bigbench_cs_algorithms", "bigbench_cs_algorithms", "language", 10),
    CoreTask("bigbench_operators", "bigbench_operators", "language", 10),
    CoreTask("bigbench_repeat_copy_logic", "bigbench_repeat_copy_logic", "language", 10),
    CoreTask("squad", "squad", "language", 10),
    CoreTask("coqa", "coqa", "language", 0),
    _choice("boolq", "boolq", 10, 0.62, delimiter=ANSWER),
    _choice("bigbench_language_identification", "bigbench_language_identification", 10, 0.091, 0.25),
)
BY_NAME: Mapping[str, CoreTask] = MappingProxyType({task.name: task for task in TASKS})


def find_tasks(folder: Path, names: Sequence[str] = ()) -> list[tuple[CoreTask, Path]]:
    """Tasks with their files.

    Args:
        folder: The files are in it or in its subfolders.
        names: Tasks by name; none are all that the folder has.

    Raises:
        ValueError: A task does not exist, or has no file or several.
    """
    unknown = [name for name in names if name not in BY_NAME]
    if unknown:
        raise ValueError(f"CORE has no task '{unknown[0]}': use {', '.join(BY_NAME)}")
    wanted = [BY_NAME[name] for name in dict.fromkeys(names)] or list(TASKS)
    found = [(task, find_file(folder, task.file)) for task in wanted]
    there = [(task, path) for task, path in found if path is not None]
    if not there or (names and len(there) < len(found)):
        absent = [task.name for task, path in found if path is None] if names else ["any task of CORE"]
        raise ValueError(f"{folder} has no file for {', '.join(absent)}: give its folder")
    return there


def read_rows(path: Path, task: CoreTask) -> list[dict[str, Any]]:
    """The rows of a task's file, in the file's order.

    Raises:
        ValueError: A line is not a row of this kind of task, or there are too few rows for the shots.
    """
    rows = formats.read_rows(path, task.name, FIELDS[task.kind], lambda row: _checked(row, task))
    if len(rows) <= task.shots:
        raise ValueError(
            f"{path} has {len(rows)} rows, and {task.name} needs more than its {task.shots} shots: "
            "take the whole file, or leave the task out"
        )
    return rows


def _checked(row: dict[str, Any], task: CoreTask) -> dict[str, Any]:
    if missing := [field for field in FIELDS[task.kind] if field not in row]:
        raise ValueError(f"it has no {', '.join(missing)}")
    texts = [row[field] for field in FIELDS[task.kind] if field not in (*OPTIONS, "gold")]
    if not all(isinstance(text, str) for text in texts) or row.get("continuation") == "":
        raise ValueError("a text of it is empty, or no text")
    for options in (row[field] for field in FIELDS[task.kind] if field in OPTIONS):
        if not isinstance(options, list) or not all(isinstance(text, str) and text for text in options):
            raise ValueError("its options are no list of texts")
        if type(row["gold"]) is not int or not (len(options) > 1 and 0 <= row["gold"] < len(options)):
            raise ValueError(f"gold {row['gold']!r} is none of its {len(options)} options")
    return row
