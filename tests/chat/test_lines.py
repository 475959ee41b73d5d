"""Entries of several lines, pipes, and a terminal with its history."""

import contextlib
import io
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quern.chat.lines import HISTORY_LINES, Entry, Terminal, next_entry, of_pipe, recall, remember
from quern.runs.run_dir import RunDir
from tests.support.llama_run import llama_recipe, write_run


def entries(text: str) -> list[Entry]:
    """All entries of a pipe."""
    read, found = of_pipe(io.TextIOWrapper(io.BytesIO(text.encode()))), []
    with contextlib.suppress(EOFError):
        while True:
            found.append(next_entry(read))
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\r\nb", [Entry("a"), Entry("b")]),
        ("a\n\nb\n", [Entry("a"), Entry(""), Entry("b")]),
        ("a \\\n  b\\\nc\nd\n", [Entry("a \n  b\nc"), Entry("d")]),
        ("a\\ \nb\\", [Entry("a\\ "), Entry("b")]),
        ('"""\na\n\n/b\\\n"""\nc\n', [Entry("a\n\n/b\\", quoted=True), Entry("c")]),
        ('"""a"""\n"""b\nc""" \n', [Entry("a", quoted=True), Entry("b\nc", quoted=True)]),
        ('""""""\n', [Entry("", quoted=True)]),
        ('"""a\nb', [Entry("a\nb", quoted=True)]),
        ('a """\nb\n', [Entry('a """'), Entry("b")]),
        ("Grüße 你好 😀\n", [Entry("Grüße 你好 😀")]),
    ],
)
def test_lines_become_entries(text: str, expected: list[Entry]) -> None:
    assert entries(text) == expected


def test_the_history_keeps_the_newest_lines_of_all_chats(tmp_path: Path) -> None:
    history = tmp_path / "run" / "chat_history"
    assert recall(history) == []
    for line in ("one", "two", "two", "three\n\nfour", "three\nfour", "one"):
        remember(history, line)
    assert recall(history) == ["one", "two", "three", "four", "one"]
    history.write_text("".join(f"{number}\n" for number in range(HISTORY_LINES)), encoding="utf-8")
    remember(history, "newest")
    assert recall(history) == [*map(str, range(1, HISTORY_LINES)), "newest"]


def test_without_readline_lines_are_read_and_no_history_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "readline", None)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    said: list[str] = []
    assert Terminal(tmp_path / "chat_history", said.append)("> ") == "hello"
    assert capsys.readouterr().out == "> " and said == [] and list(tmp_path.iterdir()) == []


def test_a_history_that_cannot_be_kept_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    (tmp_path / "file").write_text("", encoding="utf-8")
    terminal = Terminal(tmp_path / "file" / "chat_history", said.append)
    assert [terminal("> "), terminal("> ")] == ["one", "two"]
    assert len(said) == 1 and "history is n" in said[0]


class Screen:
    """`quern chat` with this run in a pseudo-terminal."""

    def __init__(self, out: Path):
        flags = "--no-compile --dtype fp32 --threads 1 --max-tokens 4 --temperature 0".split()
        ours, theirs = pty.openpty()
        environment = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "INPUTRC")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "quern.cli.main", "chat", "--out", str(out), *flags],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**environment, "TERM": "xterm-256color", "HOME": str(out / "home")},
            start_new_session=True,
        )
        os.close(theirs)
        self.handle = ours

    def until(self, mark: str, seconds: float = 120) -> str:
        """What is shown up to a mark."""
        shown, end = "", time.monotonic() + seconds
        while mark not in shown:
            ready, _, _ = select.select([self.handle], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"no {mark!r} in {shown!r}"
            shown += os.read(self.handle, 4096).decode()
        return shown

    def type(self, keys: str) -> None:
        os.write(self.handle, keys.encode())


@pytest.fixture
def screen(tmp_path: Path) -> Iterator[Screen]:
    write_run(tmp_path, llama_recipe(context=48))
    remember(RunDir(tmp_path, "first").chat_history, "/temperature 0.25")
    screen = Screen(tmp_path)
    yield screen
    screen.process.kill()
    screen.process.wait()
    os.close(screen.handle)


def test_a_terminal_has_prompts_line_editing_history_and_colours(screen: Screen, tmp_path: Path) -> None:
    greeting = screen.until("> ")
    assert "Begin a text, and the model continues it." in greeting
    screen.type("\x1b[A\r")  # the up arrow: the line of an earlier chat
    assert "(temperature 0.25, " in screen.until("\r\n> ")
    screen.type("The millr\x1b[De\r")  # the left arrow: "The miller"
    assert "The miller" in screen.until("\r\n> ").replace("\x08", "")
    screen.type("/xray\r")
    assert "\x1b[1mtoken" in screen.until("\r\n> ")
    screen.type("a \\\r")
    screen.until("\r\n. ")
    screen.type("\x04")  # Ctrl-D: the end of the input completes the text
    assert "a" in screen.until("\r\n> ")
    screen.type("\x04")
    screen.until("\r\n")
    assert screen.process.wait(60) == 0
    kept = ["/temperature 0.25", "The miller", "/xray", "a \\"]
    assert recall(RunDir(tmp_path, "first").chat_history) == kept
    assert not (tmp_path / "home").exists()
