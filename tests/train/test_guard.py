"""The guard's decisions against a plain restatement, and real signals sent to real processes."""

import itertools
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from quern.train.guard import EXIT_STOPPED, Guard, Stop

ROOT = Path(__file__).parents[2]

# Trains in steps that save when asked to stop; argv[1] is the folder, argv[2] what to do once stopped.
TRAINER = """
import hashlib, sys, time
from pathlib import Path
from quern.train.guard import EXIT_STOPPED, Stop
folder = Path(sys.argv[1])
with Stop() as stop:
    for step in range(10_000):
        if step == 1:
            print("ready", flush=True)
        (folder / "begun").write_text(str(step))
        time.sleep(0.02)
        (folder / "done").write_text(str(step))
        if sys.argv[2] == "chatty" and step > 1:
            print(step, flush=True)
            print(step, file=sys.stderr, flush=True)
        if stop.requested:
            print("saving", flush=True)
            if sys.argv[2] == "hang":  # a native call that no Python handler can interrupt
                hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
            (folder / "saved").write_text(stop.signal.name)
            sys.exit(EXIT_STOPPED)
"""


def start(folder: Path, then: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(folder), then],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


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
            second.load_state(json.loads(json.dumps(first.state())))
            assert seen + [second.observe(good) for good in finite[cut:]] == decisions(max_skips, finite)
            assert second.state() == whole.state()


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_finishes_the_step_saves_and_exits_75(which: signal.Signals, tmp_path: Path) -> None:
    process = start(tmp_path, "save")
    process.send_signal(which)
    output, errors = process.communicate(timeout=20)
    assert process.returncode == EXIT_STOPPED == 75
    assert (tmp_path / "saved").read_text(encoding="utf-8") == which.name
    begun, done = ((tmp_path / name).read_text(encoding="utf-8") for name in ("begun", "done"))
    assert begun == done, "the step under way was not finished"
    assert output == "saving\n"
    assert errors.count(which.name) == 1 and "once more exits at once" in errors


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_second_signal_ends_the_process_even_inside_a_native_call(second: signal.Signals, tmp_path: Path) -> None:
    process = start(tmp_path, "hang")
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None and process.stdout.readline() == "saving\n"
    process.send_signal(second)
    process.communicate(timeout=20)
    assert process.returncode == -second
    assert not (tmp_path / "saved").exists()


def test_signals_that_arrive_together_count_as_one() -> None:
    script = (
        "import os, signal\nfrom quern.train.guard import Stop\n"
        "with Stop() as stop:\n"
        "    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n    os.kill(os.getpid(), signal.SIGINT)\n"
        "    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})\n"
        "    print('saved' if stop.requested else 'not asked')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=20,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stdout) == (0, "saved\n")


def test_handlers_are_put_back_also_after_a_signal_and_an_error() -> None:
    before = {which: signal.getsignal(which) for which in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    with Stop() as stop:
        assert signal.getsignal(signal.SIGTERM) != before[signal.SIGTERM]
        assert not stop.requested
    assert {which: signal.getsignal(which) for which in before} == before
    with pytest.raises(KeyError), Stop() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested and stop.signal is signal.SIGTERM
        raise KeyError
    assert {which: signal.getsignal(which) for which in before} == before


def test_outside_the_main_thread_nothing_is_installed() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def work() -> None:
        with Stop() as stop:
            seen.append((signal.getsignal(signal.SIGTERM), stop.requested))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(before, False)]


def test_hang_ups_come_in_numbers_and_never_end_the_process() -> None:
    before = signal.getsignal(signal.SIGHUP)
    try:
        with Stop() as stop:
            for which in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
                os.kill(os.getpid(), which)
        assert stop.signal is signal.SIGHUP
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_closed_pipe_does_not_lose_the_save(tmp_path: Path) -> None:
    process = start(tmp_path, "chatty")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    process.stderr.close()
    time.sleep(0.2)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=30) == EXIT_STOPPED
    assert (tmp_path / "saved").read_text(encoding="utf-8") == "SIGHUP"


def test_a_terminal_that_hangs_up_does_not_lose_the_save(tmp_path: Path) -> None:
    """Like a dropped remote session: the kernel sends SIGHUP, and writing to the terminal fails from then on."""
    terminal, ours = pty.openpty()
    process = subprocess.Popen(
        ["setsid", "--ctty", "--wait", sys.executable, "-c", TRAINER, str(tmp_path), "chatty"],
        stdin=ours,
        stdout=ours,
        stderr=ours,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    os.close(ours)
    while b"ready" not in os.read(terminal, 1000):
        pass
    os.close(terminal)
    assert process.wait(timeout=30) == EXIT_STOPPED
    assert (tmp_path / "saved").read_text(encoding="utf-8") == "SIGHUP"
