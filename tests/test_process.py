"""Child processes: orders, requests, answers, and what the parent learns of a child that fails. Every wait ends within
three seconds of SIGTERM or Ctrl-C, and has said for whom it waits and until when.

The waits are in tests/support/waits.py: each runs as a verb of the command line, in a process that gets the signal.
"""

import json
import os
import pty
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import quern
from quern.process import Child, own_place, peak_resident, start, together
from tests.support.line_server import ROOT

ECHO = """
import os, sys
from quern.process import serve

def answers(order, requests):
    print("noise")  # must not mix with the answers
    yield {"order": order, "torch": "torch" in sys.modules}
    for request in requests:
        if request == "die":
            os.write(2, b"caf\\xe9\\nfirst\\nlast words\\n")
            os.write(3, b'{"half": ')  # of an answer
            os._exit(3)
        yield {"twice": 2 * request, "variable": os.environ["COLOUR"]}

serve(answers)
"""


ORDER = {"a": [1, None], "source of an idea": "x" * 200_000}


def test_a_process_looks_for_no_garbage_at_its_end() -> None:
    """Among all that PyTorch made that takes a fifth of the time of a short command."""
    code = "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count())); import quern.process"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(done.stdout) > 1_000


BUSY = """
import time
from quern.process import orders, replying, while_parent_lives

with replying() as reply:
    _, requests = orders()
    for request in while_parent_lives(requests):
        reply({"got": request})
        time.sleep(request)
"""


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[Child]:
    (tmp_path / "echo_child.py").write_text(ECHO, encoding="utf-8")
    with echoing(tmp_path) as child:
        assert child.answer() == {"order": ORDER, "torch": False}
        yield child


def echoing(folder: Path) -> AbstractContextManager[Child]:
    return start("echo_child", "echo", ORDER, {"PYTHONPATH": str(folder), "COLOUR": "grün"})


def test_a_child_answers_each_request(echo: Child) -> None:
    assert echo.ask(4) == {"twice": 8, "variable": "grün"}
    echo.send(5)
    echo.send("é")
    assert [echo.answer()["twice"] for _ in range(2)] == [10, "éé"]
    echo.close()
    assert echo.process.wait(timeout=30) == 0


def test_an_error_in_the_child_is_one_error_in_the_parent(echo: Child) -> None:
    with pytest.raises(RuntimeError, match=r"^the echo process failed: /.*/echo_child.py, line 13: TypeError: unsu"):
        echo.ask({})
    assert echo.process.wait(timeout=30) == 1


def test_a_child_that_dies_is_an_error_and_not_a_wait(echo: Child) -> None:
    message = r"^the echo process failed: it ended with code 3 \| (.* \| )?first \| last words$"
    with pytest.raises(RuntimeError, match=message):
        echo.ask("die")
    with pytest.raises(RuntimeError, match=message):
        echo.ask(1)


def test_an_error_in_the_parent_ends_the_child(tmp_path: Path) -> None:
    (tmp_path / "echo_child.py").write_text(ECHO, encoding="utf-8")
    with pytest.raises(KeyError), echoing(tmp_path) as child:
        raise KeyError
    assert child.process.returncode == -signal.SIGKILL


def test_a_child_that_computes_ends_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "busy_child.py").write_text(BUSY, encoding="utf-8")
    with start("busy_child", "busy", {}, {"PYTHONPATH": str(tmp_path)}) as child:
        assert [child.ask(0), child.ask(600)] == [{"got": 0}, {"got": 600}]
        child.close()  # as the system does when the parent is killed
        assert child.process.wait(timeout=30) == -signal.SIGTERM


@pytest.mark.parametrize(("platform", "unit"), [("darwin", 1), ("freebsd14", 1024)])
def test_the_peak_of_memory_without_proc(monkeypatch: pytest.MonkeyPatch, platform: str, unit: int) -> None:
    """Oracle: man 2 getrusage, by which macOS counts bytes and others kilobytes."""
    monkeypatch.setattr("quern.process.Path", lambda path: Path("/nowhere"))
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=5_000_000))
    assert peak_resident() == 5_000_000 * unit


TOGETHER = """
import signal, threading, time
from quern.process import prompt_signals, together

def work(number):
    print("begun\\n", end="", flush=True)  # one write, between which no other thread comes
    if number == {sender}:
        time.sleep(0.2)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
    threading.Event().wait()

with prompt_signals({{signal.SIGINT: lambda number: SystemExit(9)}}):
    together(2, work)
"""


@pytest.mark.parametrize("sender", [None, 1], ids=["another process", "a thread"])
def test_work_that_is_done_together_ends_with_an_interrupt(sender: int | None) -> None:
    """A thread's signal does not wake the main thread, as one that comes just before that thread waits."""
    command = [sys.executable, "-c", TOGETHER.format(sender=sender)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout and [process.stdout.readline() for _ in range(2)] == ["begun\n"] * 2
            if sender is None:
                time.sleep(0.2)  # where a thread begins, Python itself may lose an exception
                process.send_signal(signal.SIGINT)
            assert process.wait(timeout=20) == 9
        finally:
            process.kill()


ONCE = """
import hashlib, os, signal, threading, time
from quern.process import prompt_signals
from quern.train.guard import Stop

raised = []
with prompt_signals({signal.SIGINT: lambda number: raised.append(number) or KeyboardInterrupt()}):
    with Stop():
        os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.3)
    assert not raised, "a signal that another handler took"
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        end = time.monotonic() + 0.6
        while time.monotonic() < end:  # native code, during which no handler runs
            hashlib.pbkdf2_hmac("sha256", b"", b"", 400_000)
    except KeyboardInterrupt:
        time.sleep(1)
    assert len(raised) == 1
"""


def test_a_signal_is_raised_once_and_not_after_another_handler_took_it() -> None:
    run = subprocess.run([sys.executable, "-c", ONCE], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr


PROMPTS = """
import os, readline, signal, threading
from quern.process import prompt_signals

with prompt_signals({signal.SIGINT: lambda number: KeyboardInterrupt()}):
    for _ in range(8):
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            input()
        except KeyboardInterrupt:
            pass
"""


def test_a_signal_at_the_prompt_of_a_terminal_raises_its_own_exception() -> None:
    """Python's `input` calls handlers also while an exception is set: one of a second signal is a SystemError."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", PROMPTS]
    run = subprocess.run(command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, text=True, timeout=60)
    for file in (ours, theirs):
        os.close(file)
    assert run.returncode == 0, run.stderr


def test_an_error_of_work_that_is_done_together_waits_for_the_rest() -> None:
    seen: list[int] = []

    def work(number: int) -> None:
        if number == 0:
            raise ValueError("the first")
        time.sleep(0.05)
        seen.append(number)

    with pytest.raises(ValueError, match="the first"):
        together(3, work)
    assert sorted(seen) == [1, 2]


# Waits ------------------------------------------------------------------------------------------------------


LONGEST_SECONDS = 3.0
TIME = r"until \d\d:\d\d:\d\d"
WAITS = {
    "rank 0": rf"rank 1 of 2 at 127.0.0.1:\d+, {TIME}",
    "a store that does not answer": rf"rank 0 of 2 at 127.0.0.1:\d+, {TIME}",
    "rank 0's preparation": "rank 0, which prepares what all ranks read",
    "a collective": "a collective",
    "a lock": "process 7 on elsewhere, which writes to .*",
    "a silent server": rf"bytes of text.txt from 127.0.0.1:\d+, {TIME}",
    "a busy server": rf"127.0.0.1:\d+ before try 2 of 4 \(the server answers 503\), {TIME}",
    "machines": rf"the machines of --nodes 2 at 127.0.0.1:\d+, {TIME}",
    "processes of JAX": rf"2 processes at 127.0.0.1:\d+, {TIME}",
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    lines = json.dumps({wait: f"waiting for {line}" for wait, line in WAITS.items()})
    command = [sys.executable, str(ROOT / "tests/support/waits.py"), str(tmp_path_factory.mktemp("waits")), lines]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=120).stdout)


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_says_for_whom_and_ends_at_a_signal(ended: dict[str, Any], wait: str, which: signal.Signals) -> None:
    found = ended[f"{wait}/{which.name}"]
    assert re.search(f"^waiting for {WAITS[wait]}$", found["said"], re.M), found
    assert found["code"] in (-which, 128 + which), found
    assert found["seconds"] < LONGEST_SECONDS and "Traceback" not in found["said"], found


PACKAGE = Path(quern.__file__).parent


@pytest.mark.parametrize(
    ("caller", "raises", "told"),
    [
        ("/mine/idea.py", "/tmp/torchinductor_me/ab/cde.py", "/mine/idea.py, line 1: "),
        ("/mine/idea.py", f"{PACKAGE}/model/gpt.py", "/mine/idea.py, line 1: "),
        ("/mine/idea.py", "/usr/lib/python3/dist-packages/torch/nn.py", "/mine/idea.py, line 1: "),
        ("/mine/idea.py", f"{PACKAGE}_ideas/idea.py", f"{PACKAGE}_ideas/idea.py, line 1: "),
        (f"{PACKAGE}/cli/main.py", "<string>", ""),
    ],
)
def test_the_place_of_an_error_is_in_a_file_of_the_user(caller: str, raises: str, told: str) -> None:
    inner = compile("raise ValueError", raises, "exec")
    with pytest.raises(ValueError) as caught:
        exec(compile("exec(inner)", caller, "exec"), {"inner": inner})
    assert own_place(caught.value.with_traceback(caught.tb.tb_next)) == told
