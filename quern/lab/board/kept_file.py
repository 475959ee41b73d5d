"""A small file of records, read again when it changes; and what all readers of records share."""

from __future__ import annotations

import json
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
