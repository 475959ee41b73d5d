"""The counts of a cleaning, in a file beside the token shards of each split, from which the report has them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypedDict

from quern.records import read_json
from quern.temporaries import write_whole
from quern.text.clean.steps import Cleaned

SPLITS = ("train", "val")


def recorded(texts: Iterator[str], folder: Path, split: str) -> Iterator[str]:
    """Yields the documents, and writes the counts when all of them were read. Other texts than `Cleaned` have none."""
    yield from texts
    if isinstance(texts, Cleaned):
        steps = [{"step": name, "removed": count} for name, count in texts.removed.items()]
        write_whole(_path(folder, split), json.dumps({"documents": texts.documents, "steps": steps}, indent=1))


class _Counts(TypedDict):
    documents: int
    steps: list[dict[str, Any]]


def read_records(folder: Path) -> list[dict[str, Any]]:
    """For each split and step the documents that it removed, and those that the split had before its first step."""
    rows = []
    for split in SPLITS:
        if _path(folder, split).exists():
            found = read_json(_path(folder, split), _Counts, "prepare the data again")
            rows += [{"split": split, "documents": found["documents"], **step} for step in found["steps"]]
    return rows


def _path(folder: Path, split: str) -> Path:
    return folder / f"cleaning-{split}.json"
