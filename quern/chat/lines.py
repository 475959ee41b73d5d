'''Reads what the user says, from a terminal or a pipe, and keeps a terminal's history.

An entry is one line, or several: a line that ends with a backslash continues, and """ begins a text that ends at the
next line that ends with """. Such a text is never a command.
'''

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TextIO

from quern.temporaries import write_whole

PROMPT, MORE = "> ", ". "
QUOTES = '"""'
HISTORY_LINES = 1000

Read = Callable[[str], str]
"""Shows a prompt if there is a terminal, and returns the next line. Raises EOFError at the end of the input."""


class Entry(NamedTuple):
    """quoted: the text was between triple quotes."""

    text: str
    quoted: bool = False


def next_entry(read: Read) -> Entry:
    """Reads one entry. The end of the input completes an unfinished entry; before an entry it raises EOFError."""
    lines = [read(PROMPT)]
    quoted = lines[0].lstrip().startswith(QUOTES)
    if quoted:
        lines[0] = lines[0].lstrip().removeprefix(QUOTES)
    with suppress(EOFError):
        while not lines[-1].rstrip().endswith(QUOTES) if quoted else lines[-1].endswith("\\"):
            if not quoted:
                lines[-1] = lines[-1].removesuffix("\\")
            lines.append(read(MORE))
    if not quoted:
        return Entry("\n".join(lines))
    if lines[-1].rstrip().endswith(QUOTES):  # and not the end of the input
        lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
    return Entry("\n".join(lines).removeprefix("\n").removesuffix("\n"), quoted=True)


def of_pipe(stdin: TextIO | None) -> Read:
    """Reads lines of UTF-8 without showing a prompt.

    Args:
        stdin: Standard input; None if it is closed.

    Raises:
        ValueError: A line is not UTF-8 (from the returned function).
    """

    def read(prompt: str) -> str:
        line = stdin.buffer.readline() if stdin is not None else b""
        if not line:
            raise EOFError
        try:
            return line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"standard input is not UTF-8 ({error}): convert it, as with iconv") from error

    return read


class Terminal:
    """Reads lines from the terminal, with line editing and the lines of earlier chats if Python has readline.

    Args:
        history: The file that keeps the lines; its folder is created with the first one.
        log: Called with lines for the user.
    """

    def __init__(self, history: Path, log: Callable[[str], None]) -> None:
        self._history, self._log = history, log
        self._keeps = False
        try:
            import readline  # changes how Python's `input` reads
        except ImportError:
            return  # some builds of Python: the terminal's own editing remains
        try:
            for line in recall(history):
                readline.add_history(line)
            self._keeps = True
        except OSError as error:
            log(f"the history is neither read nor kept: {error}")

    def __call__(self, prompt: str) -> str:
        while True:
            try:
                line = input(prompt)
                break
            except UnicodeDecodeError as error:
                self._log(f"this line does not have the terminal's encoding ({error}): type it again")
        if self._keeps and line.strip():
            try:
                remember(self._history, line)
            except OSError as error:
                self._keeps = False
                self._log(f"the history is not kept: {error}")
        return line


def recall(history: Path) -> list[str]:
    """The lines of the history, oldest first."""
    try:
        return [line for line in history.read_text(encoding="utf-8", errors="replace").split("\n") if line]
    except FileNotFoundError:
        return []


def remember(history: Path, line: str) -> None:
    """Adds a line, unless it repeats the last one. The file is read again: other chats may have added theirs."""
    known = recall(history)
    new = [piece for piece in line.split("\n") if piece]  # a pasted line can hold several
    if known[-len(new) :] != new:
        write_whole(history, "".join(f"{piece}\n" for piece in [*known, *new][-HISTORY_LINES:]))
