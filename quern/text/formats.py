"""Reads the records of files (docs/data.md, "Files of your own"); documents.py and conversations.py interpret them.

A .json file is read at once, Parquet one row group at a time. A text longer than `TEXT_PIECE_CHARACTERS` becomes
several records, cut at line ends. An invalid byte or a NUL byte raises an error with file and line, because replacement
characters would be trained on unnoticed.
"""

import csv
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar, cast

import pyarrow as pa
import pyarrow.parquet as pq

from quern.terminal import human_size, silent
from quern.text.readers import CONVERTED, CUE, UTF8, UnreadableError, convert, open_utf8, recognized
from quern.text.sources import COMPRESSED, Listing, format_of

TEXT_PIECE_CHARACTERS = 1 << 20
PARQUET_BATCH_ROWS = 256
JSON_BYTES = 1 << 29
CSV_FIELD_CHARACTERS = 1 << 28
FEW_RECORDS = 1000
"""A larger source may have one malformed record in so many."""
MOST_AT_ONCE = 10
"""More malformed records above that share end the reading at once, not at the end of the source."""
NO_TEXT = re.compile(rb"[\1-\x08\x0e-\x1a]")
"""Bytes of programs and pictures; logs with colours have the escape."""
COMPRESSION = 3
"""Bytes of text in a byte of a compressed file, about: 2.7 by gzip, 3.5 by Zstandard's best."""
UNREAD: Any = ...
"""The value of a table's column that is not read."""
Found = TypeVar("Found")
Records = Iterator[tuple[Any, int]]
"""Values and their numbers in the file, from 0: text (.txt, .md), JSON values (.jsonl, .json), or objects with all
columns (.csv, .tsv, .parquet); `Malformed` in the place of a malformed record."""
Log = Callable[[str], None]
REFUSALS = (ValueError, TypeError, LookupError, AttributeError)
"""The errors of a function that converts records."""


class Malformed(ValueError):
    """A record that is no record of its format; the next one can be read. lines: what it takes of the file."""

    def __init__(self, reason: str, lines: int = 1) -> None:
        super().__init__(reason)
        self.lines = lines


@dataclass
class _Skipped:
    """Counts what the reading of a source skips: records, and whole files."""

    log: Log | None
    first: str = ""
    odd: int = 0
    seen: int = 0
    bytes_read: int = 0
    bad: list[tuple[int, Exception]] = field(default_factory=list)  # bytes and error of the files that cannot be read

    def skip(self, error: Malformed) -> None:
        """Counts a malformed record; raises ValueError if there are too many."""
        self.odd += error.lines
        if not self.first and self.log is not None:
            self.log(f"skipping malformed records, of which 1 in {FEW_RECORDS:,} may be; the first is {error}")
        self.first = self.first or str(error)
        if self.log is None or self.odd >= self.seen > 1 or self.odd > MOST_AT_ONCE + self.seen // FEW_RECORDS:
            raise self._refusal() from error.__cause__

    def finish(self, files: int) -> None:
        """Logs what was skipped of so many files, or raises the first error if it is too much."""
        log = self.log or silent
        if self.odd and self.seen < max(FEW_RECORDS + 1, FEW_RECORDS * self.odd):
            raise self._refusal()
        if self.odd:
            log(f"skipped {self.odd:,} malformed of {self.seen:,} records")
        if self.bad:
            error, told = self.bad[0][1], f"{len(self.bad):,} of {files:,} files"
            if sum(size for size, _ in self.bad) > self.bytes_read:
                instead = "cannot be read, with more than half of the bytes: leave them out with --data.exclude"
                raise type(error)(f"{error}; {told} {instead}")
            log(f"skipped {told} that cannot be read; the first: {error}")

    def _refusal(self) -> ValueError:
        more = f"; {self.odd:,} of {self.seen:,} records are malformed, and 1 in {FEW_RECORDS:,} may be"
        return ValueError(self.first + (more if self.odd > 1 else ""))


def converted(
    paths: Sequence[Path],
    wanted: Sequence[str],
    convert: Callable[[Any], Found],
    log: Log | None = None,
    separator: str | None = None,
    encoding: str = UTF8,
) -> Iterator[tuple[Found, Path, int]]:
    """Reads and converts the records of a source. With a log, the odd malformed record does not stop a large source,
    and the odd file that cannot be read does not stop a source of several (docs/data.md).

    A record is malformed if it is not of its format, or if it cannot be converted. A file among several that begins
    with two malformed records, or has no other, counts as one that cannot be read.

    Args:
        wanted: The columns to read from a table; the others are `UNREAD`.
        convert: Takes a value. Raises one of `REFUSALS`.
        log: Takes a line when the first record is skipped, and one when all are read. None: no record is skipped.
        separator: The mark between the records of text; None makes the file one record.
        encoding: The encoding of text, tables and JSON, or "auto"; see readers.py.

    Yields:
        (what `convert` returned, its file, its number there), see `place`.

    Raises:
        ValueError: A file is damaged, or too many records are malformed; the message names the first.
        OSError: A file cannot be read to its end.
    """
    skipped, tolerant = _Skipped(log), log is not None and len(paths) > 1
    for path in paths:
        try:
            values = _records(path, wanted, separator, encoding)
            records = ((_convert(value, convert, path, record), record) for value, record in values)
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
            skipped.bad.append((path.stat().st_size if path.exists() else 0, error))
    skipped.finish(len(paths))


def _convert(value: Any, convert: Callable[[Any], Found], path: Path, record: int) -> Found | Malformed:
    if isinstance(value, Malformed):
        return value
    try:
        return convert(value)
    except REFUSALS as error:
        odd = Malformed(f"{place(path, record)}: {error}")
        odd.__cause__ = error
        return odd


def read_rows(
    path: Path, what: str, columns: Sequence[str], convert: Callable[[Any], Found], log: Log | None = None
) -> list[Found]:
    """Reads a whole file of rows, such as the questions of a task.

    Args:
        what: The rows, for messages.
        columns, log: As for `converted`.
        convert: Takes a row, an object. Raises as for `converted`.

    Raises:
        ValueError: A row cannot be converted, or there is none; the message names the file and the row.
        OSError: The file cannot be read to its end.
    """

    def row(value: Any) -> Found:
        try:
            if not isinstance(value, dict):
                raise ValueError("it is no object")
            return convert(value)
        except REFUSALS as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"no row of {what}: {reason}") from error

    rows = [found for found, _, _ in converted([path], columns, row, log)]
    if not rows:
        raise ValueError(f"{path} has no rows of {what}: take the whole file")
    return rows


def place(path: Path, record: int) -> str:
    """The file and the record, counted from 1, for messages."""
    return f"{path}, {'line' if format_of(path) == '.jsonl' else 'record'} {record + 1}"


def text_megabytes(listing: Listing, column: str) -> float:
    """The megabytes of text that a source has in a column, about, without reading it."""
    return sum(_text_bytes(entry.path, column) for entry in listing.read) / 1e6


def _text_bytes(path: Path, column: str) -> int:
    if format_of(path) != ".parquet":
        return path.stat().st_size * (COMPRESSION if path.suffix.lower() in COMPRESSED else 1)
    try:
        metadata = pq.read_metadata(path)
    except (pa.ArrowException, OSError):  # the reading skips it, or refuses it
        return path.stat().st_size
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    chunks = (group.column(number) for group in groups for number in range(group.num_columns))
    return sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema == column)


def _records(path: Path, wanted: Sequence[str], separator: str | None, encoding: str) -> Records:
    match format_of(path):
        case ".jsonl":
            return _json_lines(path, encoding)
        case ".json":
            values = _json_values(path, encoding)
        case ".parquet":
            values = _parquet_rows(path, wanted)
        case ".csv" | ".tsv":
            values = _table_rows(path, wanted, encoding)
        case form if form in CONVERTED:
            values = [convert(path)]
        case _ if separator is not None:
            values = _separated(path, separator, encoding)
        case form:
            values = _text_pieces(path, encoding)
            values = (CUE.sub("", text) for text in values) if form in (".srt", ".vtt") else values
    return ((value, record) for record, value in enumerate(values))


def _cut_short(path: Path, error: Exception) -> OSError:
    return OSError(f"cannot read {path}, it may be cut short or damaged: {error}")


def _lines(path: Path, encoding: str) -> Iterator[bytes]:
    """The lines of a file in UTF-8, decompressed according to its name."""
    try:
        with open_utf8(path, encoding) as stream:
            yield from stream
    except OSError as error:
        raise _cut_short(path, error) from error


def _decode(raw: bytes, path: Path, line: int) -> str:
    """Decodes lines; line: the number of the first one, from 0."""
    try:
        text = raw.decode("utf-8-sig" if line == 0 else UTF8)  # the first line can start with a byte order mark
    except UnicodeDecodeError as error:
        before = raw[: error.start].split(b"\n")
        if NO_TEXT.search(raw):
            raise UnreadableError(f"{path} is no text, but a program, a picture or the like: leave it out") from error
        like = recognized(path)
        hint = "" if like in (None, UTF8) else f"it looks like {like}, which --text.encoding auto reads; or "
        raise UnreadableError(
            f"{path}, line {line + len(before)}: byte {len(before[-1]) + 1} of the line is "
            f"not UTF-8 ({error.reason}): {hint}convert the file to UTF-8, for example with iconv"
        ) from error
    if "\0" in text:
        raise UnreadableError(
            f"{path}, line {line + 1}: NUL bytes, so it is no text, or UTF-16 without a mark (--text.encoding "
            "utf-16-le): leave it out with --data.exclude"
        )
    return text


def _text_pieces(path: Path, encoding: str) -> Iterator[str]:
    piece, size = list[str](), 0
    for line, raw in enumerate(_lines(path, encoding)):
        piece.append(_decode(raw, path, line))
        size += len(piece[-1])
        if size >= TEXT_PIECE_CHARACTERS:
            yield "".join(piece)
            piece, size = [], 0
    if piece:
        yield "".join(piece)


def _separated(path: Path, separator: str, encoding: str) -> Iterator[str]:
    """The texts between separators, without line ends around them; a text longer than a piece becomes several."""
    rest = ""
    for piece in _text_pieces(path, encoding):
        *whole, rest = (rest + piece).split(separator)
        yield from (text.strip("\r\n") for text in whole)
        if len(rest) >= TEXT_PIECE_CHARACTERS:
            # The end of what has been read may be the beginning of a separator.
            kept = max((n for n in range(len(separator)) if rest.endswith(separator[:n])), default=0)
            yield rest[: len(rest) - kept]
            rest = rest[len(rest) - kept :]
    yield rest.strip("\r\n")


def _json_lines(path: Path, encoding: str) -> Records:
    for line, raw in enumerate(_lines(path, encoding)):
        if not raw.strip():
            continue
        try:
            yield json.loads(_decode(raw, path, line)), line
        except UnreadableError as error:
            yield Malformed(str(error)), line
        except (ValueError, RecursionError) as error:
            yield Malformed(f"{path}, line {line + 1}: not a line of JSON ({error})"), line


def _json_values(path: Path, encoding: str) -> list[Any]:
    try:
        with open_utf8(path, encoding) as stream:
            pieces = iter(lambda: stream.read(1 << 20), b"")  # a larger one would be allocated at once
            raw = b"".join(islice(pieces, (JSON_BYTES >> 20) + 1))
    except OSError as error:
        raise _cut_short(path, error) from error
    if len(raw) > JSON_BYTES:
        raise UnreadableError(
            f"{path} holds more than {human_size(JSON_BYTES)} of JSON, which would be read at once: make it a .jsonl, "
            "for example with jq -c '.[]'"
        )
    text = _decode(raw, path, 0)
    try:
        value = json.loads(text) if text.strip() else []
    except (ValueError, RecursionError) as error:
        lines = "; if each line is a JSON value of its own, rename it to .jsonl" if "Extra data" in str(error) else ""
        raise UnreadableError(f"{path}: not JSON ({error}){lines}") from error
    return value if isinstance(value, list) else [value]


def _table_rows(path: Path, wanted: Sequence[str], encoding: str) -> Iterator[dict[str, Any] | Malformed]:
    csv.field_size_limit(CSV_FIELD_CHARACTERS)  # process-wide; the default limit is 128 KiB
    lines = (_decode(raw, path, line) for line, raw in enumerate(_lines(path, encoding)))
    head = next(lines, "")
    reader = csv.reader(chain([head], lines), delimiter=_delimiter(path, head, wanted), strict=True)
    try:
        names = next(reader, [])
        columns = {name: names.index(name) for name in wanted if name in names}
        if twice := [name for name in columns if names.count(name) > 1]:
            raise UnreadableError(f"{path}, line 1: two columns are named {twice[0]!r}: rename one of them")
        unread, end = dict.fromkeys(names, UNREAD), reader.line_num
        for row in filter(None, reader):
            begin, end = end, reader.line_num
            if len(row) == len(names):
                yield {**unread, **{name: row[index] for name, index in columns.items()}}
                continue
            reason = (
                f"{path}, line {end}: the row has {len(row)} fields, but the first row names "
                f"{len(names)} columns: quote the fields that hold a separator, a quote or a line end"
            )
            yield Malformed(reason, end - begin)
    except csv.Error as error:
        raise UnreadableError(
            f"{path}, line {reader.line_num}: cannot be read as {format_of(path)} ({error}): quote the fields that "
            "hold a separator, a quote or a line end, and double the quotes in them"
        ) from error


def _delimiter(path: Path, head: str, wanted: Sequence[str]) -> str:
    """The separator of a table: a tab in .tsv; in .csv a comma, unless the first row only has the wanted columns, or
    several at all, with another one."""
    if format_of(path) == ".tsv":
        return "\t"
    names = next(csv.reader([head]), [])
    if len(names) > 1 or set(wanted) & set(names):
        return ","
    try:
        return csv.Sniffer().sniff(head, delimiters=";\t|").delimiter
    except csv.Error:
        return ","


def _parquet_rows(path: Path, wanted: Sequence[str]) -> Iterator[dict[str, Any]]:
    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            names = file.schema_arrow.names
            columns = [name for name in wanted if name in names] or names[:1]
            unread = {name: UNREAD for name in names if name not in columns}
            for group in range(file.num_row_groups):
                for batch in file.iter_batches(PARQUET_BATCH_ROWS, row_groups=[group], columns=columns):
                    yield from ({**value, **unread} for value in batch.to_pylist())
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UnreadableError(str(_cut_short(path, error))) from error
