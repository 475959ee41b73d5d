"""Reads the records of files.

    .jsonl        one JSON value per line
    .json         an array of JSON values, or one object; read at once, so at most JSON_BYTES
    .csv .tsv     one row, quoted as in RFC 4180; the first row names the columns, with a comma, a semicolon or a tab
                  between them in .csv
    .parquet      one row, read one row group at a time
    .docx .pdf …  the text that markitdown finds (readers.py)
    any other     text, or the texts between separators; a longer one than TEXT_PIECE_CHARACTERS becomes several
                  records, cut at line ends

Text and tables can be compressed (.gz, .zst). An invalid byte or a NUL byte raises an error with file and line, because
replacement characters would be trained on unnoticed. documents.py and conversations.py interpret the records.
"""

import csv
import json
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from quern.terminal import human_size
from quern.text.readers import (
    CONVERTED,
    CUE,
    UTF8,
    Malformed,
    Skipped,
    UnreadableError,
    convert,
    open_utf8,
    recognized,
)
from quern.text.sources import COMPRESSED, Listing, format_of

TEXT_PIECE_CHARACTERS = 1 << 20
PARQUET_BATCH_ROWS = 256
JSON_BYTES = 1 << 29
CSV_FIELD_CHARACTERS = 1 << 28
NO_TEXT = re.compile(rb"[\0-\x08\x0e-\x1a]")
"""Bytes of programs and pictures; logs with colours have the escape."""
COMPRESSION = 3
"""Bytes of text in a byte of a compressed file, about: 2.7 by gzip, 3.5 by Zstandard's best."""
UNREAD: Any = ...
"""The value of a table's column that is not read."""
Found = TypeVar("Found")
Records = Iterator[tuple[Any, int]]
"""Values and their numbers in the file, from 0: text (.txt, .md), JSON values (.jsonl, .json), or objects with all
columns (.csv, .tsv, .parquet); `Malformed` in the place of a malformed record."""


def converted(
    paths: Sequence[Path],
    wanted: Sequence[str],
    convert: Callable[[Any], Found],
    log: Callable[[str], None] | None = None,
    separator: str | None = None,
    encoding: str = UTF8,
) -> Iterator[tuple[Found, Path, int]]:
    """Reads and converts the records of a source. With a log, the odd malformed record does not stop a large source,
    and the odd file that cannot be read does not stop a source of several.

    A record is malformed if it is not of its format, or if it cannot be converted. Of a source with over `FEW_RECORDS`
    records, one in so many may be: they are skipped, counted, and the first is named. A source whose first records are
    all malformed has another form, and is refused. A file that cannot be read, or whose first two records are
    malformed, is skipped if the files that can be read hold at least as many bytes.

    Args:
        wanted: The columns to read from a table; the others are `UNREAD`.
        convert: Takes a value. Raises ValueError, TypeError, KeyError, IndexError or AttributeError.
        log: Takes a line when the first record is skipped, and one when all are read. None: no record is skipped.
        separator: The mark between the records of text; None makes the file one record.
        encoding: The encoding of text, tables and JSON, or "auto"; see readers.py.

    Yields:
        (what `convert` returned, its file, its number there), see `place`.

    Raises:
        ValueError: A file is damaged, or too many records are malformed; the message names the first.
        OSError: A file cannot be read to its end.
    """
    counted, tolerant = Skipped(log), log is not None and len(paths) > 1
    for path in paths:
        try:
            yield from _converted(path, _records(path, wanted, separator, encoding), convert, counted, tolerant)
            counted.bytes_read += path.stat().st_size
        except (UnreadableError, OSError) as error:
            if not tolerant:
                raise
            counted.bad.append((path.stat().st_size if path.exists() else 0, error))
    counted.finish(len(paths))


def _converted(
    path: Path, records: Records, convert: Callable[[Any], Found], counted: Skipped, tolerant: bool
) -> Iterator[tuple[Found, Path, int]]:
    """The records of a file. If it is one of several (`tolerant`), it is unreadable where it begins with two malformed
    ones, or has no other."""
    begun, early = False, None
    for value, record in records:
        counted.seen += 1
        try:
            if isinstance(value, Malformed):
                raise value
            found = convert(value)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            reason = str(error) if error is value else f"{place(path, record)}: {error}"
            odd = (error.lines if isinstance(error, Malformed) else 1, reason, error)
            if begun or not tolerant:
                counted.skip(*odd)
            elif early:
                raise UnreadableError(early[1]) from error
            else:
                early = odd
            continue
        if early:
            counted.skip(*early)
        begun, early = True, None
        yield found, path, record
    if early:
        raise UnreadableError(early[1])


def read_rows(
    path: Path,
    what: str,
    columns: Sequence[str],
    convert: Callable[[Any], Found],
    log: Callable[[str], None] | None = None,
) -> list[Found]:
    """Reads a whole file of rows, such as the questions of a task.

    Args:
        what: The rows, for messages.
        columns: The columns to read from a table.
        convert: Takes a row, an object. Raises as for `converted`.
        log: As for `converted`.

    Raises:
        ValueError: A row cannot be converted, or there is none; the message names the file and the row.
        OSError: The file cannot be read to its end.
    """

    def row(value: Any) -> Found:
        try:
            if not isinstance(value, dict):
                raise ValueError("it is no object")
            return convert(value)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
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
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    chunks = [group.column(number) for group in groups for number in range(group.num_columns)]
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


def _unreadable(path: Path, error: Exception) -> OSError:
    return OSError(f"cannot read {path}, it may be cut short or damaged: {error}")


def _lines(path: Path, encoding: str) -> Iterator[bytes]:
    """The lines of a file in UTF-8, decompressed according to its name."""
    try:
        with open_utf8(path, encoding) as stream:
            yield from stream
    except OSError as error:
        raise _unreadable(path, error) from error


def _decode(raw: bytes, path: Path, line: int) -> str:
    """Decodes lines; line: the number of the first one, from 0."""
    try:
        return raw.decode("utf-8-sig" if line == 0 else UTF8)  # the first line can start with a byte order mark
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


def _text_pieces(path: Path, encoding: str) -> Iterator[str]:
    piece: list[str] = []
    size = 0
    for line, raw in enumerate(_lines(path, encoding)):
        if b"\0" in raw:
            raise UnreadableError(
                f"{path}, line {line + 1}: NUL bytes, so it is no text, or UTF-16 without a mark (--text.encoding "
                "utf-16-le): leave it out with --data.exclude"
            )
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
            text = _decode(raw, path, line)
        except ValueError as error:
            yield Malformed(str(error)), line
            continue
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            value = Malformed(f"{path}, line {line + 1}: not a line of JSON ({error})")
        yield value, line


def _json_values(path: Path, encoding: str) -> list[Any]:
    try:
        with open_utf8(path, encoding) as stream:
            pieces = iter(lambda: stream.read(1 << 20), b"")  # a larger one would be allocated at once
            raw = b"".join(islice(pieces, (JSON_BYTES >> 20) + 1))
    except OSError as error:
        raise _unreadable(path, error) from error
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
        raise UnreadableError(f"cannot read {path}, it may be cut short or damaged: {error}") from error
