"""Processes that answer lines of JSON with lines of JSON: their client in a test, and how one begins and forks."""

import json
import multiprocessing
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


class LineServer:
    """The client; use it in a `with` block. arguments: of the program."""

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path = ROOT,
        env: dict[str, str] = ENVIRONMENT,
        program: str = sys.executable,
    ) -> None:
        pipe = subprocess.PIPE
        how: dict[str, Any] = {"stdin": pipe, "stdout": pipe, "encoding": "utf-8", "cwd": folder, "env": env}
        self.process = subprocess.Popen([program, *arguments], **how)

    def ask(self, request: Any, gone: Any) -> Any:
        """The answer to a request; `gone` if the process ends without one."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        return json.loads(line) if line else gone

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(timeout=120)
        self.process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def forked(child: Callable[[], int], output: Path | None = None) -> int:
    """The id of a process that ends with what `child` returns. output: the file to which it writes what it prints."""
    if pid := os.fork():
        return pid
    status = 99
    try:
        if output is not None:
            file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(file, 1)
            os.dup2(file, 2)
        status = child()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def status_of(arguments: list[str]) -> int:
    """The exit status of a command of `quern`, also of one that raises SystemExit."""
    from quern.cli import main

    try:
        return main.main(arguments)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1


def end_with_parent() -> None:
    """Ends this process, which is one of a pool, as soon as its parent is gone: nobody else would."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run_first(command: Callable[[str], int], name: str) -> None:
    """Runs a command in this process, which it leaves without other threads: forks would not have them.

    command: takes the run's name. A child runs it before, under another one, and prepares the text: the library that
    trains tokenizers keeps threads, for which forks of this process would wait forever.
    """
    answers = os.dup(1)
    os.dup2(2, 1)
    pid = forked(lambda: command(f"{name}-text"))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert command(name) == 0
    sys.stdout.flush()
    os.dup2(answers, 1)
    os.close(answers)
    for thread in set(threading.enumerate()) - {threading.main_thread()}:
        thread.join(20)  # that of the signals ends soon after the command
    assert threading.active_count() == 1, threading.enumerate()
