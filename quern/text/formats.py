"""Reads the records of JSON files and tables (docs/data.md, "Files of your own"); documents.py converts them.

A .json file is read at once, Parquet one row group at a time.
"""

import csv
import json
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from quern.terminal import human_size
from quern.text.readers import UnreadableError, cut_short, decode, open_utf8, read_lines
from quern.text.sources import COMPRESSED, Listing, format_of

PARQUET_BATCH_ROWS = 256
JSON_BYTES = 1 << 29
CSV_FIELD_CHARACTERS = 1 << 28
COMPRESSION = 3
"""Bytes of text in a byte of a compressed file, about: 2.7 by gzip, 3.5 by Zstandard's best."""
UNREAD: Any = ...
"""The value of a table's column that is not read."""


class Malformed(ValueError):
    """A record that is no record of its format; the next one can be read. lines: what it takes of the file."""

    def __init__(self, reason: str, lines: int = 1) -> None:
        super().__init__(reason)
        self.lines = lines


def read_records(path: Path, wanted: Sequence[str], encoding: str) -> Iterator[tuple[Any, int]]:
    """Reads a file of `RECORDS`. Yields its values and their numbers in the file, from 0: JSON values (.jsonl, .json),
    or objects with all columns (.csv, .tsv, .parquet); `Malformed` in the place of a malformed record."""
    match format_of(path):
        case ".jsonl":
            return _json_lines(path, encoding)
        case ".json":
            values = _json_values(path, encoding)
        case ".parquet":
            values = _parquet_rows(path, wanted)
        case _:
            values = _table_rows(path, wanted, encoding)
    return ((value, record) for record, value in enumerate(values))


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


def _json_lines(path: Path, encoding: str) -> Iterator[tuple[Any, int]]:
    for line, raw in enumerate(read_lines(path, encoding)):
        if not raw.strip():
            continue
        try:
            yield json.loads(decode(raw, path, line)), line
        except UnreadableError as error:
            yield Malformed(str(error)), line
        except (ValueError, RecursionError) as error:
            # A line's own "line 1" would contradict its number.
            at = f"character {error.pos + 1}: {error.msg}" if isinstance(error, json.JSONDecodeError) else error
            yield Malformed(f"{path}, line {line + 1}: not a line of JSON ({at})"), line


def _json_values(path: Path, encoding: str) -> list[Any]:
    try:
        with open_utf8(path, encoding) as stream:
            pieces = iter(lambda: stream.read(1 << 20), b"")  # a larger one would be allocated at once
            raw = b"".join(islice(pieces, (JSON_BYTES >> 20) + 1))
    except OSError as error:
        raise cut_short(path, error) from error
    if len(raw) > JSON_BYTES:
        raise UnreadableError(
            f"{path} holds more than {human_size(JSON_BYTES)} of JSON, which would be read at once: make it a .jsonl, "
            "for example with jq -c '.[]'"
        )
    text = decode(raw, path, 0)
    try:
        value = json.loads(text) if text.strip() else []
    except (ValueError, RecursionError) as error:
        lines = "; if each line is a JSON value of its own, rename it to .jsonl" if "Extra data" in str(error) else ""
        raise UnreadableError(f"{path}: not JSON ({error}){lines}") from error
    return value if isinstance(value, list) else [value]


def _table_rows(path: Path, wanted: Sequence[str], encoding: str) -> Iterator[dict[str, Any] | Malformed]:
    csv.field_size_limit(CSV_FIELD_CHARACTERS)  # process-wide; the default limit is 128 KiB
    lines = (decode(raw, path, line) for line, raw in enumerate(read_lines(path, encoding)))
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
            "hold a separator, a quote or a line end, double the quotes in them, and end lines with a line feed"
        ) from error


def _delimiter(path: Path, head: str, wanted: Sequence[str]) -> str:
    """The separator of a table: a tab in .tsv; in .csv a comma, unless the first row only has the wanted columns, or
    several at all, with another one."""
    if format_of(path) == ".tsv":
        return "\t"
    try:
        names = next(csv.reader([head]), [])
        several = len(names) > 1 or set(wanted) & set(names)
        return "," if several else csv.Sniffer().sniff(head, delimiters=";\t|").delimiter
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
        raise UnreadableError(str(cut_short(path, error))) from error
