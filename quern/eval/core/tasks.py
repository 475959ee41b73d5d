"""The 22 tasks of CORE: files, shots, delimiters and baselines, and the reader of their files.

Two versions of the baselines exist. v1 is that of the paper and of most published numbers, GPT-2's 0.2565 among
them; v2 corrects three tasks. Both are always reported, with the version's name.

Source: DCLM (Li et al., 2024, arXiv 2406.11794), its evaluation code of 2025-09, and the data of LLM Foundry.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

Kind = Literal["choice", "schema", "language"]
FIELDS: Mapping[Kind, tuple[str, ...]] = MappingProxyType(
    {
        "choice": ("query", "choices", "gold"),
        "schema": ("context_options", "continuation", "gold"),
        "language": ("context", "continuation"),
    }
)
"""The keys of a row, by the kind of its task."""
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


def find_file(folder: Path, task: CoreTask) -> Path | None:
    """The file of a task anywhere in a folder: .jsonl, also gzipped; None if it is missing."""
    for name in (f"{task.file}.jsonl", f"{task.file}.jsonl.gz"):
        if found := sorted(folder.rglob(name)):
            return found[0]
    return None


def read_rows(path: Path, task: CoreTask) -> list[dict[str, Any]]:
    """The rows of a task's file, in the file's order.

    Raises:
        ValueError: A line is not a row of this kind of task, or there are too few rows for the shots.
    """
    rows = []
    with _open(path) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                rows.append(_row(line, task, f"{path}, line {number}"))
    if len(rows) <= task.shots:
        raise ValueError(
            f"{path} has {len(rows)} rows, and {task.name} needs more than its {task.shots} shots: "
            "take the whole file, or leave the task out"
        )
    return rows


def _open(path: Path) -> Any:
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


def _row(line: str, task: CoreTask, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
        missing = [field for field in FIELDS[task.kind] if field not in row]
        options = row.get("choices", row.get("context_options", ()))
        if missing:
            raise ValueError(f"it has no {', '.join(missing)}")
        if task.kind != "language" and not (len(options) > 1 and 0 <= int(row["gold"]) < len(options)):
            raise ValueError(f"gold {row['gold']!r} is none of its {len(options)} options")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where} is no row of {task.name}: {error}") from error
    return row


def missing_tasks(folder: Path) -> Iterator[CoreTask]:
    """The tasks whose file a folder lacks."""
    return (task for task in TASKS if find_file(folder, task) is None)
