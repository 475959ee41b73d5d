"""Child processes, and the environment that they inherit. A child gets one JSON order and answers with JSON lines.

The parent calls `start`; the child's module calls `serve`, or `orders` and `replying`. Only this file reads the
environment. It does not import torch, because the JAX benchmark measures a process without it.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import quern

# OpenMP reads it when PyTorch is imported. A thread that has computed its part looks for more for a tenth of a
# millisecond, not for three: kernels follow each other sooner, and the cores are free for HTTP, clients and batches.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

LAST_LINES = 5


def environment() -> Mapping[str, str]:
    """Returns the process's environment. All other code reads it through this function."""
    return os.environ


def set_child_env(values: Mapping[str, str]) -> None:
    """Sets variables for the processes that this one will start."""
    os.environ.update(values)


class Child:
    """A running child process, seen from its parent."""

    def __init__(self, name: str, process: subprocess.Popen[str], errors: IO[str]) -> None:
        self.name, self.process, self.errors = name, process, errors

    def send(self, request: Any) -> None:
        assert self.process.stdin
        with suppress(BrokenPipeError):  # then the answer reports the failure
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Returns the next answer. Raises RuntimeError with the child's error, or with its last lines of stderr."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"error": self._last_lines()}
        if "error" in answer:
            raise RuntimeError(f"the {self.name} process failed: {answer['error']}")
        return answer

    def ask(self, request: Any) -> dict[str, Any]:
        self.send(request)
        return self.answer()

    def close(self) -> None:
        """Ends the child's requests, after which it exits."""
        assert self.process.stdin
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    def _last_lines(self) -> str:
        code = self.process.wait()
        self.errors.seek(0)
        return " | ".join([f"it ended with code {code}", *self.errors.read().strip().splitlines()[-LAST_LINES:]])


@contextmanager
def start(
    module: str,
    name: str,
    order: Mapping[str, Any],
    variables: Mapping[str, str] | None = None,
) -> Iterator[Child]:
    """Runs a module as a child process for the length of the block.

    Args:
        module: Module to run with `python -m`.
        name: The name of the process in error messages.
        order: JSON values for the child.
        variables: Environment variables on top of those of this process.
    """
    env = {**environment(), **(variables or {})}
    # The child must find this quern, installed or not.
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(quern.__file__).parents[1]), env.get("PYTHONPATH")]))
    command, pipe = [sys.executable, "-m", module, json.dumps(order)], subprocess.PIPE
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as errors,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, env=env, encoding="utf-8") as process,
    ):
        child = Child(name, process, errors)
        try:
            yield child
        except BaseException:
            process.kill()
            raise
        finally:
            child.close()


@contextmanager
def replying() -> Iterator[Callable[[Any], None]]:
    """In a child: yields a function that sends one answer.

    An exception in the block becomes an {"error": …} answer and exit code 1.
    """
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # other output must not mix with the answers

    def reply(answer: Any) -> None:
        print(json.dumps(answer), file=replies, flush=True)

    try:
        yield reply
    except Exception as error:
        reply({"error": f"{type(error).__name__}: {error}"})
        sys.exit(1)


def orders() -> tuple[Any, Iterator[Any]]:
    """In a child: returns its order, and an iterator of the requests that follow."""
    return json.loads(sys.argv[1]), map(json.loads, sys.stdin)


def end_with_parent(requests: Iterable[Any]) -> None:
    """In a thread of a child: ends the process with SIGTERM when its parent closes its standard input, or dies."""
    for _ in requests:
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def while_parent_lives(requests: Iterable[Any]) -> Iterator[Any]:
    """In a child: returns the requests, and ends the process when its parent ends, also during a computation.

    A thread reads the requests ahead. No request may be None.
    """
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=end_with_parent, args=(map(waiting.put, requests),), daemon=True).start()
    return iter(waiting.get, None)


def serve(answers: Callable[[dict[str, Any], Iterator[Any]], Iterator[dict[str, Any]]]) -> None:
    """Runs a child whose answers are a generator. answers: takes the order and an iterator of requests."""
    with replying() as reply:
        for answer in answers(*orders()):
            reply(answer)
