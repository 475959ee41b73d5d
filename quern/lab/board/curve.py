"""The files that the board reads: growing metrics by byte offset, and small files, read again when they change.

Of a long file of metrics, lines at evenly spaced offsets are parsed, and the lines of validations; then only what was
appended.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from quern.records import objects, strict

Body = TypeVar("Body", dict[str, Any], list[Any])


class KeptFile:
    """A small file that is read again when its size or time changed. modified: seconds since the epoch; 0 if the file
    is missing."""

    def __init__(self, path: Path) -> None:
        self.path, self.modified, self._size = path, 0.0, -1

    def changed(self) -> bool:
        before = self.modified, self._size
        try:
            facts = self.path.stat()
            self.modified, self._size = facts.st_mtime, facts.st_size
        except OSError:
            self.modified, self._size = 0.0, 0
        return (self.modified, self._size) != before

    def json(self, empty: Body) -> Body:
        """The file's object or list; `empty` if it is missing or damaged, since the board must show the other runs."""
        (body,) = _parse([self._content()])
        return strict(body) if isinstance(body, type(empty)) else empty

    def lines(self) -> list[dict[str, Any]]:
        """The objects of a JSONL file."""
        lines = [line for line in self._content().split(b"\n") if line]
        return [strict(row) for row in objects(_parse(lines))]

    def _content(self) -> bytes:
        try:
            return self.path.read_bytes()
        except OSError:
            return b""


def is_number(value: Any) -> bool:
    """Whether a JSON value is a finite number that the page can draw."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


WHOLE_BYTES, TAIL_BYTES = 48 << 10, 2 << 10
"""All lines of so many new bytes are parsed; of more bytes those at the end, a sample, and a validation after each."""
VALIDATION = b'"val_'


class Curve:
    """The sampled lines of a metrics file, which may be missing.

    Attributes:
        rows: The offset after each line, and the line's fields; in file order.
        end: Offset after the last complete line.
        identity: Changes when the file is replaced, as a resumed run does; earlier offsets are then void.
        last: The latest value of each field; a null leaves the one before.
        damaged: Lines that are not JSON objects; they are left out.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._sampled = path, 0
        self.clear(0)

    def clear(self, identity: int) -> None:
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.end, self.identity, self.damaged = 0, identity, 0
        self.last: dict[str, Any] = {}

    def refresh(self, points: int) -> None:
        """Reads what is new. points: lines to sample, and at most as many validations."""
        try:
            with self.path.open("rb") as file:
                facts = os.fstat(file.fileno())
                inode = facts.st_ino % (1 << 53)  # the page's numbers are doubles
                replaced = self.identity != inode or facts.st_size < self.end
                grown = len(self.rows) > 4 * max(self._sampled, 256)
                if replaced or grown or points > self._sampled:
                    self.clear(inode)
                    self._sampled = max(points, 0 if replaced else self._sampled)
                if facts.st_size > self.end:
                    self._extend(file, self._sampled)
        except FileNotFoundError:
            self.clear(0)

    def _extend(self, file: BinaryIO, points: int) -> None:
        file.seek(self.end)
        content = file.read()
        size = content.rfind(b"\n") + 1
        whole_from, ends = max(0, size - TAIL_BYTES) if size > WHOLE_BYTES else 0, set[int]()
        step = max(1, size // max(points, 1))
        for at in range(0, whole_from, step):
            ends.add(content.find(b"\n", at))
            if (validation := content.find(VALIDATION, at, min(at + step, whole_from))) >= 0:
                ends.add(content.find(b"\n", validation))
        while (end := content.find(b"\n", whole_from)) >= 0:
            ends.add(end)
            whole_from = end + 1
        parsed = _parse([content[content.rfind(b"\n", 0, end) + 1 : end] for end in sorted(ends)])
        for end, fields in zip(sorted(ends), parsed, strict=True):
            if isinstance(fields, dict):
                self.rows.append((self.end + end + 1, fields))
                self.last |= {name: value for name, value in fields.items() if value is not None}
            else:
                self.damaged += 1
        self.end += size


def _parse(lines: list[bytes]) -> list[Any]:
    """The value of each line; None for a line that is not JSON. All are parsed as one array, which is faster."""
    try:
        values = json.loads(b"[" + b",".join(lines) + b"]", parse_constant=lambda name: None)
    except (ValueError, RecursionError):
        values = []
    if len(values) == len(lines):
        return values
    return [None] if len(lines) == 1 else [value for line in lines for value in _parse([line])]
