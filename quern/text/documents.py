"""Reads the documents of a source, and converts the records of its files; counts what cannot be read and is skipped.

readers.py has the text of a file and the records of JSON files and tables.
"""

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar, cast

from quern.terminal import silent
from quern.text.readers import PLAIN, UTF8, Malformed, UnreadableError, format_of, read_records

NAMES_SHOWN, NAME_CHARACTERS = 12, 40
MARK = re.compile(r"(<\|end_?of_?text\|>)|^[ \t]*(<\|\w+\|>|</?s>|<eos>|\[EOS\])[ \t]*$", re.MULTILINE | re.IGNORECASE)
"""A mark that ends documents: as text, a model would learn to write it."""
MARKED_FILES = 8
TAG = re.compile(r"</?(?:p|br|div|span|a|li|ul|td|tr|table|h[1-6]|html|body|head|script|img)\b[^<>]*>", re.IGNORECASE)
PLAIN_CHARACTERS = 100  # a text with a tag in so many characters is a web page
JSON_LINES = re.compile(r'\s*\{".*\}\s*\n\{"')
FEW_RECORDS = 1000  # a larger source may have one malformed record in so many
MOST_AT_ONCE = 10  # more malformed records above that share end the reading at once, not at the end of the source
Found = TypeVar("Found")
Log = Callable[[str], None]


def read(
    paths: Sequence[Path],
    column: str = "text",
    log: Log | None = None,
    separator: str | None = None,
    encoding: str = UTF8,
) -> Iterator[str]:
    """Reads the documents of files of texts (`sources.files`). column: the column or the key of the text in tables and
    JSON. Takes the other arguments of `converted`, and raises its errors."""
    found = converted(paths, (column,), partial(_text, column=column), log, separator, encoding)
    return (text for text, _, _ in found if text)


def _text(value: Any, column: str) -> str:
    if isinstance(value, dict):
        if column not in value:
            raise ValueError(_no_column(column, list(value)))
        value = value[column]
    elif not isinstance(value, str):
        raise ValueError(f'expected an object such as {{"{column}": …}}')
    if not isinstance(value, str | None):
        raise ValueError(f"{column!r} holds {type(value).__name__}, not text: convert it, or give --text.column NAME")
    refuse_surrogates(value or "")
    return value or ""


def refuse_surrogates(text: str) -> None:
    r"""Refuses "\ud800" from JSON, half of a surrogate pair, which no Unicode encoding can represent."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])[1:-1]
        raise ValueError(
            f"the text holds {half}, half of a surrogate pair: remove it, or add the other half"
        ) from error


def warning_of(paths: Sequence[Path], separated: bool = False, encoding: str = "utf-8") -> str | None:
    """Looks for what a model would learn to write by mistake, at the beginning of the first text files: a mark that
    ends documents, unless the marks are known (`separated`), the tags of a web page, or JSON. Returns a line for the
    user; None if there is nothing of the kind."""
    text_files = (path for path in paths if format_of(path) in (*PLAIN, "") and path.exists())
    for path in islice(text_files, MARKED_FILES):
        with suppress(UnreadableError, OSError):  # the reading tells of it
            for text, _, _ in islice(converted([path], (), str, encoding=encoding), 1):
                if not separated and (found := MARK.search(text)):
                    mark = found[1] or found[2]
                    instead = f"if it ends documents, give --text.separator {shlex.quote(mark)}"
                    return f"warning: {path} has {mark}, which is read as text: {instead}"
                tags = PLAIN_CHARACTERS * len(TAG.findall(text)) > len(text)
                if tags or JSON_LINES.match(text):
                    holds, ending = ("is full of HTML tags", "html") if tags else ("holds lines of JSON", "jsonl")
                    return f"warning: {path} {holds}, which the model would learn: name it .{ending} instead"
    return None


def _no_column(column: str, names: Sequence[str]) -> str:
    shown = [name if len(name) <= NAME_CHARACTERS else f"{name[:NAME_CHARACTERS]}…" for name in names[:NAMES_SHOWN]]
    there_are = ", ".join(map(repr, shown)) or "nothing"
    there_are += f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    hint = f"there is no {column!r}, only {there_are}: name the one that holds the text with --text.column NAME"
    if {"messages", "conversations"} & set(names):
        hint += " (conversations are for fine-tuning, --conversations)"
    return hint


@dataclass
class _Skipped:
    """Counts what the reading of a source skips: records, and whole files."""

    log: Log | None
    first: str = ""
    odd: int = 0
    seen: int = 0
    bytes_read: int = 0
    partly: int = 0  # records of the files that cannot be read, before the fault
    bad: list[tuple[int, Exception]] = field(default_factory=list)  # bytes and error of the files that cannot be read

    def skip(self, error: Malformed) -> None:
        """Counts a malformed record, once for each of its lines; raises ValueError if there are too many."""
        self.odd += error.lines
        self.seen += error.lines - 1
        self.first = self.first or str(error)
        most = MOST_AT_ONCE + self.seen // FEW_RECORDS
        if self.log is None or self.odd >= self.seen > error.lines or self.odd > most:
            raise self._refusal() from error.__cause__

    def finish(self, files: int) -> None:
        """Logs what was skipped of so many files, or raises the first error if it is too much."""
        log = self.log or silent
        if self.odd and self.seen < max(FEW_RECORDS + 1, FEW_RECORDS * self.odd):
            raise self._refusal()
        if self.odd:
            log(f"skipped {self.odd:,} malformed of {self.seen:,} records; the first is {self.first}")
        if self.bad:
            error, told = self.bad[0][1], f"{len(self.bad):,} of {files:,} files"
            if len(self.bad) == files:
                raise type(error)(f"{error}; {told} cannot be read: repair them, or name others")
            if sum(size for size, _ in self.bad) > self.bytes_read:
                instead = "cannot be read, with more than half of the bytes: leave them out (in --data: --data.exclude)"
                raise type(error)(f"{error}; {told} {instead}")
            but = f", except {self.partly:,} records before a fault" if self.partly else ""
            log(f"skipped {told} that cannot be read{but}; the first: {error}")

    def _refusal(self) -> ValueError:
        are = "is" if self.odd == 1 else "are"
        more = f"; {self.odd:,} of {self.seen:,} records {are} malformed, and 1 in {FEW_RECORDS:,} may be"
        return ValueError(self.first + (more if self.seen > 1 else ""))


def converted(
    paths: Sequence[Path],
    wanted: Sequence[str],
    convert: Callable[[Any], Found],
    log: Log | None = None,
    separator: str | None = None,
    encoding: str = UTF8,
    whole: bool = False,
    refusal: str = "",
) -> Iterator[tuple[Found, Path, int]]:
    """Reads and converts the records of a source. With a log, the odd malformed record does not stop a large source,
    and the odd file that cannot be read does not stop a source of several (docs/data.md).

    A record is malformed if it is not of its format, or if it cannot be converted. A file among several that begins
    with two malformed records, or has no other, counts as one that cannot be read.

    Args:
        wanted: The columns to read from a table; the others are `UNREAD`.
        convert: Takes a value. Raises ValueError, TypeError, LookupError or AttributeError for a malformed one.
        log: Takes a line on what was skipped, when all are read. None: no record is skipped.
        separator: The mark between the records of text; None makes the file one record.
        encoding: The encoding of text, tables and JSON, or "auto"; see readers.py.
        whole: A file of text is one record, however long it is.
        refusal: Begins the reason for which a record cannot be converted, such as "no question: ".

    Yields what `convert` returned, its file, and its number there (see `place`).

    Raises:
        ValueError: A file is damaged, or too many records are malformed; the message names the first.
        OSError: A file cannot be read to its end.
    """
    skipped, tolerant = _Skipped(log), log is not None and len(paths) > 1
    for path in paths:
        before = skipped.seen - skipped.odd
        try:
            values = read_records(path, wanted, separator, encoding, whole)
            records = ((_convert(value, convert, path, record, refusal), record) for value, record in values)
            first = list(islice(records, 2 if tolerant else 0))
            if first and all(isinstance(found, Malformed) for found, _ in first):
                raise UnreadableError(str(first[0][0])) from cast(Malformed, first[0][0]).__cause__
            for found, record in chain(first, records):
                skipped.seen += 1
                if isinstance(found, Malformed):
                    skipped.skip(found)
                else:
                    yield found, path, record
            skipped.bytes_read += path.stat().st_size
        except (UnreadableError, OSError) as error:
            if not tolerant:
                raise
            skipped.partly += skipped.seen - skipped.odd - before
            skipped.bad.append((path.stat().st_size if path.exists() else 0, error))
    skipped.finish(len(paths))


def _convert(value: Any, convert: Callable[[Any], Found], path: Path, record: int, refusal: str) -> Found | Malformed:
    if isinstance(value, Malformed):
        return value
    try:
        return convert(value)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        missing, typed = f"the key {error} is missing", f"a part of it has another type ({error})"
        fault = missing if isinstance(error, KeyError) else typed
        odd = Malformed(f"{place(path, record)}: {refusal}{error if isinstance(error, ValueError) else fault}")
        odd.__cause__ = error
        return odd


def read_rows(
    path: Path, what: str, columns: Sequence[str], convert: Callable[[Any], Found], log: Log | None = None
) -> list[Found]:
    """Reads a whole file of rows, such as the questions of a task.

    Args:
        what: The rows, for messages.
        columns, log: `wanted` and `log` of `converted`.
        convert: Takes a row, an object. Raises the errors that `converted` names for a malformed one.

    Raises:
        ValueError: A row cannot be converted, or there is none; the message names the file and the row.
        OSError: The file cannot be read to its end.
    """

    def row(value: Any) -> Found:
        if not isinstance(value, dict):
            raise ValueError("it is no object")
        return convert(value)

    rows = [found for found, _, _ in converted([path], columns, row, log, refusal=f"no row of {what}: ")]
    if not rows:
        raise ValueError(f"{path} has no rows of {what}: take the whole file")
    return rows


def place(path: Path, record: int) -> str:
    """The file and the record, counted from 1, for messages."""
    return f"{path}, {'line' if format_of(path) == '.jsonl' else 'record'} {record + 1}"
