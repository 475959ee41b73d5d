"""Output for the terminal: progress of work over two seconds (plain lines without a terminal), durations, tables, and a
model's text without what would control the terminal."""

from __future__ import annotations

import re
import shutil
import textwrap
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PATIENCE_SECONDS = 2.0
PLAIN_LINE_SECONDS = 5.0


def duration(seconds: float) -> str:
    """A duration in words, in the largest unit that gives at least two."""
    for size, unit in ((86_400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{max(1, seconds):.0f} s"


def human_size(size: float) -> str:
    """Bytes in the largest unit that fits, such as 1.2 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 10 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"


def counted(number: int, noun: str) -> str:
    """A number with its noun: "1 row", "2,000 rows", "1 study", "2 studies"."""
    plural = noun[:-1] + "ies" if noun[-1] == "y" else noun + "s"
    return f"{number:,} {noun if number == 1 else plural}"


def listed(texts: Mapping[str, str], longest: int = 99) -> str:
    """Names and their texts in two columns, wrapped at the width of the terminal.

    A name of more than `longest` characters, or of more than half a narrow terminal, has its text below it.
    """
    columns, lines = max(40, shutil.get_terminal_size().columns), list[str]()
    room = min(max((len(name) for name in texts if len(name) <= longest), default=longest) + 4, columns - 21)
    for name, text in texts.items():
        parts = ["" for _ in range(len(name) + 4 > room)] + textwrap.wrap(text, columns - 1 - room)
        lines += [f"{'' if number else f'  {name}':{room}}{part}".rstrip() for number, part in enumerate(parts)]
    return "\n".join(lines)


def silent(line: str) -> None:
    """Takes lines that nobody reads."""


class Meter(AbstractContextManager["Meter"]):
    """A progress bar: `with Meter("tokenizing", total, "documents") as meter: meter.at(n, "…")`."""

    def __init__(self, title: str, total: float | None, unit: str, silent: bool = False, keeps: bool = False) -> None:
        """total: None if unknown; silent: print nothing, as on ranks other than 0; keeps: at the begin and halfway,
        however soon, leave a line."""
        self.title, self.total, self.unit = title, total, unit
        self.console = Console(highlight=False, emoji=False, quiet=silent)
        self.started = self.last_line = time.monotonic()
        self.bar: Progress | None = None
        self._first: tuple[float, float] | None = None
        self._kept = [0.0, 0.5] if keeps else []

    def at(self, done: float, note: str = "") -> None:
        """Reports progress; can be called at any rate."""
        now = time.monotonic()
        self._first = self._first or (done, now)
        if self._kept and done >= self._first[0] + self._kept[0] * ((self.total or done) - self._first[0]):
            self._kept.pop(0)
            self.log(f"{self._counted(done)}, {note}")
            self.last_line = now
        if now - self.started < PATIENCE_SECONDS:
            return
        if self.console.is_terminal:
            self._draw(done, note)
        elif now - self.last_line >= PLAIN_LINE_SECONDS:
            parts = [self._counted(done), note, self._left(done, now)]
            self.console.print(", ".join(part for part in parts if part), soft_wrap=True, markup=False)
            self.last_line = now

    def _counted(self, done: float) -> str:
        return f"{self.title}: {done:,.0f}{f' of {self.total:,.0f}' if self.total else ''} {self.unit}"

    def _left(self, done: float, now: float) -> str:
        """The estimated time left, from the speed since the first call."""
        assert self._first is not None
        first, since = self._first
        if self.total is None or done <= first:
            return ""
        return f"{duration((self.total - done) * (now - since) / (done - first))} left"

    def log(self, line: str) -> None:
        """Prints a line above the bar."""
        (self.bar.console if self.bar else self.console).print(line, soft_wrap=True, markup=False)

    def _draw(self, done: float, note: str) -> None:
        if self.bar is None:
            heading, remark = (TextColumn(f"{{task.{name}}}", markup=False) for name in ("description", "fields[note]"))
            columns = heading, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), remark
            self.bar = Progress(*columns, console=self.console, transient=True)
            self.bar.add_task(f"{self.title} ({self.unit})", total=self.total, note=note)
        self.bar.update(self.bar.tasks[0].id, completed=done, total=self.total, note=note)
        self.bar.start()  # starting before the update would show an empty bar

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()


def grid(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 0) -> list[str]:
    """Lines of a table with right-aligned columns, the first `left` ones aligned at the left; none without rows."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [f"{cell:{'<' if i < left else '>'}{widths[i]}}" for i, cell in enumerate(row)]
        return f"  {'  '.join(cells)}".rstrip()

    return [line(row) for row in [head, *rows]] if rows else []


_SIGNS = str.maketrans({"×": "*", "÷": "/", "·": "*"} | dict.fromkeys("\u2212\u2013\u2010\u2011\ufe63\uff0d", "-"))
# C0 and C1 controls except tab and line feed, DEL, bidirectional overrides, lone surrogates.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def ascii_signs(text: str) -> str:
    """The text with typographic signs of arithmetic, such as U+2212 for minus, as the characters of a keyboard."""
    return text.translate(_SIGNS)


def printable(text: str) -> str:
    """The text without carriage returns, with U+FFFD for what else controls a terminal or cannot be encoded."""
    return CONTROL.sub("\ufffd", text.replace("\r", ""))
