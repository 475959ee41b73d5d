"""Documents from files: an iterator of (text, position), where the position names the next document to read.

A source is a file or a folder (searched recursively, in sorted order, hidden names skipped) of

    .txt      a document; one longer than TEXT_PIECE_CHARACTERS becomes several, cut at line ends
    .jsonl    a document a line, {"text": "…"}, or a conversation, {"messages": [{"role": …, "content": …}]}
    .parquet  a document a row, read one row group at a time

where .txt and .jsonl may also be compressed (.gz, .zst). Text is UTF-8 and nothing else: a wrong byte stops
the reading with file and line, since replaced characters would be trained on unseen. Empty documents are
skipped. It downloads nothing (hub.py) and knows no tokens (tokenizer.py).
"""

import io
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import pyarrow as pa
import pyarrow.parquet as pq

from quern.text.chat import Message, validate

ENDINGS = (".txt", ".txt.gz", ".txt.zst", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
TEXT_PIECE_CHARACTERS = 1 << 20
PARQUET_BATCH_ROWS = 256


class Position(NamedTuple):
    """The next document to read: the file's index in `files(source)`, and the record in it.

    A record is a row (.parquet), a line (.jsonl) or a piece (.txt), counted from 0.
    """

    file: int
    record: int


START = Position(0, 0)


def files(source: str | Path) -> list[Path]:
    """The files of a source, in the order they are read. FileNotFoundError when there is nothing to read."""
    source = Path(source)
    if source.is_file():
        if not source.name.lower().endswith(ENDINGS):
            raise ValueError(f"cannot read {source}: its name must end in one of {' '.join(ENDINGS)}")
        return [source]
    if not source.is_dir():
        raise FileNotFoundError(f"there is no file or folder {source}")
    found = []
    for folder, subfolders, names in os.walk(source):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and name.lower().endswith(ENDINGS) and path.is_file():
                found.append(path)
    if not found:
        raise FileNotFoundError(f"nothing to read in {source}: no file ends in one of {' '.join(ENDINGS)}")
    return sorted(found, key=lambda path: path.relative_to(source).as_posix())


def read(source: str | Path, start: Position = START, column: str = "text") -> Iterator[tuple[str, Position]]:
    """Documents from `start` on, each with the position after it; resuming there equals never having stopped.

    `column` is the column (.parquet) or the key (.jsonl) that holds the text.
    """
    for index, path in enumerate(files(source)):
        if index < start.file:
            continue
        first = start.record if index == start.file else 0
        for value, record in _records(path, first, column):
            if value is not None and not isinstance(value, str):
                raise ValueError(
                    f"{path}, record {record + 1}: {column!r} holds {type(value).__name__}, not text: "
                    f"make it text, or name the column that holds the text {column!r}"
                )
            if value:
                yield value, Position(index, record + 1)


def read_conversations(source: str | Path, column: str = "messages") -> Iterator[list[Message]]:
    """Conversations of .jsonl and .parquet files, each checked; ValueError names the file and the record."""
    for path in files(source):
        if _format(path) == ".txt":
            raise ValueError(f"{path} holds no conversations: they come in .jsonl or .parquet files")
        for value, record in _records(path, 0, column):
            try:
                yield _conversation(value)
            except (TypeError, KeyError, AttributeError, ValueError) as error:
                raise ValueError(f"{path}, record {record + 1}: not a conversation: {error}") from error


def _conversation(value: Any) -> list[Message]:
    if not isinstance(value, list):
        raise ValueError('expected a list of {"role": …, "content": …}')
    validate(value)
    # Data sets carry other keys along (ids, sources); only what is rendered is kept.
    return [cast(Message, {"role": message["role"], "content": message["content"]}) for message in value]


def _format(path: Path) -> str:
    name = path.name.lower().removesuffix(".gz").removesuffix(".zst")
    return Path(name).suffix


def _records(path: Path, first: int, column: str) -> Iterator[tuple[Any, int]]:
    """(value, record) from record `first` on."""
    reader = {".txt": _text_pieces, ".jsonl": _json_lines, ".parquet": _parquet_rows}[_format(path)]
    yield from reader(path, first, column)


def _lines(path: Path) -> Iterator[bytes]:
    """The raw lines of a file, decompressed as its name says, one at a time."""
    try:
        with _open(path) as stream:
            yield from stream
    except OSError as error:
        raise OSError(f"cannot read {path}, it may be cut short or damaged: {error}") from error


def _open(path: Path) -> BinaryIO:
    compression = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix.lower())
    if compression is None:
        return open(path, "rb")
    stream = pa.input_stream(str(path), compression=compression)
    return io.BufferedReader(cast(io.RawIOBase, stream), 1 << 20)


def _decode(raw: bytes, path: Path, line: int) -> str:
    try:
        return raw.decode("utf-8-sig" if line == 0 else "utf-8")  # the first line may carry a byte order mark
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}, line {line + 1}: byte {error.start + 1} of the line is not UTF-8 ({error.reason}): "
            "convert the file to UTF-8, for example with iconv"
        ) from error


def _text_pieces(path: Path, first: int, column: str) -> Iterator[tuple[str, int]]:
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


def _json_lines(path: Path, first: int, column: str) -> Iterator[tuple[Any, int]]:
    for line, raw in enumerate(_lines(path)):
        if line < first or not raw.strip():
            continue
        try:
            value = json.loads(_decode(raw, path, line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {line + 1}: not a line of JSON ({error})") from error
        if isinstance(value, list) and column == "messages":
            yield value, line  # a bare list of messages
            continue
        if not isinstance(value, dict):
            raise ValueError(f'{path}, line {line + 1}: expected an object such as {{"{column}": …}}')
        if column not in value:
            raise ValueError(f"{path}, line {line + 1}: {_no_column(column, list(value))}")
        yield value[column], line


def _parquet_rows(path: Path, first: int, column: str) -> Iterator[tuple[Any, int]]:
    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            names = file.schema_arrow.names
            if column not in names:
                raise ValueError(f"{path}: {_no_column(column, names)}")
            record = 0
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if record + rows <= first:
                    record += rows
                    continue
                for batch in file.iter_batches(PARQUET_BATCH_ROWS, row_groups=[group], columns=[column]):
                    for value in batch.column(0).to_pylist():
                        if record >= first:
                            yield value, record
                        record += 1
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"cannot read {path}, it may be cut short or damaged: {error}") from error


def _no_column(column: str, names: Sequence[str]) -> str:
    there_are = ", ".join(map(repr, names)) or "nothing"
    hint = f"there is no {column!r}, only {there_are}: rename the one that is meant to {column!r}"
    if "messages" in names:
        hint += " (conversations, 'messages', are for fine-tuning)"
    return hint
