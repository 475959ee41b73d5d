"""Reads the records of one file.

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
UNREAD: Any = ...
"""The value of a table's column that is not read."""
Found = TypeVar("Found")


class MissingColumns(ValueError):
    """A table has none of the wanted columns, only `names`."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        super().__init__(f"only {', '.join(names)}")
        self.path, self.names = path, list(names)


class Malformed(ValueError):
    """A record that is no record of its format; the next one can be read. lines: what it takes of the file."""

    def __init__(self, reason: str, lines: int = 1) -> None:
        super().__init__(reason)
        self.lines = lines


def converted(
    paths: Sequence[Path],
    wanted: Sequence[str],
    convert: Callable[[Any, Path], Found],
    log: Callable[[str], None] | None = None,
    start: tuple[int, int] = (0, 0),
    separator: str | None = None,
) -> Iterator[tuple[Found, int, int]]:
    """Reads and converts the records of a source. The odd malformed record does not stop a large source.

    A record is malformed if it is not of its format, or if it cannot be converted. Of a source with over `FEW_RECORDS`
    records, one in so many may be: they are skipped, counted, and the first is named. A source whose first records are
    all malformed has another form, and is refused.

    Args:
        paths: The files.
        wanted: As for `records`.
        convert: Takes a value of `records` and its file. Raises ValueError, TypeError, KeyError or AttributeError.
        log: Takes a line when the first record is skipped, and one when all are read.
        start: The first record to read: the index of its file, and its number there.
        separator: The mark between the records of text (.txt, .md); None makes the file one record.

    Yields:
        (what `convert` returned, index of the file, number of the record in it).

    Raises:
        ValueError: Too many records are malformed; the message names the first.
        MissingColumns, OSError: As `records`.
    """
    first, odd, seen, counted = "", 0, 0, 0
    ahead = (1 for path in paths for _ in _read(path, 0, wanted))  # read only if a record is malformed, and so far
    for index, path in enumerate(paths[start[0] :], start[0]):
        for value, record in _read(path, start[1] if index == start[0] else 0, wanted, separator):
            seen += 1
            try:
                if isinstance(value, Malformed):
                    raise value
                found = convert(value, path)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                odd += error.lines if isinstance(error, Malformed) else 1
                reason = str(error) if error is value else f"{place(path, record)}: {error}"
                needed = max(FEW_RECORDS + 1, FEW_RECORDS * odd)
                if seen < needed:
                    counted += sum(islice(ahead, max(0, needed - counted)))
                if max(seen, counted) < needed or seen == odd > 1:
                    more = f"; {odd:,} of {seen:,} records are malformed, and 1 in {FEW_RECORDS:,} may be"
                    raise ValueError((first or reason) + (more if odd > 1 else "")) from error
                if not first and log is not None:
                    log(f"skipping malformed records, of which 1 in {FEW_RECORDS:,} may be; the first is {reason}")
                first = first or reason
                continue
            yield found, index, record
    if odd and log is not None:
        log(f"skipped {odd:,} malformed of {seen:,} records")


def records(path: Path, first: int, wanted: Sequence[str]) -> Iterator[tuple[Any, int]]:
    """Reads the records of a file.

    Args:
        path: A file with one of `sources.FORMATS`.
        first: The first record to read, from 0.
        wanted: The columns to read from a table.

    Yields:
        (value, number of the record). A value is text (.txt, .md), a JSON value (.jsonl, .json), or an object with the
        wanted columns that exist (.csv, .tsv, .parquet).

    Raises:
        ValueError: The file is damaged or not UTF-8; the message names the file and the line or the record.
        OSError: The file cannot be read to its end.
        MissingColumns: The table has none of the columns.
    """
    for value, record in _read(path, first, wanted):
        if isinstance(value, Malformed):
            raise value
        yield value, record


def _read(path: Path, first: int, wanted: Sequence[str], separator: str | None = None) -> Iterator[tuple[Any, int]]:
    """Reads like `records`, but yields `Malformed` in the place of a malformed record."""
    readers: dict[str, Callable[[Path, int, Sequence[str]], Iterator[tuple[Any, int]]]] = {
        ".txt": _text_pieces,
        ".md": _text_pieces,
        ".jsonl": _json_lines,
        ".json": _json_values,
        ".csv": _rows,
        ".tsv": _rows,
        ".parquet": _parquet_rows,
    }
    reader = readers[format_of(path)]
    if separator is None or reader is not _text_pieces:
        return reader(path, first, wanted)
    texts = ((text, record) for record, text in enumerate(_separated(path, separator)))
    return islice(texts, first, None)


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
    """About how many bytes of text a file has in a column, without reading it; None for a compressed file."""
    if format_of(path) != ".parquet":
        return None if path.suffix.lower() in COMPRESSED else path.stat().st_size
    try:
        metadata = pq.read_metadata(path)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    chunks = [group.column(number) for group in groups for number in range(group.num_columns)]
    return sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema == column)


def place(path: Path, record: int) -> str:
    """The file and the record, counted from 1, for messages."""
    return f"{path}, {'line' if format_of(path) == '.jsonl' else 'record'} {record + 1}"


def _lines(path: Path) -> Iterator[bytes]:
    """The raw lines of a file, decompressed according to its name."""
    try:
        with _open(path) as stream:
            yield from stream
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> OSError:
    return OSError(f"cannot read {path}, it may be cut short or damaged: {error}")


def _open(path: Path) -> BinaryIO:
    compression = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix.lower())
    if compression is None:
        return open(path, "rb")
    stream = pa.input_stream(str(path), compression=compression)
    return io.BufferedReader(cast(io.RawIOBase, stream), 1 << 20)


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


def _text_pieces(path: Path, first: int, wanted: Sequence[str]) -> Iterator[tuple[str, int]]:
    piece: list[str] = []
    size = record = 0
    for line, raw in enumerate(_lines(path)):
        text = _decode(raw, path, line)
        piece.append(text)
        size += len(text)
        if size >= TEXT_PIECE_CHARACTERS:
            if record >= first:
                yield "".join(piece), record
            piece, size, record = [], 0, record + 1
    if piece and record >= first:
        yield "".join(piece), record


def _separated(path: Path, separator: str) -> Iterator[str]:
    """The texts between separators, without line ends around them; a text longer than a piece becomes several."""
    rest = ""
    for piece, _ in _text_pieces(path, 0, ()):
        *whole, rest = (rest + piece).split(separator)
        yield from (text.strip("\r\n") for text in whole)
        if len(rest) >= TEXT_PIECE_CHARACTERS:
            # The end of what has been read may be the beginning of a separator.
            kept = max((n for n in range(len(separator)) if rest.endswith(separator[:n])), default=0)
            yield rest[: len(rest) - kept]
            rest = rest[len(rest) - kept :]
    yield rest.strip("\r\n")


def _json_lines(path: Path, first: int, wanted: Sequence[str]) -> Iterator[tuple[Any, int]]:
    for line, raw in enumerate(_lines(path)):
        if line < first or not raw.strip():
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


def _json_values(path: Path, first: int, wanted: Sequence[str]) -> Iterator[tuple[Any, int]]:
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
    if not text.strip():
        return
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        lines = "; if each line is a JSON value of its own, rename it to .jsonl" if "Extra data" in str(error) else ""
        raise ValueError(f"{path}: not JSON ({error}){lines}") from error
    for record, item in enumerate(value if isinstance(value, list) else [value]):
        if record >= first:
            yield item, record


def _rows(path: Path, first: int, wanted: Sequence[str]) -> Iterator[tuple[dict[str, str] | Malformed, int]]:
    csv.field_size_limit(CSV_FIELD_CHARACTERS)  # process-wide; the default limit is 128 KiB
    lines = (_decode(raw, path, line) for line, raw in enumerate(_lines(path)))
    reader = csv.reader(lines, delimiter="\t" if format_of(path) == ".tsv" else ",", strict=True)
    try:
        names = next(reader, None)
        if names is None:
            return
        columns = {name: names.index(name) for name in wanted if name in names}
        if not columns:
            raise MissingColumns(path, names)
        if twice := [name for name in columns if names.count(name) > 1]:
            raise ValueError(f"{path}, line 1: two columns are named {twice[0]!r}: rename one of them")
        end = reader.line_num
        for record, row in enumerate(row for row in reader if row):
            begin, end = end, reader.line_num
            if record < first:
                continue
            if len(row) == len(names):
                yield {name: row[index] for name, index in columns.items()}, record
                continue
            reason = (
                f"{path}, line {end}: the row has {len(row)} fields, but the first row names "
                f"{len(names)} columns: quote the fields that hold a separator, a quote or a line end"
            )
            yield Malformed(reason, end - begin), record
    except csv.Error as error:
        raise ValueError(
            f"{path}, line {reader.line_num}: cannot be read as {format_of(path)} ({error}): quote the fields that "
            "hold a separator, a quote or a line end, and double the quotes in them"
        ) from error


def _parquet_rows(path: Path, first: int, wanted: Sequence[str]) -> Iterator[tuple[dict[str, Any], int]]:
    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            names = file.schema_arrow.names
            columns = [name for name in wanted if name in names]
            if not columns:
                raise MissingColumns(path, names)
            unread = {name: UNREAD for name in names if name not in columns}
            record = 0
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if record + rows <= first:
                    record += rows
                    continue
                for batch in file.iter_batches(PARQUET_BATCH_ROWS, row_groups=[group], columns=columns):
                    for value in batch.to_pylist():
                        if record >= first:
                            yield {**value, **unread}, record
                        record += 1
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}, it may be cut short or damaged: {error}") from error
