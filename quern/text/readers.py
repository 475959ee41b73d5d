"""Reads a file: as text, or the records of a JSON file or a table (docs/data.md, "Files of your own").

Text is decompressed, other encodings are decoded, and papers, books and pages are turned into text. An invalid byte or
a NUL byte raises an error with file and line, because replacement characters would be trained on unnoticed. A text
longer than `TEXT_PIECE_CHARACTERS` becomes several, cut at line ends. A .json file is read at once, Parquet one row
group at a time. documents.py converts the records.
"""

from __future__ import annotations

import codecs
import csv
import importlib.util
import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq

from quern.terminal import human_size

COMPRESSED = (".gz", ".zst")
RECORDS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
PLAIN = (".txt", ".md")
FORMATS = (*PLAIN, *RECORDS)
UTF8, AUTO = "utf-8", "auto"
LOOKED_AT = 1 << 18  # bytes from which an encoding is recognized
MARKS = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32", codecs.BOM_UTF16_LE: "utf-16"}
MARKS |= {codecs.BOM_UTF16_BE: "utf-16"}
CONVERTED = (".html", ".htm", ".docx", ".epub", ".ipynb", ".pdf", ".pptx", ".xlsx", ".zip")
SINGLE_BYTE = ("cp125", "cp85", "cp775", "iso8859", "latin", "mac")
WESTERN = frozenset("äöüÄÖÜßéèêëàâçîïôùûœæøåñáíóúãõÉÈÀÇÑÁÓÅØ¿¡«»…–—‘’“”„•€£°©\xa0")
TEXT_PIECE_CHARACTERS = 1 << 20
NO_TEXT = re.compile(rb"[\1-\x08\x0e-\x1a]")  # bytes of programs and pictures; logs with colours have the escape
CUE = re.compile(r"^(WEBVTT.*|(\d+\r?\n)?[\d:.,]+ --> [\d:.,]+.*)\n", re.MULTILINE)
"""The lines of a subtitle that nobody speaks: its time, and its number before it. "1984" alone may be spoken."""
PARQUET_BATCH_ROWS = 256
JSON_BYTES = 1 << 29
CSV_FIELD_CHARACTERS = 1 << 28
COMPRESSION = 3  # bytes of text in a byte of a compressed file, about: 2.7 by gzip, 3.5 by Zstandard's best
UNREAD: Any = ...  # the value of a table's column that is not read


class UnreadableError(ValueError):
    """A file that cannot be read to its end."""


class Malformed(ValueError):
    """A record that is no record of its format; the next one can be read. lines: what it takes of the file."""

    def __init__(self, reason: str, lines: int = 1) -> None:
        super().__init__(reason)
        self.lines = lines


def format_of(path: Path) -> str:
    """The extension without the one of a compression, such as .txt; "" for a compressed file of another format."""
    name = path.name.lower()
    plain = name
    for compressed in COMPRESSED:
        plain = plain.removesuffix(compressed)
    found = Path(plain).suffix
    return found if plain == name or found in FORMATS and found != ".parquet" else ""


def open_utf8(path: Path, encoding: str = UTF8) -> BinaryIO:
    """Opens a file, decompressed according to its name, as bytes of UTF-8, which are not checked here.

    encoding: its encoding, or "auto"; a file of another one than UTF-8 is read whole. Raises UnreadableError if the
    file is not in the encoding.
    """
    compression = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix.lower())
    if compression is None:
        stream = open(path, "rb")  # noqa: SIM115
    else:
        opened = pa.input_stream(str(path), compression=compression)
        stream = io.BufferedReader(cast(io.RawIOBase, opened), 1 << 20)
    head = stream.peek(4)[:4]
    marked = next((name for mark, name in MARKS.items() if head.startswith(mark)), None)
    encoding = marked or (recognized(path) or UTF8 if encoding == AUTO else encoding)
    if codecs.lookup(encoding).name == UTF8:
        return stream
    try:
        with stream:
            return io.BytesIO(stream.read().decode(encoding).encode(UTF8, "surrogatepass"))
    except UnicodeDecodeError as error:
        wrong = "it is damaged: leave it out" if marked else "name its encoding with --text.encoding"
        reason = f"{path} is not {error.encoding} ({error.reason})"
        raise UnreadableError(f"{reason}: {wrong}, or convert it to UTF-8") from error


def recognized(path: Path) -> str | None:
    """The encoding that the first bytes of a file look like, utf-8 where they are; None if nothing fits."""
    with open_utf8(path) as stream:
        head = stream.read(LOOKED_AT)
    if (end := head.rfind(b"\n")) > 0 and len(head) == LOOKED_AT:
        head = head[:end]  # no cut character
    try:
        codecs.getincrementaldecoder(UTF8)().decode(head)
        return UTF8
    except UnicodeDecodeError:
        from charset_normalizer import from_bytes  # late: few texts need it

        best = from_bytes(head).best()
        if best is None:
            return None
        western = set(head.decode("cp1252", errors="replace")) - set(map(chr, range(128)))
        # The languages of Central Europe score alike on French or German text; cp1252 is far more common.
        return "cp1252" if western <= WESTERN and best.encoding.startswith(SINGLE_BYTE) else best.encoding


def looks_like_text(path: Path) -> bool:
    """Whether the first bytes of a file are text: no NUL bytes, and UTF-8 or marked as UTF-16."""
    try:
        with open_utf8(path) as stream:
            head = stream.read(1 << 13)
        codecs.getincrementaldecoder(UTF8)().decode(head)
        return b"\0" not in head
    except (OSError, UnicodeDecodeError, UnreadableError):
        return False


def can_convert() -> bool:
    """Whether markitdown is installed."""
    return importlib.util.find_spec("markitdown") is not None


def convert(path: Path) -> str:
    """The text of a file of `CONVERTED`, as Markdown. Raises UnreadableError if markitdown finds none."""
    markitdown = importlib.import_module("markitdown")
    try:
        text = markitdown.MarkItDown(enable_plugins=False).convert_local(str(path)).text_content
        text = re.sub(r"\AContent from the zip file .*\n*", "", text)  # which names the local path
        if not text.strip():
            raise ValueError("it has no text, as a scan")
        if path.suffix.lower() not in (".html", ".htm") and text.strip() == path.read_text(UTF8, "replace").strip():
            raise ValueError("it may be damaged")  # markitdown takes a damaged file for plain text
    except (markitdown.MarkItDownException, OSError, ValueError, LookupError, AttributeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UnreadableError(f"{path}: markitdown cannot read it ({type(error).__name__}: {reason})") from error
    return text


def cut_short(path: Path, error: Exception) -> OSError:
    advice = "make it readable" if isinstance(error, PermissionError) else "it may be cut short or damaged"
    return OSError(f"cannot read {path}, {advice}: {error}")


def read_lines(path: Path, encoding: str) -> Iterator[bytes]:
    """The lines of a file in UTF-8, decompressed according to its name."""
    try:
        with open_utf8(path, encoding) as stream:
            yield from stream
    except OSError as error:
        raise cut_short(path, error) from error


def decode(raw: bytes, path: Path, line: int) -> str:
    """Decodes lines; line: the number of the first one, from 0."""
    try:
        text = raw.decode("utf-8-sig" if line == 0 else UTF8)  # the first line can start with a byte order mark
    except UnicodeDecodeError as error:
        before = raw[: error.start].split(b"\n")
        if NO_TEXT.search(raw):
            raise UnreadableError(f"{path} is no text, but a program, a picture or the like: leave it out") from error
        like = recognized(path)
        hint = "" if like in (None, UTF8) else f"; it looks like {like}, which --text.encoding auto reads in --data"
        raise UnreadableError(
            f"{path}, line {line + len(before)}: byte {len(before[-1]) + 1} of the line is "
            f"not UTF-8 ({error.reason}): convert the file to UTF-8, for example with iconv{hint}"
        ) from error
    if (at := text.find("\0")) >= 0:
        line += text.count("\n", 0, at) + 1
        raise UnreadableError(
            f"{path}, line {line}: NUL bytes, so it is no text, or UTF-16 without a mark: leave it out, or convert it "
            "to UTF-8; --text.encoding utf-16-le reads UTF-16 in --data"
        )
    return text


def _text_pieces(path: Path, encoding: str) -> Iterator[str]:
    piece, size = list[str](), 0
    for line, raw in enumerate(read_lines(path, encoding)):
        piece.append(decode(raw, path, line))
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


def read_records(
    path: Path, wanted: Sequence[str], separator: str | None, encoding: str, whole: bool
) -> Iterator[tuple[Any, int]]:
    """Reads a file. Yields its values and their numbers in the file, from 0: texts, JSON values (.jsonl, .json), or
    objects with all columns (.csv, .tsv, .parquet); `Malformed` in the place of a malformed record."""
    match form := format_of(path):
        case ".jsonl":
            return _json_lines(path, encoding)
        case ".json":
            values = _json_values(path, encoding)
        case ".parquet":
            values = _parquet_rows(path, wanted)
        case ".csv" | ".tsv":
            values = _table_rows(path, wanted, encoding)
        case _ if form in CONVERTED:
            values = [convert(path)]
        case _:
            values = _text_pieces(path, encoding) if separator is None else _separated(path, separator, encoding)
            if form in (".srt", ".vtt") and separator is None:
                values = (CUE.sub("", text) for text in values)
            values = ["".join(values)] if whole else values
    return ((value, record) for record, value in enumerate(values))


def text_megabytes(files: Iterable[Path], column: str) -> float:
    """The megabytes of text that files have in a column, about, without reading them."""
    return sum(_text_bytes(path, column) for path in files) / 1e6


def _text_bytes(path: Path, column: str) -> int:
    if format_of(path) != ".parquet":
        return path.stat().st_size * (COMPRESSION if path.suffix.lower() in COMPRESSED else 1)
    try:
        metadata = pq.read_metadata(path)
    except (pa.ArrowException, OSError):  # the reading skips it, or refuses it
        return path.stat().st_size
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    chunks = (group.column(number) for group in groups for number in range(group.num_columns))
    found = [chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema == column]
    return sum(found) if found else path.stat().st_size


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
        raise UnreadableError(f"{path} holds more than {human_size(JSON_BYTES)} of JSON: make it .jsonl (jq -c '.[]')")
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
    blank = list[str]()  # lines that may come before the first row
    while (head := next(lines, "")) and not head.strip("\r\n"):
        blank.append(head)
    reader = csv.reader(chain(blank, [head], lines), delimiter=_delimiter(path, head, wanted), strict=True)
    try:
        names = next(filter(None, reader), [])
        columns = {name: names.index(name) for name in wanted if name in names}
        if twice := [name for name in columns if names.count(name) > 1]:
            raise UnreadableError(f"{path}, line 1: two columns are named {twice[0]!r}: rename one of them")
        unread, end = dict.fromkeys(names, UNREAD), reader.line_num
        for row in reader:
            begin, end = end, reader.line_num
            if row and len(row) == len(names):
                yield {**unread, **{name: row[index] for name, index in columns.items()}}
            elif row:
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
    except (ValueError, OverflowError) as error:  # such as a time in nanoseconds
        reason = f"a column holds a value that Python has no form for ({error})"
        raise UnreadableError(f"{path}: {reason}: leave it out, or make it text") from error
