"""One guest process and the host's side of its protocol: open files and limits go in, a verdict comes out.

Texts and output are memory files, whose size RLIMIT_FSIZE bounds, so that no pipe can fill up and block the host.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from math import ceil
from typing import Any, NamedTuple

from quern.generate.sandbox.program import Limits, Outcome, Program, Reason, SandboxError
from quern.generate.sandbox.tiers import ENVIRONMENT

PATIENCE = 60.0
"""Seconds for the guest to start, or to end a program."""
MOST_VERDICT = 1 << 20

PROBE = Program(
    """
import os, socket, threading, time
def start_threads():
    threading.stack_size(1 << 16)
    for _ in range(MOST + 1):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
doors = {
    "process": lambda: os.fork() or os._exit(0),
    "socket": socket.socket,
    "signal": lambda: os.kill(os.getppid(), 0),
    "file": lambda: open("/etc/passwd"),
    "new file": lambda: os.open("/", os.O_TMPFILE | os.O_WRONLY),
    "/proc": lambda: os.listdir("/proc"),
    "threads": start_threads,
}
def is_open(door):
    try:
        doors[door]()
        return True
    except (OSError, RuntimeError):
        return False
def open_doors():
    return [door for door in doors if is_open(door)]
""".replace("MOST", str(Limits.threads)),
    "doors = program.open_doors()\nassert not doors, doors",
)
"""A program that finds every door closed in a sandbox that works."""


class _Ended(NamedTuple):
    """The end of the program's process or of the check's. code: None if it still ran, negative for a signal."""

    code: int | None
    cpu_seconds: float


class Worker:
    """A guest, which runs one program at a time.

    The guest dies with the thread that makes the worker.

    Raises:
        SandboxError: The guest does not start, or what it runs is not confined.
    """

    def __init__(self, tier: str, command: Callable[[], list[str]]) -> None:
        self.tier, self._command = tier, command
        self._start()

    def _start(self) -> None:
        command = self._command()
        self._resources = ExitStack()
        self._host, guest = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._host.settimeout(PATIENCE)
        self._resources.callback(self._host.close)
        self._errors = self._resources.enter_context(_memory_file())
        with guest:
            process = subprocess.Popen(
                command,
                stdin=guest.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env=ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )
        self._resources.callback(process.wait)
        self._resources.callback(process.kill)
        try:
            self._probe()
        except BaseException:
            self.close()
            raise

    def _probe(self) -> None:
        try:
            if self._host.recv(16) != b"ready":
                raise ConnectionError
            outcome = self._attempt(PROBE, Limits())
        except OSError:
            raise SandboxError(self._last_error()) from None
        if not outcome.passed:
            raise SandboxError(
                f"a program is not confined: {' '.join(outcome.stderr.splitlines()[-1:]) or outcome.reason}"
            )

    def _last_error(self) -> str:
        lines = os.pread(self._errors, 1 << 20, 0).decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "the guest does not answer"

    def close(self) -> None:
        """Kills the guest and all that runs in it."""
        self._resources.close()

    def run(self, program: Program, limits: Limits) -> Outcome:
        """Runs a program. A guest that is lost is started again, once for each program.

        Raises:
            SandboxError: The guest does not confine programs, or does not start again.
        """
        for _ in range(2):
            try:
                return self._attempt(program, limits)
            except OSError:
                self.close()
                self._start()
        return Outcome(False, "killed", "", "the sandbox's process ended", 0.0, self.tier)

    def _attempt(self, program: Program, limits: Limits) -> Outcome:
        end = secrets.token_hex(16)
        with ExitStack() as stack:
            source, check, stdout, stderr = (stack.enter_context(_memory_file()) for _ in range(4))
            os.write(source, json.dumps({"source": program.source, "end": end}).encode())
            os.write(check, json.dumps({"check": program.check, "end": end}).encode())
            reader, writer = os.pipe()
            stack.callback(os.close, reader)
            started = time.monotonic()
            try:
                order = json.dumps(asdict(limits)).encode()
                socket.send_fds(self._host, [order], [source, stdout, stderr, check, writer])
            finally:
                os.close(writer)
            data, in_time = _read(reader, started + limits.seconds)
            seconds = time.monotonic() - started
            confined, _, verdict = data.partition(b"\n")
            found = json.loads(verdict) if verdict.endswith(b"}") and in_time else None
            ended = self._end("gone" if found and found["reason"] == "gone" else "end")
            if in_time and confined != b"confined":
                raise SandboxError(f"the sandbox failed: {self._last_error()}")
            most = limits.output_kilobytes * 1024
            printed = max(os.fstat(file).st_size for file in (stdout, stderr))
            texts = [os.pread(file, most, 0).decode(errors="replace") for file in (stdout, stderr)]
        reason = "output" if printed > most else _reason(found, ended, limits, in_time)
        texts[1] += found["text"] if found else ""
        return Outcome(reason == "passed", reason, texts[0], texts[1], seconds, self.tier)

    def _end(self, word: str) -> list[_Ended]:
        """Ends the processes of the program and of the check. `word`: see `guest/zygote.py`."""
        self._host.send(word.encode())
        answer = self._host.recv(1 << 16)
        if not answer:
            raise ConnectionError("the guest ended")
        return [_Ended(**status) for status in json.loads(answer)]


def _reason(found: dict[str, Any] | None, ended: list[_Ended], limits: Limits, in_time: bool) -> Reason:
    if found and found["reason"] != "gone":
        return found["reason"]
    program, check = ended
    spent = max(program.cpu_seconds, check.cpu_seconds) >= ceil(limits.cpu_seconds)
    if not in_time or spent or -signal.SIGXCPU in (program.code, check.code):
        return "timeout"
    if found is None:  # the check's process ended without a verdict
        return "failed"
    if program.code is None:  # it closed its files, and runs on
        return "exception"
    return "killed" if program.code < 0 else "exit"


@contextmanager
def _memory_file() -> Iterator[int]:
    file = os.memfd_create("sandbox")
    try:
        yield file
    finally:
        os.close(file)


def _read(reader: int, deadline: float) -> tuple[bytes, bool]:
    """Reads a pipe to its end. Returns what came until the deadline, and whether the end did."""
    poll, data = select.poll(), b""
    poll.register(reader, select.POLLIN)
    while (left := deadline - time.monotonic()) > 0 and len(data) < MOST_VERDICT:
        if poll.poll(1000 * left):
            part = os.read(reader, 1 << 16)
            if not part:
                return data, True
            data += part
    return data, False
