"""The files that the board reads: growing metrics by byte offset, and small files, read again when they change.

Of a long file of metrics, lines at evenly spaced offsets are read, and the lines of validations, which an
interpolation between their steps finds; then only what was appended. The cost depends on the sample, not on the file.
"""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_left
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from quern.records import strict

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


def objects(value: Any) -> list[dict[str, Any]]:
    """The objects in a value that should be a list of them."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def flatten(body: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested objects as one, with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in body.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def is_number(value: Any) -> bool:
    """Whether a JSON value is a finite number that the page can draw."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


Line = tuple[int, bytes]
"""The offset of the byte after a line, and the line without its newline."""

WHOLE_BYTES, WINDOW_BYTES, BUFFER_BYTES = 48 << 10, 768, 1 << 11
"""At most so many new bytes are read whole; half of the window in which a line is searched; read at a time."""
STEP = re.compile(rb'"step": (\d+)[,}]')  # as json.dumps writes it


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

    def refresh(self, points: int, every: int | None = None) -> None:
        """Reads what is new. points: lines to sample; every: steps between validations."""
        try:
            with self.path.open("rb", BUFFER_BYTES) as file:
                facts = os.fstat(file.fileno())
                inode = facts.st_ino % (1 << 53)  # the page's numbers are doubles
                replaced = self.identity != inode or facts.st_size < self.end
                grown = len(self.rows) > 4 * max(self._sampled, 256)
                if replaced or grown or points > self._sampled:
                    self.clear(inode)
                    self._sampled = max(points, 0 if replaced else self._sampled)
                if facts.st_size > self.end:
                    self._extend(file, facts.st_size, self._sampled, every)
        except FileNotFoundError:
            self.clear(0)

    def _extend(self, file: BinaryIO, size: int, points: int, every: int | None) -> None:
        if size - self.end <= WHOLE_BYTES:
            lines = list(_lines(file, self.end, size))
        else:
            tail = list(_lines(file, size - 3 * WINDOW_BYTES, size))
            stop = tail[-1][0] if tail else size
            positions = range(self.end, stop, max(1, (stop - self.end) // max(points, 1)))
            lines = [line for at in positions for line in islice(_lines(file, at, stop), 1)] + tail
            if every:
                lines += _validations(file, lines, every, points)
            lines = sorted(dict(lines).items())
        for (offset, _), fields in zip(lines, _parse([line for _, line in lines]), strict=True):
            if isinstance(fields, dict):
                self.rows.append((offset, fields))
                self.last |= {name: value for name, value in fields.items() if value is not None}
            else:
                self.damaged += 1
        if lines:
            self.end = lines[-1][0]


def _lines(file: BinaryIO, begin: int, end: int) -> Iterator[Line]:
    """The whole lines that begin between two offsets."""
    at = max(0, begin - 1)
    file.seek(at)
    at += len(file.readline()) if begin > 0 else 0
    while at < end and (line := file.readline()).endswith(b"\n"):
        at += len(line)
        yield at, line[:-1]


def _validations(file: BinaryIO, lines: list[Line], every: int, points: int) -> list[Line]:
    """The lines at up to `points` multiples of `every` but the training loop's own, which is the first of several.

    Steps grow with the offset, and lines have nearly equal lengths: a guess between sampled lines is seldom far off.
    """
    anchors = [(0, 0), *((offset, int(step[1])) for offset, line in sorted(lines) if (step := STEP.search(line)))]
    steps = [step for _, step in anchors]
    targets = range(every, steps[-1] + 1, every)
    found: list[Line] = []
    for target in targets[:: max(1, -(-len(targets) // max(points, 1)))]:
        at = bisect_left(steps, target)
        (low, before), (high, after) = anchors[at - 1 : at + 1]
        guess = low + (high - low) * (target - before) // max(1, after - before)
        mark = b'"step": %d,' % target
        for begin, end in ((guess - WINDOW_BYTES, guess + WINDOW_BYTES), (low, high + WINDOW_BYTES)):
            near = list(_lines(file, begin, end))
            own = [line for line in near if mark in line[1]]
            if own and own[-1] != near[-1]:  # the window has the line after them, too
                break
        found += own[1:] or own
    return found


def _parse(lines: list[bytes]) -> list[Any]:
    """The value of each line; None for a line that is not JSON. All are parsed as one array, which is faster."""
    try:
        values = json.loads(b"[" + b",".join(lines) + b"]", parse_constant=lambda name: None)
    except (ValueError, RecursionError):
        values = []
    if len(values) == len(lines):
        return values
    return [None] if len(lines) == 1 else [value for line in lines for value in _parse([line])]
