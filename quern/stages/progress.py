"""Progress of anything that takes longer than two seconds: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import re
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PATIENCE_SECONDS = 2.0
PLAIN_LINE_SECONDS = 10.0


def _without_negative_zero(text: str) -> str:
    """A loss of -0.0001 is printed as 0.000, not as -0.000."""
    return re.sub(r"-(0\.0+)(?![0-9])", r"\1", text)


class Meter:
    """`with Meter("tokenizing", total, "documents") as meter: meter.at(n, "…")`; total None when unknown."""

    def __init__(self, title: str, total: float | None, unit: str, silent: bool = False) -> None:
        """silent: say nothing, as ranks other than 0."""
        self.title, self.total, self.unit = title, total, unit
        self.console = Console(highlight=False, quiet=silent)
        self.started = self.last_line = time.monotonic()
        self.bar: Progress | None = None

    def __enter__(self) -> Meter:
        return self

    def at(self, done: float, note: str = "") -> None:
        """Says how far things are, as often as the caller likes."""
        note = _without_negative_zero(note)
        now = time.monotonic()
        if now - self.started < PATIENCE_SECONDS:
            return
        if self.console.is_terminal:
            self._draw(done, note)
        elif now - self.last_line >= PLAIN_LINE_SECONDS:
            of = f" of {self.total:,.0f}" if self.total else ""
            line = f"{self.title}: {done:,.0f}{of} {self.unit} {note}".rstrip()
            self.console.print(line, soft_wrap=True, markup=False)
            self.last_line = now

    def say(self, line: str) -> None:
        """A line above the bar."""
        (self.bar.console if self.bar else self.console).print(
            _without_negative_zero(line), soft_wrap=True, markup=False
        )

    def _draw(self, done: float, note: str) -> None:
        if self.bar is None:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
            )
            self.bar = Progress(*columns, TextColumn("{task.fields[note]}"), console=self.console, transient=True)
            self.bar.add_task(f"{self.title} ({self.unit})", total=self.total, note=note)
        self.bar.update(self.bar.tasks[0].id, completed=done, note=note)
        self.bar.start()  # once is enough; before the update it would show a bar at nothing

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()
