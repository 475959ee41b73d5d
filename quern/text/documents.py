"""Documents and conversations from files.

Documents come as an iterator of (text, position), where the position names the next document to read. A source is a
file or a folder (sources.py) of

    .txt .md            a document; a long one becomes several
    .csv .tsv .parquet  a document a row, in the column "text" or another one that is named
    .jsonl .json        a document a line or an element, {"text": "…"}; in a .json also a plain string;
                        or a conversation, in one of the shapes of conversations.py

Empty documents are skipped. It downloads nothing (hub.py) and knows no tokens (tokenizer.py).
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from quern.text.chat import Message
from quern.text.conversations import KEYS, no_shape, to_messages
from quern.text.formats import MissingColumns, place, records
from quern.text.sources import files, format_of, list_source

CONVERSATION_FORMATS = (".jsonl", ".json", ".parquet")
NAMES_SHOWN, NAME_CHARACTERS = 12, 40


class Position(NamedTuple):
    """The next document to read: the file's index in `files(source)`, and the record in it.

    A record is a row (.parquet, .csv, .tsv), a line (.jsonl), an element (.json) or a piece (.txt, .md), from 0.
    """

    file: int
    record: int


START = Position(0, 0)


def read(source: str | Path, start: Position = START, column: str = "text") -> Iterator[tuple[str, Position]]:
    """Reads documents; resuming at a position equals never having stopped.

    Args:
        source: A file or a folder.
        start: The first document to read.
        column: The column (.parquet, .csv, .tsv) or the key (.jsonl, .json) that holds the text.

    Yields:
        (text, position of the next document).

    Raises:
        ValueError: A file or a record cannot be read as text; the message names it.
        OSError: A file is missing or cut short.
    """
    for index, path in enumerate(files(source)):
        if index < start.file:
            continue
        first = start.record if index == start.file else 0
        try:
            for value, record in records(path, first, (column,)):
                text = _text(value, path, record, column)
                if text:
                    yield text, Position(index, record + 1)
        except MissingColumns as error:
            raise ValueError(f"{path}: {_no_column(column, error.names)}") from error


def _text(value: Any, path: Path, record: int, column: str) -> str:
    if isinstance(value, dict):
        if column not in value:
            raise ValueError(f"{place(path, record)}: {_no_column(column, list(value))}")
        value = value[column]
    elif not isinstance(value, str) or format_of(path) == ".jsonl":
        raise ValueError(f'{place(path, record)}: expected an object such as {{"{column}": …}}')
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(
            f"{place(path, record)}: {column!r} holds {type(value).__name__}, not text: "
            "make it text, or name what holds the text with --text.column NAME"
        )
    _refuse_surrogates(value, path, record)
    return value


def _refuse_surrogates(text: str, path: Path, record: int) -> None:
    r"""JSON can spell "\ud800", half of a pair: no character, and no encoding of Unicode can hold it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{place(path, record)}: the text holds the lone surrogate {ascii(text[error.start])[1:-1]}, which is no "
            "character: remove it, or complete the pair that it is half of"
        ) from error


def read_conversations(source: str | Path, log: Callable[[str], None] | None = None) -> Iterator[list[Message]]:
    """Reads conversations, each checked and in quern's own format. One without an assistant's turn is skipped.

    Args:
        source: A file or a folder of .jsonl, .json and .parquet files.
        log: Called with lines on what is read, ignored and skipped.

    Yields:
        The messages of a conversation.

    Raises:
        ValueError: A record is not a conversation, or none of them has an assistant's turn; the message names the file
            and the record.
        OSError: A file is missing or cut short.
    """
    found = list_source(source, CONVERSATION_FORMATS)
    if log is not None:
        for line in found.lines("conversations"):
            log(line)
    skipped: list[str] = []
    count = 0
    for path in found.files:
        for messages, where in _conversations(path):
            if any(message["role"] == "assistant" for message in messages):
                count += 1
                yield messages
            else:
                skipped.append(where)
    if skipped and not count:
        raise ValueError(
            f"{skipped[0]}: there is no assistant's turn, nor in any other conversation of {source}: fine-tuning "
            "learns the assistant's answers, so add them"
        )
    if skipped and log is not None:
        log(f"conversations: skipped {len(skipped):,} without an assistant's turn, the first is {skipped[0]}")


def _conversations(path: Path) -> Iterator[tuple[list[Message], str]]:
    """(messages, place) of every conversation in a file."""
    try:
        for value, record in records(path, 0, KEYS):
            try:
                messages = to_messages(value)
            except (TypeError, KeyError, AttributeError, ValueError) as error:
                raise ValueError(f"{place(path, record)}: not a conversation: {error}") from error
            _refuse_surrogates(json.dumps(messages, ensure_ascii=False), path, record)
            yield messages, place(path, record)
    except MissingColumns as error:
        raise ValueError(f"{path}: not a conversation: {no_shape(error.names)}") from error


def _no_column(column: str, names: Sequence[str]) -> str:
    shown = [name if len(name) <= NAME_CHARACTERS else f"{name[:NAME_CHARACTERS]}…" for name in names[:NAMES_SHOWN]]
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    there_are = ", ".join(map(repr, shown)) or "nothing"
    hint = f"there is no {column!r}, only {there_are}{more}: name the one that holds the text with --text.column NAME"
    if {"messages", "conversations"} & set(names):
        hint += " (conversations are for fine-tuning, --conversations)"
    return hint
