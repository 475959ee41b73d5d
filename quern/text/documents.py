"""Reads documents and conversations from the records of files (formats.py). Empty documents are skipped."""

import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from quern.terminal import silent
from quern.text.chat import Message, parts
from quern.text.conversations import KEYS, of_whatsapp, to_messages
from quern.text.formats import converted, place
from quern.text.readers import UnreadableError
from quern.text.sources import PLAIN, Where, files, format_of, list_talks

NAMES_SHOWN, NAME_CHARACTERS = 12, 40
MARK = re.compile(r"(<\|end_?of_?text\|>)|^[ \t]*(<\|\w+\|>|</?s>|<eos>|\[EOS\])[ \t]*$", re.MULTILINE | re.IGNORECASE)
"""A mark that ends documents: as text, a model would learn to write it."""
MARKED_FILES = 8
TAG = re.compile(r"</?(?:p|br|div|span|a|li|ul|td|tr|table|h[1-6]|html|body|head|script|img)\b[^<>]*>", re.IGNORECASE)
PLAIN_CHARACTERS = 100
"""A text with a tag in so many characters is a web page."""


class Conversation(NamedTuple):
    messages: list[Message]
    place: str  # its file and record, for messages


def read(
    source: Where,
    column: str = "text",
    log: Callable[[str], None] | None = None,
    separator: str | None = None,
    encoding: str = "utf-8",
) -> Iterator[str]:
    """Reads documents.

    Args:
        source: A file, a folder, or several of these.
        column: The column (.parquet, .csv, .tsv) or key (.jsonl, .json) of the text.
        log: Called with a line on malformed records that are skipped; see `converted`.
        separator: The mark that ends a document of text; None makes a file one document.
        encoding: The encoding of text, or "auto"; see readers.py.

    Raises:
        ValueError: A file or a record cannot be read as text; the message names it.
        OSError: A file is missing or cut short.
    """
    found = converted(files(source), (column,), partial(_text, column=column), log, separator, encoding)
    return (text for text, _, _ in found if text)


def _text(value: Any, column: str) -> str:
    if isinstance(value, dict):
        if column not in value:
            raise ValueError(_no_column(column, list(value)))
        value = value[column]
    elif not isinstance(value, str):
        raise ValueError(f'expected an object such as {{"{column}": …}}')
    if not isinstance(value, str | None):
        raise ValueError(
            f"{column!r} holds {type(value).__name__}, not text: "
            "make it text, or name what holds the text with --text.column NAME"
        )
    _refuse_surrogates(value or "")
    return value or ""


def _refuse_surrogates(text: str) -> None:
    r"""Refuses "\ud800" from JSON, half of a surrogate pair, which no Unicode encoding can represent."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text holds the lone surrogate {ascii(text[error.start])[1:-1]}, which is no "
            "character: remove it, or complete the pair that it is half of"
        ) from error


def warning_of(paths: Sequence[Path], separated: bool = False, encoding: str = "utf-8") -> str | None:
    """Looks for what a model would learn to write by mistake, at the beginning of the first text files: a mark that
    ends documents, unless the marks are known (`separated`), or the tags of a web page.

    Returns:
        A line for the user; None if there is nothing of the kind.
    """
    text_files = (path for path in paths if format_of(path) in (*PLAIN, "") and path.exists())
    for path in islice(text_files, MARKED_FILES):
        with suppress(UnreadableError, OSError):  # the reading tells of it
            for text, _, _ in islice(converted([path], (), str, encoding=encoding), 1):
                if not separated and (found := MARK.search(text)):
                    mark = found[1] or found[2]
                    instead = f"if it ends documents, give --text.separator {shlex.quote(mark)}"
                    return f"warning: {path} has {mark}, which is read as text: {instead}"
                if PLAIN_CHARACTERS * len(TAG.findall(text)) > len(text):
                    return f"warning: {path} is full of HTML tags, which the model would learn: name it .html instead"
    return None


def conversation_rows(
    source: Where,
    log: Callable[[str], None] | None = None,
    convert: Callable[[Any, Counter[str]], list[Message]] = to_messages,
    keys: Sequence[str] = KEYS,
    limit: int | None = None,
    person: str | None = None,
) -> Iterator[Conversation]:
    """Reads conversations in quern's format, validated. Skips those without an assistant turn to learn.

    Args:
        source: A file, a folder, or several of these, of .jsonl, .json, .csv, .tsv and .parquet files; or a .txt file
            that WhatsApp exported.
        log: Called with lines about read, ignored and skipped files, records and keys.
        convert: Converts a record to messages, and counts the keys that it ignores.
        keys: The keys of a record that `convert` reads.
        limit: The most conversations to read.
        person: Whom the model learns to write as, in WhatsApp's export.

    Raises:
        ValueError: A record is not a conversation, or no conversation has an assistant turn; the message names the file
            and the record.
        OSError: A file is missing or cut short.
    """
    found, say = list_talks(source), log or silent
    for line in found.lines("conversations"):
        say(line)
    skipped, count, first, ignored = 0, 0, "", Counter[str]()

    def messages_of(value: Any) -> list[list[Message]]:
        try:
            messages = of_whatsapp(value, person) if isinstance(value, str) else [convert(value, ignored)]
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(f"not a conversation: {error}") from error
        _refuse_surrogates(json.dumps(messages, ensure_ascii=False))
        return messages

    several = converted(found.files, keys, messages_of, log and (lambda line: say(f"conversations: {line}")))
    for messages, path, record in ((one, path, record) for talks, path, record in several for one in talks):
        if limit is not None and count >= limit:
            break
        if any(_learned(message) for message in messages):
            count += 1
            yield Conversation(messages, place(path, record))
        else:
            skipped += 1
            first = first or place(path, record)
    if skipped and not count:
        raise ValueError(
            f"{first}: there is no assistant's turn, nor in any other conversation of the source: fine-tuning "
            "learns the assistant's answers, so add them"
        )
    if skipped:
        say(f"conversations: skipped {skipped:,} without an assistant's turn to learn, the first is {first}")
    if ignored:
        named = ", ".join(f"{key!r} in {rows:,}" for key, rows in ignored.most_common(NAMES_SHOWN))
        say(f"conversations: keys that are not used, with the number of records: {named}")


def _learned(message: Message) -> bool:
    """Whether a part of a message, or its end, is learned."""
    own = (part.get("weight") for part in parts(message) if part["type"] != "output")
    return message["role"] == "assistant" and any(weight != 0 for weight in (message.get("weight"), *own))


def _no_column(column: str, names: Sequence[str]) -> str:
    shown = [name if len(name) <= NAME_CHARACTERS else f"{name[:NAME_CHARACTERS]}…" for name in names[:NAMES_SHOWN]]
    there_are = ", ".join(map(repr, shown)) or "nothing"
    there_are += f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    hint = f"there is no {column!r}, only {there_are}: name the one that holds the text with --text.column NAME"
    if {"messages", "conversations"} & set(names):
        hint += " (conversations are for fine-tuning, --conversations)"
    return hint
