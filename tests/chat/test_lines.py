"""Entries of several lines, pipes, and a terminal with its history."""

import contextlib
import io
import os
import pty
import random
import re
import select
import subprocess
import sys
import termios
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quern.chat.lines import HISTORY_LINES, Screen, Terminal, next_entry, of_pipe, recall, remember
from quern.runs.run_dir import RunDir
from tests.support.exported import toy_recipe, write_run

COLUMNS = 30
STYLE = re.compile(r"\x1b\[[0-9;]*m")


def rows(written: str) -> list[str]:
    """The rows of a terminal that breaks no line by itself: the cursor goes back and the rest of a row is erased."""
    found, at = [""], 0
    for code, count, letter in re.findall(r"(\x1b\[(\d*)[DK])|(.)", STYLE.sub("", written), re.DOTALL):
        if code.endswith("D"):
            at -= int(count)
        elif code:
            found[-1] = found[-1][:at]
        elif letter == "\n":
            found, at = [*found, ""], 0
        elif letter == "\r":
            at = 0
        else:
            found[-1], at = found[-1][:at] + letter + found[-1][at + 1 :], at + 1
    return found


def test_words_wrap_at_the_edge_as_they_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle: Python's textwrap, which has the whole text at once."""
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    draw = random.Random(0)
    for _ in range(50):
        words = ["".join(draw.choices("abc,.", k=draw.randint(1, COLUMNS - 1))) for _ in range(30)]
        text, shown = " ".join(words), list[str]()
        screen = Screen(shown.append)
        while text:
            count = draw.randint(1, 9)
            screen(text[:count])
            text = text[count:]
        expected = textwrap.wrap(" ".join(words), COLUMNS - 1, break_on_hyphens=False)
        assert [row.rstrip() for row in rows("".join(shown))] == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\n\n  b  c\n", ["a", "", "  b  c", ""]),
        ("x" * 65, ["x" * 29, "x" * 29, "x" * 7]),
        (f"aa {'x' * 40} b", ["aa ", "x" * 29, f"{'x' * 11} b"]),
        ("\x1b[2m[tool: 1+1] \x1b[0mand that is two\x1b[0m again", ["[tool: 1+1] and that is two ", "again"]),
        ("粉ひきは穀物をひく、水車小屋で", ["粉ひきは穀物をひく、水車小屋", "で"]),
        (f"{'a' * 29} b", ["a" * 29, "b"]),
        (f"{'a' * 29}\nb", ["a" * 29, "b"]),
        ("\tone\ttwo\tthree four", ["\tone\ttwo\tthree", "four"]),
    ],
)
def test_lines_long_words_colours_wide_letters(monkeypatch: pytest.MonkeyPatch, text: str, expected: list[str]) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    for size in (1, 3, len(text)):
        shown: list[str] = []
        screen = Screen(shown.append)
        for piece in STYLE.sub(lambda found: f"\0{found[0]}\0", text).split("\0"):
            for at in range(0, len(piece), len(piece) if piece.startswith("\x1b") else size):
                screen(piece[at:] if piece.startswith("\x1b") else piece[at : at + size])
        assert rows("".join(shown)) == expected


def test_tab_completes_commands_and_names_of_files(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path / "none", lambda line: None, ["/save", "/seed", "/load"])
    for name in ("talk.json", "talk two.json", "other"):
        (tmp_path / name).write_text("", encoding="utf-8")
    assert terminal.completions("/s") == ["/save", "/seed"] and terminal.completions("What") == []
    files = [f"/load {tmp_path}/talk two.json", f"/load {tmp_path}/talk.json"]
    assert terminal.completions(f"/load {tmp_path}/t") == files and terminal.completions("Who is /load t") == []


def entries(text: str) -> list[tuple[str, bool]]:
    read, found = of_pipe(io.TextIOWrapper(io.BytesIO(text.encode()))), []
    with contextlib.suppress(EOFError):
        while True:
            found.append(next_entry(read))
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\r\nb", [("a", False), ("b", False)]),
        ("\ufeff/help\na", [("/help", False), ("a", False)]),
        ("a\n\nb\n", [("a", False), ("", False), ("b", False)]),
        ("a \\\n  b\\\nc\nd\n", [("a \n  b\nc", False), ("d", False)]),
        ("a\\ \nb\\", [("a\\ ", False), ("b", False)]),
        ('"""\na\n\n/b\\\n"""\nc\n', [("a\n\n/b\\", True), ("c", False)]),
        ('"""a"""\n"""b\nc""" \n', [("a", True), ("b\nc", True)]),
        ('""""""\n', [("", True)]),
        ('"""a\nb', [("a\nb", True)]),
        ('a """\nb\n', [('a """', False), ("b", False)]),
        ("Grüße 你好 😀\n", [("Grüße 你好 😀", False)]),
    ],
)
def test_lines_become_entries(text: str, expected: list[tuple[str, bool]]) -> None:
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


def test_a_history_that_cannot_be_kept_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    (tmp_path / "file").write_text("", encoding="utf-8")
    terminal = Terminal(tmp_path / "file" / "chat_history", said.append)
    assert [terminal("> "), terminal("> ")] == ["one", "two"]
    assert len(said) == 1 and "history is n" in said[0]


def test_lines_of_another_encoding_in_the_history_do_not_stop_a_chat(tmp_path: Path) -> None:
    history = tmp_path / "chat_history"
    for line in ("שלום", "one"):
        remember(history, line)
    script = "import readline, sys; from pathlib import Path; from quern.chat.lines import Terminal\n"
    script += "Terminal(Path(sys.argv[1]), print); print(readline.get_history_item(1))"
    command = [sys.executable, "-c", script, str(history)]
    done = subprocess.run(command, env={**os.environ, "LC_ALL": "C"}, capture_output=True, text=True, check=True)
    assert done.stdout == "one\n"


class Chat:
    """`quern chat` with this run in a pseudo-terminal."""

    def __init__(self, out: Path, **variables: str):
        flags = "--no-compile --dtype fp32 --threads 1 --max-tokens 4 --temperature 0".split()
        ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, COLUMNS))
        unset = ("NO_COLOR", "INPUTRC", "COLUMNS")
        environment = {key: value for key, value in os.environ.items() if key not in unset} | variables
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
        shown, end = "", time.monotonic() + seconds
        while mark not in STYLE.sub("", shown):
            ready, _, _ = select.select([self.handle], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"no {mark!r} in {shown!r}"
            shown += os.read(self.handle, 4096).decode()
        return shown

    def type(self, keys: str) -> None:
        os.write(self.handle, keys.encode())


@pytest.fixture
def screen(tmp_path: Path) -> Iterator[Chat]:
    write_run(tmp_path, toy_recipe("llama", context=48))
    remember(RunDir(tmp_path, "first").chat_history, "/temperature 0.25")
    screen = Chat(tmp_path)
    yield screen
    screen.process.kill()
    screen.process.wait()
    os.close(screen.handle)


def test_a_terminal_has_prompts_line_editing_history_and_colours(screen: Chat, tmp_path: Path) -> None:
    greeting = screen.until("\r\n> ")
    assert "\x1b[1;32m> " in greeting
    assert "Begin a text, and the model " in rows(greeting) and "continues it. exit or an " in rows(greeting)
    screen.type("\x1b[A\r")  # the up arrow: the line of an earlier chat
    assert "(temperature 0.25, " in screen.until("\r\n> ").replace("\x1b[2m", "")
    screen.type("The millr\x1b[De\r")  # the left arrow: "The miller"
    reply = screen.until("\r\n> ").replace("\x08", "")
    assert "The miller" in reply and max(map(len, rows(reply))) < COLUMNS
    screen.type("/xray\r")
    assert "\x1b[1mtoken" in screen.until("\r\n> ")
    screen.type("a \\\r")
    screen.until("\r\n. ")
    screen.type("\x04")  # Ctrl-D: the end of the input completes the text
    assert "a" in screen.until("\r\n> ")
    screen.type("/com\t")  # Tab: the only command that begins so
    screen.until("/complete")
    screen.type("\x15exit\r")
    assert screen.process.wait(60) == 0
    kept = ["/temperature 0.25", "The miller", "/xray", "a \\", "exit"]
    assert recall(RunDir(tmp_path, "first").chat_history) == kept
    assert not (tmp_path / "home").exists()
