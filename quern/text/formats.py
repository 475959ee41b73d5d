"""Reads the records of files.

    .txt .md      text, or the texts between separators; a longer one than TEXT_PIECE_CHARACTERS becomes several
                  records, cut at line ends
    .jsonl        one JSON value per line
    .json         an array of JSON values, or one object; read at once, so at most JSON_BYTES
    .csv .tsv     one row, quoted as in RFC 4180; the first row names the columns
    .parquet      one row, read one row group at a time

All formats except .parquet can be compressed (.gz, .zst). Text must be UTF-8: an invalid byte raises an error with file
and line, because replacement characters would be trained on unnoticed. documents.py and conversations.py interpret the
records.
"""

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import pyarrow as pa
import pyarrow.parquet as pq

from quern.terminal import human_size
from quern.text.sources import COMPRESSED, Listing, format_of

TEXT_PIECE_CHARACTERS = 1 << 20
PARQUET_BATCH_ROWS = 256
JSON_BYTES = 1 << 29
CSV_FIELD_CHARACTERS = 1 << 28
FEW_RECORDS = 1000
"""A larger source may have one malformed record in so many."""
MOST_AT_ONCE = 10
"""More malformed records above that share end the reading at once, not at the end of the source."""
UNREAD: Any = ...
"""The value of a table's column that is not read."""
Found = TypeVar("Found")
Records = Iterator[tuple[Any, int]]
"""Values and their numbers in the file, from 0: text (.txt, .md), JSON values (.jsonl, .json), or objects with all
columns (.csv, .tsv, .parquet); `Malformed` in the place of a malformed record."""


class Malformed(ValueError):
    """A record that is no record of its format; the next one can be read. lines: what it takes of the file."""

    def __init__(self, reason: str, lines: int = 1) -> None:
        super().__init__(reason)
        self.lines = lines


def converted(
    paths: Sequence[Path],
    wanted: Sequence[str],
    convert: Callable[[Any], Found],
    log: Callable[[str], None] | None = None,
    separator: str | None = None,
) -> Iterator[tuple[Found, Path, int]]:
    """Reads and converts the records of a source. With a log, the odd malformed record does not stop a large source.

    A record is malformed if it is not of its format, or if it cannot be converted. Of a source with over `FEW_RECORDS`
    records, one in so many may be: they are skipped, counted, and the first is named. A source whose first records are
    all malformed has another form, and is refused.

    Args:
        paths: The files.
        wanted: The columns to read from a table; the others are `UNREAD`.
        convert: Takes a value. Raises ValueError, TypeError, KeyError, IndexError or AttributeError.
        log: Takes a line when the first record is skipped, and one when all are read. None: no record is skipped.
        separator: The mark between the records of text (.txt, .md); None makes the file one record.

    Yields:
        (what `convert` returned, its file, its number there), see `place`.

    Raises:
        ValueError: A file is damaged, or too many records are malformed; the message names the first.
        OSError: A file cannot be read to its end.
    """
    first, odd, seen = "", 0, 0

    def refusal() -> str:
        return first + (
            f"; {odd:,} of {seen:,} records are malformed, and 1 in {FEW_RECORDS:,} may be" if odd > 1 else ""
        )

    for path in paths:
        for value, record in _records(path, wanted, separator):
            seen += 1
            try:
                if isinstance(value, Malformed):
                    raise value
                found = convert(value)
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                odd += error.lines if isinstance(error, Malformed) else 1
                reason = str(error) if error is value else f"{place(path, record)}: {error}"
                if not first and log is not None:
                    log(f"skipping malformed records, of which 1 in {FEW_RECORDS:,} may be; the first is {reason}")
                first = first or reason
                if log is None or odd >= seen > 1 or odd > MOST_AT_ONCE + seen // FEW_RECORDS:
                    raise ValueError(refusal()) from error
                continue
            yield found, path, record
    if odd and seen < max(FEW_RECORDS + 1, FEW_RECORDS * odd):
        raise ValueError(refusal())
    if odd and log is not None:
        log(f"skipped {odd:,} malformed of {seen:,} records")


def read_rows(
    path: Path,
    what: str,
    columns: Sequence[str],
    convert: Callable[[Any], Found],
    log: Callable[[str], None] | None = None,
) -> list[Found]:
    """Reads a whole file of rows, such as the questions of a task.

    Args:
        path: The file.
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


def text_megabytes(listing: Listing, column: str) -> float | None:
    """About how many megabytes of text a source has in a column, without reading it.

    Files that are not there yet are taken to be like those that are. None if there is a compressed file or none at all.
    """
    here = [entry for entry in listing.read if entry.path.exists()]
    sizes = [_text_bytes(entry.path, column) for entry in here]
    known = [size for size in sizes if size is not None]
    on_disk = sum(entry.size for entry in here)
    if not on_disk or len(known) < len(sizes):
        return None
    return sum(known) * sum(entry.size for entry in listing.read) / on_disk / 1e6


def _text_bytes(path: Path, column: str) -> int | None:
    if format_of(path) != ".parquet":
        return None if path.suffix.lower() in COMPRESSED else path.stat().st_size
    try:
        metadata = pq.read_metadata(path)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    chunks = [group.column(number) for group in groups for number in range(group.num_columns)]
    return sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema == column)


def _records(path: Path, wanted: Sequence[str], separator: str | None) -> Records:
    match format_of(path):
        case ".txt" | ".md" if separator is not None:
            values = _separated(path, separator)
        case ".txt" | ".md":
            values = _text_pieces(path)
        case ".jsonl":
            return _json_lines(path)
        case ".json":
            values = _json_values(path)
        case ".parquet":
            values = _parquet_rows(path, wanted)
        case _:
            values = _table_rows(path, wanted)
    return ((value, record) for record, value in enumerate(values))


def _unreadable(path: Path, error: Exception) -> OSError:
    return OSError(f"cannot read {path}, it may be cut short or damaged: {error}")


def _open(path: Path) -> BinaryIO:
    compression = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix.lower())
    if compression is None:
        return open(path, "rb")
    stream = pa.input_stream(str(path), compression=compression)
    return io.BufferedReader(cast(io.RawIOBase, stream), 1 << 20)


def _lines(path: Path) -> Iterator[bytes]:
    """The raw lines of a file, decompressed according to its name."""
    try:
        with _open(path) as stream:
            yield from stream
    except OSError as error:
        raise _unreadable(path, error) from error


def _decode(raw: bytes, path: Path, line: int) -> str:
    """Decodes lines; line: the number of the first one, from 0."""
    try:
        return raw.decode("utf-8-sig" if line == 0 else "utf-8")  # the first line can start with a byte order mark
    except UnicodeDecodeError as error:
        before = raw[: error.start].split(b"\n")
        raise ValueError(
            f"{path}, line {line + len(before)}: byte {len(before[-1]) + 1} of the line is "
            f"not UTF-8 ({error.reason}): convert the file to UTF-8, for example with iconv"
        ) from error


def _text_pieces(path: Path) -> Iterator[str]:
    piece: list[str] = []
    size = 0
    for line, raw in enumerate(_lines(path)):
        piece.append(_decode(raw, path, line))
        size += len(piece[-1])
        if size >= TEXT_PIECE_CHARACTERS:
            yield "".join(piece)
            piece, size = [], 0
    if piece:
        yield "".join(piece)


def _separated(path: Path, separator: str) -> Iterator[str]:
    """The texts between separators, without line ends around them; a text longer than a piece becomes several."""
    rest = ""
    for piece in _text_pieces(path):
        *whole, rest = (rest + piece).split(separator)
        yield from (text.strip("\r\n") for text in whole)
        if len(rest) >= TEXT_PIECE_CHARACTERS:
            # The end of what has been read may be the beginning of a separator.
            kept = max((n for n in range(len(separator)) if rest.endswith(separator[:n])), default=0)
            yield rest[: len(rest) - kept]
            rest = rest[len(rest) - kept :]
    yield rest.strip("\r\n")


def _json_lines(path: Path) -> Records:
    for line, raw in enumerate(_lines(path)):
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


def _json_values(path: Path) -> list[Any]:
    try:
        with _open(path) as stream:
            pieces = iter(lambda: stream.read(1 << 20), b"")  # a larger one would be allocated at once
            raw = b"".join(islice(pieces, (JSON_BYTES >> 20) + 1))
    except OSError as error:
        raise _unreadable(path, error) from error
    if len(raw) > JSON_BYTES:
        raise ValueError(
            f"{path} holds more than {human_size(JSON_BYTES)} of JSON, which would be read at once: make it a .jsonl, "
            "for example with jq -c '.[]'"
        )
    text = _decode(raw, path, 0)
    try:
        value = json.loads(text) if text.strip() else []
    except (ValueError, RecursionError) as error:
        lines = "; if each line is a JSON value of its own, rename it to .jsonl" if "Extra data" in str(error) else ""
        raise ValueError(f"{path}: not JSON ({error}){lines}") from error
    return value if isinstance(value, list) else [value]


def _table_rows(path: Path, wanted: Sequence[str]) -> Iterator[dict[str, Any] | Malformed]:
    csv.field_size_limit(CSV_FIELD_CHARACTERS)  # process-wide; the default limit is 128 KiB
    lines = (_decode(raw, path, line) for line, raw in enumerate(_lines(path)))
    reader = csv.reader(lines, delimiter="\t" if format_of(path) == ".tsv" else ",", strict=True)
    try:
        names = next(reader, [])
        columns = {name: names.index(name) for name in wanted if name in names}
        if twice := [name for name in columns if names.count(name) > 1]:
            raise ValueError(f"{path}, line 1: two columns are named {twice[0]!r}: rename one of them")
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
        raise ValueError(
            f"{path}, line {reader.line_num}: cannot be read as {format_of(path)} ({error}): quote the fields that "
            "hold a separator, a quote or a line end, and double the quotes in them"
        ) from error


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
        raise ValueError(f"cannot read {path}, it may be cut short or damaged: {error}") from error
