'''Reads what the user says, from a terminal or a pipe, keeps a terminal's history, and wraps what is written there.

An entry is one line, or several: a line that ends with a backslash continues, and """ begins a text that ends at the
next line that ends with """. Such a text is never a command.
'''

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from glob import glob
from os.path import expanduser
from pathlib import Path
from typing import TextIO

from rich.cells import cell_len

from quern.temporaries import write_whole

PROMPT, MORE = "> ", ". "
DIM, BRIGHT, PLAIN = "\x1b[2m", "\x1b[1;32m", "\x1b[0m"
PIECES = re.compile(r"\x1b\[[0-9;]*m|.", re.DOTALL)
"""A change of colour, which takes no room, or a character."""
QUOTES = '"""'
HISTORY_LINES = 1000

Read = Callable[[str], str]
"""Shows a prompt if there is a terminal, and returns the next line. Raises EOFError at the end of the input."""


def next_entry(read: Read) -> tuple[str, bool]:
    """Reads one entry. Returns its text, and whether that was between triple quotes. The end of the input completes an
    unfinished entry; before an entry it raises EOFError."""
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
        return "\n".join(lines), False
    if lines[-1].rstrip().endswith(QUOTES):  # and not the end of the input
        lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
    return "\n".join(lines).removeprefix("\n").removesuffix("\n"), True


def of_pipe(stdin: TextIO | None) -> Read:
    """Reads lines of UTF-8 without a prompt; None is a closed standard input. Raises ValueError for other bytes."""

    def read(prompt: str) -> str:
        line = stdin.buffer.readline() if stdin is not None else b""
        if not line:
            raise EOFError
        try:
            return line.decode("utf-8-sig").rstrip("\r\n")  # a file can start with a byte order mark
        except UnicodeDecodeError as error:
            raise ValueError(f"standard input is not UTF-8 ({error}): convert it, as with iconv") from error

    return read


class Terminal:
    """Reads lines from the terminal, with line editing and the lines of earlier chats if Python has readline.

    words: The Tab key completes a line to one of these, and the name of a file after it.
    """

    def __init__(
        self, history: Path, log: Callable[[str], None], words: Sequence[str] = (), coloured: bool = False
    ) -> None:
        self._history, self._log, self._words = history, log, words
        self._keeps, self._prompt = False, f"{BRIGHT}{{}}{PLAIN}" if coloured else "{}"
        try:
            import readline  # changes how Python's `input` reads
        except ImportError:
            return  # some builds of Python: the terminal's own editing remains
        self._prompt = PIECES.sub(lambda piece: f"\001{piece[0]}\002" if len(piece[0]) > 1 else piece[0], self._prompt)
        readline.set_completer_delims("")  # the whole line is completed
        readline.set_completer(lambda line, number: [*self.completions(line), None][number])
        readline.parse_and_bind("bind ^I rl_complete" if "libedit" in str(readline.__doc__) else "tab: complete")
        try:
            for line in recall(history):
                with suppress(UnicodeEncodeError):  # typed in a terminal of another encoding
                    readline.add_history(line)
            self._keeps = True
        except OSError as error:
            log(f"the history is neither read nor kept: {error}")

    def completions(self, line: str) -> list[str]:
        """The commands that begin with the line, or the line with each name of a file that its last part begins."""
        command, space, name = line.partition(" ")
        if not space:
            return [word for word in self._words if word.startswith(line)]
        return [f"{command} {path}" for path in sorted(glob(f"{expanduser(name)}*"))] if command in self._words else []

    def __call__(self, prompt: str) -> str:
        while True:
            try:
                line = input(self._prompt.format(prompt))
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


class Screen:
    """Writes text to a terminal as it arrives. A word that reaches the edge is taken back, and begins the next line."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._at = self._room = 0  # columns of the line, and of its unfinished word, that are taken
        self._word = ""

    def __call__(self, text: str) -> None:
        shown = ""
        most = shutil.get_terminal_size().columns - 1  # terminals differ in what follows a letter in the last column
        for piece in PIECES.findall(text):
            width = 8 - self._at % 8 if piece == "\t" else cell_len(piece) if len(piece) == 1 else 0
            ends = piece.isspace() or width > 1  # also beside a letter of Chinese or Japanese
            if ends or self._room == self._at:  # a word that fills the line is broken
                self._word, self._room = ("", 0) if ends or self._at + width > most else (self._word, self._room)
            if piece == "\n":
                self._at = 0
            elif self._at + width > most:
                if piece.isspace():
                    continue
                shown += f"\x1b[{self._room}D\x1b[K\n{self._word}" if self._room else "\n"
                self._at = self._room
            if not ends:
                self._word, self._room = self._word + piece, self._room + width
            shown, self._at = shown + piece, self._at + (0 if piece == "\n" else width)
        self._write(shown)
