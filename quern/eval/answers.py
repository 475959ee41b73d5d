"""The answers to a task's items on disk, one file for each kind of item: NAME.answers.jsonl.

The first line has the settings; "task" is the score's name. Each further line is an item: its number, the hash of its
question and answer, the model's answer, the right one, and its score: 1 if it is right, else 0, or a share.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quern.eval.generative import Answered
from quern.eval.task import Item
from quern.temporaries import write_whole

ENDING = ".answers.jsonl"


def item_hash(item: Item) -> str:
    """16 hex digits over the conversation and the answer of an item; the model's tokenizer plays no part."""
    content = json.dumps([item.messages, item.answer, item.choices], sort_keys=True)
    return hashlib.sha256(content.encode("utf-8")).hexdigest()[:16]


def write_answers(folder: Path, task: str, settings: dict[str, Any], replies: Sequence[Answered]) -> None:
    """Writes the answers to FOLDER/TASK/KIND.answers.jsonl. An earlier evaluation's are replaced."""
    for kind in dict.fromkeys(reply.item.kind for reply in replies):
        own = [reply for reply in replies if reply.item.kind == kind]
        scored = [(reply.item, reply.text, int(reply.correct)) for reply in own]
        write_items(folder / _plain(task) / f"{_plain(kind)}{ENDING}", {**settings, "task": f"{task}/{kind}"}, scored)


def write_items(path: Path, header: dict[str, Any], scored: Sequence[tuple[Item, str, float]]) -> None:
    """Writes one file. scored: (item, answer, score) of each item."""
    lines = [header]
    for number, (item, answer, score) in enumerate(scored):
        known = {"item": number, "prompt": item_hash(item), "answer": answer, "gold": item.answer}
        lines.append({**known, "score": score})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "".join(json.dumps(line) + "\n" for line in lines))


def _plain(name: str) -> str:
    """The name as a file's: a task file may choose any."""
    return re.sub(r"[^\w.-]+", "_", name).lstrip(".") or "_"
