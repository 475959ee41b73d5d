"""Reads files as text: decompressed, other encodings decoded, and papers, books and pages turned into text.

An invalid byte or a NUL byte raises an error with file and line, because replacement characters would be trained on
unnoticed. A text longer than `TEXT_PIECE_CHARACTERS` becomes several, cut at line ends.
"""

from __future__ import annotations

import codecs
import importlib.util
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

import pyarrow as pa

UTF8, AUTO = "utf-8", "auto"
LOOKED_AT = 1 << 18
"""Bytes from which an encoding is recognized."""
MARKS = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32", codecs.BOM_UTF16_LE: "utf-16"}
MARKS |= {codecs.BOM_UTF16_BE: "utf-16"}
CONVERTED = (".html", ".htm", ".docx", ".epub", ".ipynb", ".pdf", ".pptx", ".xlsx", ".zip")
SINGLE_BYTE = ("cp125", "cp85", "cp775", "iso8859", "latin", "mac")
WESTERN = frozenset("äöüÄÖÜßéèêëàâçîïôùûœæøåñáíóúãõÉÈÀÇÑÁÓÅØ¿¡«»…–—‘’“”„•€£°©\xa0")
TEXT_PIECE_CHARACTERS = 1 << 20
NO_TEXT = re.compile(rb"[\1-\x08\x0e-\x1a]")
"""Bytes of programs and pictures; logs with colours have the escape."""
CUE = re.compile(r"^(WEBVTT.*|\d+|[\d:.,]+ --> [\d:.,]+.*)\n", re.MULTILINE)
"""A line of a subtitle that is not spoken: its number, or its time."""


class UnreadableError(ValueError):
    """A file that cannot be read to its end."""


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
        reason = f"{path} is not {error.encoding} ({error.reason})"
        raise UnreadableError(f"{reason}: name its encoding with --text.encoding") from error


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
    except (OSError, UnicodeDecodeError):
        return False


def can_convert() -> bool:
    """Whether markitdown is installed."""
    return importlib.util.find_spec("markitdown") is not None


def convert(path: Path) -> str:
    """The text of a file of `CONVERTED`, as Markdown. Raises UnreadableError if markitdown cannot read it."""
    markitdown = importlib.import_module("markitdown")
    try:
        text = markitdown.MarkItDown(enable_plugins=False).convert_local(str(path)).text_content
        if path.suffix.lower() not in (".html", ".htm") and text.strip() == path.read_text(UTF8, "replace").strip():
            raise ValueError("it may be damaged")  # markitdown takes a damaged file for plain text
    except (markitdown.MarkItDownException, OSError, ValueError, LookupError, AttributeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UnreadableError(f"{path}: markitdown cannot read it ({type(error).__name__}: {reason})") from error
    return re.sub(r"\AContent from the zip file .*\n+", "", text)  # which names the local path


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


def text_pieces(path: Path, encoding: str) -> Iterator[str]:
    piece, size = list[str](), 0
    for line, raw in enumerate(read_lines(path, encoding)):
        piece.append(decode(raw, path, line))
        size += len(piece[-1])
        if size >= TEXT_PIECE_CHARACTERS:
            yield "".join(piece)
            piece, size = [], 0
    if piece:
        yield "".join(piece)


def separated(path: Path, separator: str, encoding: str) -> Iterator[str]:
    """The texts between separators, without line ends around them; a text longer than a piece becomes several."""
    rest = ""
    for piece in text_pieces(path, encoding):
        *whole, rest = (rest + piece).split(separator)
        yield from (text.strip("\r\n") for text in whole)
        if len(rest) >= TEXT_PIECE_CHARACTERS:
            # The end of what has been read may be the beginning of a separator.
            kept = max((n for n in range(len(separator)) if rest.endswith(separator[:n])), default=0)
            yield rest[: len(rest) - kept]
            rest = rest[len(rest) - kept :]
    yield rest.strip("\r\n")
