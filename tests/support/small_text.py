"""A small text to train on, and the conversations of files."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from quern.text.chat import Message
from quern.text.conversations import conversation_rows
from quern.text.documents import read
from quern.text.sources import Where, files, list_talks
from quern.text.tinyworld import corpus


def write_text(folder: Path) -> None:
    """Writes text.jsonl, a few documents."""
    with open(folder / "text.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in corpus.documents(0, 0.003, "train"))


def read_source(source: Where, *how: Any, **named: Any) -> Iterator[str]:
    """`read` of a file, a folder, or several of these."""
    return read(files(source), *how, **named)


def read_conversations(source: Where, log: Callable[[str], None] | None = None) -> Iterator[list[Message]]:
    """The messages alone of `conversation_rows`."""
    return (row.messages for row in conversation_rows(list_talks(source), log))
