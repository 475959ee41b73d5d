"""This process: its environment and children, its waits, its end soon after a signal, and its memory.

Only this file reads the environment. A child gets one JSON order and answers with JSON lines: the parent calls `start`;
the child's module calls `serve`, or `orders` and `replying`.

Python runs a signal's handler only between its own instructions. A process that waits in native code (a rank that
connects, a collective, a compiler) would ignore the signal for as long as it waits. So a thread reads the signals
beside the main thread (`signal.set_wakeup_fd`), and ends the process when no handler ran in time.
"""

from __future__ import annotations

import atexit
import gc
import json
import math
import os
import queue
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, Any

import quern

# OpenMP reads it when PyTorch is imported. A thread that has computed its part looks for more for a tenth of a
# millisecond, not for three: kernels follow each other sooner, and the cores are free for HTTP, clients and batches.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# Imports and compilation make millions of objects that stay. By default Python looks for cycles at every 700 more,
# which took a sixth of the time to the first step. Neither a training step nor a reply leaves a tensor in a cycle.
gc.set_threshold(10_000)
# At its end Python would look for cycles among all objects of PyTorch: a fifth of the time of a short command.
atexit.register(gc.freeze)

LAST_LINES = 5
INSTALLED = (f"{Path(quern.__file__).parent}{os.sep}", f"{sysconfig.get_path('stdlib')}{os.sep}", "<")
"""Folders of Python and of quern; packages are in site-packages or dist-packages."""


def environment() -> Mapping[str, str]:
    """Returns the process's environment. All other code reads it through this function."""
    return os.environ


def number_of(variable: str, default: int) -> int:
    """Returns a variable of the environment as an integer. Raises ValueError, which names the variable."""
    text = environment().get(variable, str(default))
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"the environment's variable {variable} is {text!r}: set an integer, or unset it") from None


def set_child_env(values: Mapping[str, str]) -> None:
    """Sets variables for the processes that this one will start, and for libraries that it imports later."""
    os.environ.update(values)


def own_place(error: BaseException) -> str:
    """Returns "FILE, line N: " for the last line of an error that is in a user's file, as an idea's; "" for none."""
    frames = [(one.filename, one.lineno) for one in traceback.extract_tb(error.__traceback__)]
    frames += [(error.filename or "<", error.lineno)] if isinstance(error, SyntaxError) else []
    others = ("-packages", "torchinductor")  # the compiler writes code into a folder of temporary files
    own = [one for one in frames if not one[0].startswith(INSTALLED) and not any(other in one[0] for other in others)]
    return "{}, line {}: ".format(*own[-1]) if own else ""


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
        answer = json.loads(line) if line.endswith("\n") else {"error": self._last_lines()}  # else killed within it
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
    module: str, name: str, order: Mapping[str, Any], variables: Mapping[str, str] | None = None
) -> Iterator[Child]:
    """Runs a module (`python -m`) as a child process for the length of the block.

    name: for error messages; order: JSON values for the child; variables: on top of this process's environment.
    """
    env = {**environment(), **(variables or {})}
    # The child must find this quern, installed or not.
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(quern.__file__).parents[1]), env.get("PYTHONPATH")]))
    command, pipe = [sys.executable, "-m", module], subprocess.PIPE
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, env=env, encoding="utf-8") as process,
    ):
        child = Child(name, process, errors)
        try:
            child.send(order)  # an argument may have 128 KiB, and an idea's file more
            yield child
        except BaseException:
            process.kill()
            raise
        finally:
            child.close()


@contextmanager
def replying() -> Iterator[Callable[[Any], None]]:
    """Yields, in a child, a function that sends one answer. An exception in the body is sent as {"error": …}."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # other output must not mix with the answers

    def reply(answer: Any) -> None:
        print(json.dumps(answer), file=replies, flush=True)

    try:
        yield reply
    except Exception as error:
        reply({"error": f"{own_place(error)}{type(error).__name__}: {error}"})
        sys.exit(1)


def orders() -> tuple[Any, Iterator[Any]]:
    """Returns a child's order, and an iterator of the requests that follow."""
    requests = map(json.loads, sys.stdin)
    return next(requests), requests


def end_with_parent(requests: Iterable[Any]) -> None:
    """Ends a child with SIGTERM when its parent closes its standard input, or dies; for a thread of the child."""
    for _ in requests:
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def while_parent_lives(requests: Iterable[Any]) -> Iterator[Any]:
    """A child's requests, none of them None. The process ends with its parent, at any moment."""
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=end_with_parent, args=(map(waiting.put, requests),), daemon=True).start()
    return iter(waiting.get, None)


UNAWAITED = "quern-unawaited"
"""The name of daemon threads that compute: where one is left, `quern` ends without Python's end, which may abort."""


def together(count: int, work: Callable[[int], None]) -> None:
    """Calls `work` with 0 … count - 1 at the same time, and waits. Raises the first error when all have ended.

    The threads end with the process: an exception in the main thread, such as KeyboardInterrupt, waits for none.
    """
    from concurrent.futures import Future, wait

    results = [Future[None]() for _ in range(count)]

    def run(number: int) -> None:
        try:
            results[number].set_result(work(number))
        except BaseException as error:
            results[number].set_exception(error)

    for number in range(count):
        threading.Thread(target=run, args=(number,), daemon=True).start()
    wait(results)
    for result in results:
        result.result()


def serve(answers: Callable[[dict[str, Any], Iterator[Any]], Iterator[dict[str, Any]]]) -> None:
    """Runs a child whose answers are a generator. answers: takes the order and an iterator of requests."""
    with replying() as reply:
        for answer in answers(*orders()):
            reply(answer)


SILENT_SECONDS = 2.0
"""Shorter waits say nothing."""


def to_stderr(line: str) -> None:
    with suppress(OSError):  # the reader may be gone
        sys.stderr.write(line + "\n")  # one write, because other ranks write there too
        sys.stderr.flush()


@contextmanager
def waiting(
    whom: str | Callable[[], str], seconds: float | None = None, log: Callable[[str], None] = to_stderr
) -> Iterator[Callable[[], None]]:
    """Says once what the body waits for and until when, if it takes longer than two seconds.

    Args:
        whom: For whom the body waits; a function is called in a thread.
        seconds: The body's own time limit, from its start or the last arrival; None for none.
        log: Takes the line.

    Yields:
        A function to call whenever something has arrived: the two seconds begin again, until the line is said.
    """
    ended, since = threading.Event(), [time.monotonic()]

    def watch() -> None:
        while not ended.wait(max(0.0, since[0] + SILENT_SECONDS - time.monotonic())):
            if time.monotonic() - since[0] >= SILENT_SECONDS:
                end = time.localtime(time.time() + (seconds or 0) - SILENT_SECONDS)
                limit = "" if seconds is None else f", until {time.strftime('%H:%M:%S', end)}"
                with suppress(OSError):  # the body's next line tells why
                    log(f"waiting for {whom if isinstance(whom, str) else whom()}{limit}")
                return

    threading.Thread(target=watch, name="waiting", daemon=True).start()
    try:
        yield lambda: since.__setitem__(0, time.monotonic())
    finally:
        ended.set()


HANDLER_SECONDS = 1.5
"""Seconds in which a handler must start."""
TOGETHER_SECONDS = 0.2
"""Python handles signals that arrive within this time together."""


@contextmanager
def prompt_signals(raised: Mapping[signal.Signals, Callable[[int], BaseException]]) -> Iterator[None]:
    """Signals raise an exception in the main thread. If it is blocked in native code, they end the process.

    A handler that the body installs instead decides for itself, and a signal that is ignored at the start stays so.
    Does nothing outside the main thread. raised: makes the exception from the signal's number.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    main, handled = threading.get_ident(), [-math.inf]

    def notice(number: int, frame: FrameType | None) -> None:
        handled[0] = time.monotonic()

    def handle(number: int, frame: FrameType | None) -> None:
        notice(number, frame)
        raise raised[signal.Signals(number)](number)

    def watch() -> None:
        for found in iter(partial(os.read, reader, 1), b""):
            which, since = signal.Signals(found[0]), time.monotonic()
            time.sleep(TOGETHER_SECONDS)  # in `input`, SIGURG beside a signal whose handler raises is a SystemError
            while signal.getsignal(which) is handle and handled[0] < since - TOGETHER_SECONDS:
                if time.monotonic() > since + HANDLER_SECONDS:
                    os.write(2, f"{which.name}: ended while it waited\n".encode())
                    os._exit(128 + which)
                # Ends a wait that the main thread began just after the signal had come: then handlers run.
                signal.pthread_kill(main, signal.SIGURG)
                time.sleep(0.05)
        os.close(reader)

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    heeded = [which for which in raised if signal.getsignal(which) != signal.SIG_IGN]
    before = {which: signal.signal(which, handle) for which in heeded}
    before[signal.SIGURG] = signal.signal(signal.SIGURG, notice)
    earlier = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=watch, name="signals", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(earlier)
        for which, handler in before.items():
            signal.signal(which, handler)
        os.close(writer)  # ends the thread


def resident(field: str = "VmRSS", process: str = "self") -> int | None:
    """Bytes of physical memory by a field of /proc/<process>/status; None where the system does not say."""
    with suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return None


def peak_resident() -> int:
    """Most bytes of physical memory that this process has held since `reset_peak_resident`, or since it began."""
    found = resident("VmHWM")  # on Linux getrusage never reports less than the parent held at the start
    if found is not None:
        return found
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, others kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_resident() -> bool:
    """Begins the peak of this process again (man 5 proc). Returns whether the system can."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        return True
    return False
