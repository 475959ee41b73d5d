"""Progress: silent while it is quick, plain lines without a terminal, one bar where there is one; two columns."""

import os
import pty
import select

import pytest

from quern.terminal import PATIENCE_SECONDS, PLAIN_LINE_SECONDS, Meter, listed, printable


def long_since(meter: Meter) -> Meter:
    """The same meter, begun and last heard of long ago."""
    meter.started -= 2 * PATIENCE_SECONDS
    meter.last_line -= 2 * PLAIN_LINE_SECONDS
    return meter


@pytest.mark.parametrize(("long", "silent"), [(False, False), (True, True)])
def test_what_is_quick_or_another_rank_is_silent(long: bool, silent: bool, capsys: pytest.CaptureFixture[str]) -> None:
    meter = Meter("grinding", 10, "sacks", silent=silent)
    with long_since(meter) if long else meter:
        meter.at(3)
    assert capsys.readouterr().out == ""


def test_plain_lines_without_a_terminal_and_not_too_many(capsys: pytest.CaptureFixture[str]) -> None:
    with long_since(Meter("grinding", 12_000, "sacks")) as meter:
        for done in range(1_000, 1_100):
            meter.at(done, "[bold]fine[/bold]" + " and dusty" * 20)
        meter.log("a stone broke [red]")
    assert capsys.readouterr().out.split("\n") == [
        "grinding: 1,000 of 12,000 sacks, [bold]fine[/bold]" + " and dusty" * 20,
        "a stone broke [red]",
        "",
    ]
    long_since(Meter("reading", None, "bytes")).at(5)
    assert capsys.readouterr().out == "reading: 5 bytes\n"
    long_since(Meter("training", 9, "steps", keeps=True)).at(1, "loss 1")
    assert capsys.readouterr().out == "training: 1 of 9 steps, loss 1\n"  # said once


def test_plain_lines_say_how_long_it_takes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every five seconds of the clock, by the speed since the first call: 6 steps in 60 s leave 90 of them 900 s."""
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    meter = Meter("training", 100, "steps")
    for done in range(4, 11):
        meter.at(done, "loss 1.000")
        clock[0] += 10
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "training: 5 of 100 steps, loss 1.000, 16 minutes left" and len(lines) == 6
    assert lines[-1] == "training: 10 of 100 steps, loss 1.000, 15 minutes left"


def test_a_terminal_gets_a_bar_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as screen, os.fdopen(theirs, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr("sys.stdout", terminal)
        monkeypatch.setenv("TERM", "xterm")
        with long_since(Meter("grinding [de]", 10, "sacks")) as meter:
            meter.at(3, "fine [/b]")
            meter.log("a stone broke")
            assert meter.bar is not None and meter.bar.tasks[0].completed == 3
        terminal.flush()
        shown = ""
        while select.select([screen], [], [], 0.2)[0]:
            shown += screen.read(65536).decode()
    assert "0/10" not in shown
    for part in ("grinding [de] (sacks)", "3/10", "fine [/b]", "a stone broke\r\n"):
        assert part in shown
    assert shown.rstrip().endswith("\x1b[2K")  # the bar's line is cleared


def test_two_columns_fit_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    lines = listed({"grind SACKS": "turns grain into flour", "temperature NUMBER": "sets it"}).splitlines()
    assert lines == [
        "  grind SACKS      turns grain into",
        "                   flour",
        "  temperature NUMBER",
        "                   sets it",
    ]


def test_lines_of_a_windows_text_are_shown_as_lines_also_where_a_piece_ends_within_their_ends() -> None:
    assert [printable(piece) for piece in ("one\r\ntwo\r", "\nthree\x1b[2J")] == ["one\ntwo", "\nthree\ufffd[2J"]
