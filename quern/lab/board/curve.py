"""The files that the board reads: growing metrics by byte offset, and small files, read again when they change.

Of metrics, a sample of the lines is read, then only what was appended. A long file is never read whole. Lines are taken
at byte positions that are evenly spaced; lines of validations, which are rare, are found by an interpolation search for
their steps. The cost depends on the sample, not on the file.
"""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EDGE_BYTES = 4 << 10
"""Read of the beginning of a file of events; twice as much of its end."""


class KeptFile:
    """A small file that is read again when its size or time changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.modified = 0.0
        self._seen: tuple[float, int] | None = (0.0, -1)

    def changed(self) -> bool:
        try:
            facts = self.path.stat()
        except OSError:
            facts = None
        seen = None if facts is None else (facts.st_mtime, facts.st_size)
        self.modified = 0.0 if facts is None else facts.st_mtime
        changed, self._seen = seen != self._seen, seen
        return changed

    def json(self) -> dict[str, Any]:
        """The object in the file; {} if it is missing or damaged, since the board must show the other runs."""
        body = self._body()
        return body if isinstance(body, dict) else {}

    def rows(self) -> list[dict[str, Any]]:
        """The list of objects in the file."""
        body = self._body()
        return [row for row in body if isinstance(row, dict)] if isinstance(body, list) else []

    def _body(self) -> Any:
        try:
            return json.loads(self.path.read_text(encoding="utf-8"), parse_constant=lambda name: None)
        except (OSError, ValueError):
            return None

    def lines(self) -> list[dict[str, Any]]:
        """The objects in the first and the last lines of a JSONL file."""
        try:
            with self.path.open("rb") as file:
                content = file.read(EDGE_BYTES)
                size = file.seek(0, 2)
                if size > len(content):
                    head = content[: content.rfind(b"\n") + 1]
                    file.seek(max(len(head), size - 2 * EDGE_BYTES))
                    content = head + file.read()
        except OSError:
            return []
        rows = []
        for line in content.splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue  # cut at the window's edge, or still being written
        return [row for row in rows if isinstance(row, dict)]


def flatten(body: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested objects as one, with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in body.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def is_number(value: Any) -> bool:
    """Whether a JSON value is a finite number that the page can draw."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


def modified(path: Path) -> float:
    """When a file was written last, in seconds since the epoch; 0 if it is missing."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


Line = tuple[int, bytes]
"""The offset of the byte after a line, and the line without its newline."""

WHOLE_BYTES = 48 << 10
"""At most this many new bytes are read whole."""
TAIL_BYTES = 2 << 10
WINDOW_BYTES = 768
"""First size of the window that is read at a sampled position; it grows until it holds a line."""
MOST_PROBES = 8
STEP = re.compile(rb'"step": (\d+)[,}]')  # as json.dumps writes it


class Curve:
    """The sampled lines of a metrics file.

    Args:
        path: The file; it may be missing.
        whole: Keep every line.

    Attributes:
        rows: The offset after each line, and the line's fields; in file order.
        end: Offset after the last complete line.
        identity: Changes when the file is replaced, as a resumed run does; earlier offsets are then void.
        last: The latest value of each field; a null leaves the one before.
        damaged: Lines that are not JSON objects; they are left out.
    """

    def __init__(self, path: Path, whole: bool = False) -> None:
        self.path, self._whole = path, whole
        self._clear(0)
        self._sampled = 0

    def _clear(self, identity: int) -> None:
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.end, self.identity, self.damaged = 0, identity, 0
        self.last: dict[str, Any] = {}

    def refresh(self, points: int = 0, every: int | None = None) -> None:
        """Reads what is new."""
        try:
            with self.path.open("rb", buffering=0) as file:
                facts = os.fstat(file.fileno())
                inode = facts.st_ino % (1 << 53)  # the page's numbers are doubles
                replaced = self.identity != inode or facts.st_size < self.end
                grown = len(self.rows) > 4 * max(self._sampled, 256) and not self._whole
                if replaced or grown or points > self._sampled:
                    self._clear(inode)
                    self._sampled = max(points, 0 if replaced else self._sampled)
                if facts.st_size > self.end:
                    self._extend(file.fileno(), facts.st_size, self._sampled, every)
        except FileNotFoundError:
            self._clear(0)

    def _extend(self, file: int, size: int, points: int, every: int | None) -> None:
        start = self.end
        if self._whole or size - start <= WHOLE_BYTES:
            lines = list(_lines(os.pread(file, size - start, start), start))
        else:
            content = os.pread(file, TAIL_BYTES, size - TAIL_BYTES)
            skipped = content.find(b"\n") + 1  # of the line that begins before
            tail = list(_lines(content[skipped:], size - TAIL_BYTES + skipped))
            lines = _sample(file, start, tail[-1][0] if tail else size, points) + tail
            if every:
                lines += _validations(file, lines, every, points)
            lines = sorted(dict(lines).items())
        for offset, fields in zip((offset for offset, _ in lines), _parse([line for _, line in lines]), strict=True):
            if isinstance(fields, dict):
                self.rows.append((offset, fields))
                known = {k: v for k, v in fields.items() if v is not None} if None in fields.values() else fields
                self.last.update(known)
            else:
                self.damaged += 1
        if lines:
            self.end = lines[-1][0]


def _lines(content: bytes, start: int) -> Iterator[Line]:
    """The complete lines of `content`, which begins at a line's start, at offset `start` of the file."""
    for line in content[: content.rfind(b"\n") + 1].splitlines(keepends=True):
        start += len(line)
        yield start, line[:-1]


def _sample(file: int, start: int, stop: int, points: int) -> list[Line]:
    """The first line after each of `points` evenly spaced offsets; `start` is a line's start."""
    lines: list[Line] = []
    size = WINDOW_BYTES
    for position in range(start, stop, max(1, (stop - start) // max(points, 1))):
        while True:
            content = os.pread(file, size, position)
            begin = 0 if position == start else content.find(b"\n") + 1
            end = content.find(b"\n", begin)
            if end >= 0 and (begin or position == start):
                lines.append((position + end + 1, content[begin:end]))
            elif position + size < stop:
                size *= 2  # for the positions that follow, too
                continue
            break
    return lines


def _validations(file: int, lines: list[Line], every: int, points: int) -> list[Line]:
    """The lines at up to `points` multiples of `every`, found between the sampled lines.

    Steps grow with the offset, and lines have nearly equal lengths, so a guess by interpolation is rarely far off.
    """
    anchors = [(0, 0), *((offset, step) for offset, line in sorted(lines) if (step := _step(line)) is not None)]
    steps = [step for _, step in anchors]
    targets = range(every, steps[-1] + 1, every)
    found: list[Line] = []
    for target in targets[:: max(1, -(-len(targets) // max(points, 1)))]:
        at = bisect_left(steps, target)
        if at < len(anchors):
            found += _seek(file, target, anchors[max(0, at - 1)], anchors[at])
    return found


def _seek(file: int, target: int, low: tuple[int, int], high: tuple[int, int]) -> list[Line]:
    """The lines of step `target` but the training loop's own, which is the first of several.

    low, high: (offset, step) of lines around it, low.step < target <= high.step.
    """
    mark, size = b'"step": %d,' % target, 2 * WINDOW_BYTES
    for _ in range(MOST_PROBES):
        share = (target - low[1]) / max(1, high[1] - low[1])
        start = max(0, int(low[0] + (high[0] - low[0]) * share) - size // 2)
        content = os.pread(file, size, start)
        begin, end = content.find(mark), content.find(b"\n", content.rfind(mark))
        if begin >= 0:
            begin = content.rfind(b"\n", 0, begin) + 1
            if (begin or not start) and end >= 0 and (b"\n" in content[end + 1 :] or len(content) < size):
                found = list(_lines(content[begin : end + 1], start + begin))
                return found[1:] or found
            size *= 2  # a line of this step may continue outside of the window
            continue
        steps = [(start + match.start(), int(match[1])) for match in STEP.finditer(content)]
        if not steps or steps[0][1] < target < steps[-1][1]:
            return []
        low, high = (low, steps[0]) if steps[0][1] > target else (steps[-1], high)
        if low[0] >= high[0]:
            return []
    return []


def _step(line: bytes) -> int | None:
    found = STEP.search(line)
    return int(found[1]) if found else None


def _parse(lines: list[bytes]) -> list[Any]:
    """The value of each line; None for a line that is not JSON. All are parsed as one array, which is faster."""
    try:
        values = json.loads(b"[" + b",".join(lines) + b"]", parse_constant=_null)
        if len(values) == len(lines):
            return values
    except ValueError:
        pass  # some line is damaged: find out which one
    return [_parse_one(line) for line in lines]


def _parse_one(line: bytes) -> Any:
    try:
        return json.loads(line, parse_constant=_null)
    except ValueError:
        return None


def _null(name: str) -> None:
    """NaN and infinity, which strict JSON does not have."""
