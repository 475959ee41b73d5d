"""The guard's decisions against a plain restatement, and real signals sent to real processes."""

import itertools
import json
import os
import pty
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from quern.train.guard import EXIT_STOPPED, Guard, Stop
from quern.train.state import Counters
from tests.support.line_server import ENVIRONMENT

# Trains in steps that save when asked to stop; argv[1] is the folder, argv[2] what to do once stopped.
TRAINER = """
import hashlib, sys, time
from pathlib import Path
from quern.train.guard import EXIT_STOPPED, Stop
with Stop() as stop:
    for step in range(10_000):
        print(step, flush=True)
        print(step, file=sys.stderr, flush=True)
        time.sleep(0.02)
        if stop.requested:
            print("saving", flush=True)
            if sys.argv[2] == "hang":  # a native call that no Python handler can interrupt
                hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
            (Path(sys.argv[1]) / "saved").write_text(stop.signal.name)
            sys.exit(EXIT_STOPPED)
"""


def decisions(max_skips: int, finite: tuple[bool, ...]) -> list[str]:
    """An independent restatement: counts the steps in a row, up to this one, that were not finite."""
    result = []
    for last in range(len(finite)):
        run = len(list(itertools.takewhile(lambda good: not good, reversed(finite[: last + 1]))))
        result.append("step" if run == 0 else "skip" if run <= max_skips else "stop")
    return result


def test_guard_decides_as_restated_and_resumes_exactly_anywhere() -> None:
    for max_skips, finite in itertools.product(range(4), itertools.product((True, False), repeat=7)):
        whole = Guard(max_skips)
        assert [whole.observe(good) for good in finite] == decisions(max_skips, finite)
        assert whole.skips == finite.count(False)
        for cut in range(8):
            first, second = Guard(max_skips), Guard(max_skips)
            seen = [first.observe(good) for good in finite[:cut]]
            Counters(guard=second).count_from(json.loads(json.dumps(Counters(guard=first).meta())))
            assert seen + [second.observe(good) for good in finite[cut:]] == decisions(max_skips, finite)
            assert (second.skips, second.skips_in_row) == (whole.skips, whole.skips_in_row)


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_second_signal_ends_the_process_even_inside_a_native_call(second: signal.Signals, tmp_path: Path) -> None:
    command, pipe = [sys.executable, "-c", TRAINER, str(tmp_path), "hang"], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=ENVIRONMENT) as process:
        assert process.stdout is not None and process.stdout.readline() == "0\n"
        process.send_signal(signal.SIGTERM)
        while process.stdout.readline() != "saving\n":
            pass
        process.send_signal(second)
        process.communicate(timeout=20)
    assert process.returncode == -second
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("error", [False, True])
def test_handlers_are_put_back(error: bool) -> None:
    before = {which: signal.getsignal(which) for which in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    with suppress(KeyError), Stop() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested and stop.signal is signal.SIGTERM
        if error:
            raise KeyError
    assert {which: signal.getsignal(which) for which in before} == before


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGHUP])
def test_only_a_signal_that_counts_twice_says_so(which: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.signal(which, signal.SIG_DFL)  # nohup ignores SIGHUP
    try:
        with Stop():
            os.kill(os.getpid(), which)
    finally:
        signal.signal(which, before)
    said = capfd.readouterr().err
    assert "then exiting" in said and ("once more" in said) == (which == signal.SIGTERM)


def test_a_terminal_that_hangs_up_does_not_lose_the_save(tmp_path: Path) -> None:
    """Like a dropped remote session: the kernel sends SIGHUP, and writing to the terminal fails from then on."""
    terminal, ours = pty.openpty()
    process = subprocess.Popen(
        ["setsid", "--ctty", "--wait", sys.executable, "-c", TRAINER, str(tmp_path), "save"],
        stdin=ours,
        stdout=ours,
        stderr=ours,
        text=True,
        env=ENVIRONMENT,
    )
    os.close(ours)
    assert os.read(terminal, 1000)
    os.close(terminal)
    assert process.wait(timeout=30) == EXIT_STOPPED
    assert (tmp_path / "saved").read_text(encoding="utf-8") == "SIGHUP"
