"""Child processes: orders, requests, answers, and what the parent learns of a child that fails."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from quern.process import Child, start, together

ECHO = """
import os, sys
from quern.process import serve

def answers(order, requests):
    print("noise")  # must not mix with the answers
    yield {"order": order, "torch": "torch" in sys.modules}
    for request in requests:
        if request == "die":
            print("first\\nlast words", file=sys.stderr, flush=True)
            os._exit(3)
        yield {"twice": 2 * request, "variable": os.environ["COLOUR"]}

serve(answers)
"""

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
        assert child.answer() == {"order": {"a": [1, None]}, "torch": False}
        yield child


def echoing(folder: Path) -> AbstractContextManager[Child]:
    return start("echo_child", "echo", {"a": [1, None]}, {"PYTHONPATH": str(folder), "COLOUR": "grün"})


def test_a_child_answers_each_request(echo: Child) -> None:
    assert echo.ask(4) == {"twice": 8, "variable": "grün"}
    echo.send(5)
    echo.send("é")
    assert [echo.answer()["twice"] for _ in range(2)] == [10, "éé"]
    echo.close()
    assert echo.process.wait(timeout=30) == 0


def test_an_error_in_the_child_is_one_error_in_the_parent(echo: Child) -> None:
    with pytest.raises(RuntimeError, match=r"^the echo process failed: TypeError: unsupported operand"):
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


TOGETHER = """
import signal, sys, threading
from quern.process import prompt_signals, together

def work(number):
    print("begun", flush=True)
    threading.Event().wait()

with prompt_signals({signal.SIGINT: lambda number: SystemExit(9)}):
    together(2, work)
"""


def test_work_that_is_done_together_ends_with_an_interrupt_of_the_main_thread() -> None:
    with subprocess.Popen([sys.executable, "-c", TOGETHER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and [process.stdout.readline() for _ in range(2)] == ["begun\n"] * 2
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(timeout=20) == 9
        finally:
            process.kill()


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
