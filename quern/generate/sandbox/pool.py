"""The sandbox's data, and the host's side: guest processes, each of which runs one program at a time, and their pool.

Open files and limits go to a guest, a verdict comes back. Texts and output are memory files, whose size RLIMIT_FSIZE
bounds, so that no pipe can fill up and block the host.

There are two tiers of confinement, the best first. "bubblewrap": namespaces by bwrap
(https://github.com/containers/bubblewrap), and in each program seccomp and rlimits. "landlock": Landlock, seccomp and
rlimits by system calls alone. `guest/confine.py` has the part inside.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, fields
from math import ceil
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, Any, Literal

from annotated_types import Interval

from quern.field_types import Amount, Few, annotations_of, refuse_outside

Reason = Literal["passed", "failed", "exception", "exit", "timeout", "memory", "output", "killed"]


class SandboxError(RuntimeError):
    """No tier works on this machine, or the sandbox itself failed. The message says what to do."""


@dataclass(frozen=True)
class Program:
    """A program, and the check that decides whether it passes.

    The check runs in another process than the program (docs/sandbox.md). There, `program.name(arguments)` calls the
    program's function `name`. Arguments and results cross as plain data: None, numbers, strings, bytes, and lists,
    tuples, sets and dictionaries of these. An exception of the function is raised in the check.
    """

    source: str
    """Python source. Nobody needs to trust it."""
    check: str = ""
    """Python source that raises an exception if the program is wrong: `assert program.add(1, 2) == 3`. An empty check
    accepts every program that reaches its end, by the program's own word."""


@dataclass(frozen=True)
class Limits:
    """Limits of each program, and in its own process of the check. Raises ValueError for one outside its range."""

    seconds: Amount = 10.0
    """Wall clock, from the order to the verdict."""
    cpu_seconds: Amount = 5.0
    """CPU time, rounded up to whole seconds."""
    memory_megabytes: Annotated[int, Interval(ge=32, le=10**6)] = 512
    """Address space, of which the interpreter has about 30 MB and each thread 8 MB or more."""
    file_megabytes: Annotated[int, Interval(ge=1, le=1000)] = 16
    """The largest file, and the size of the program's own /tmp."""
    output_kilobytes: Annotated[int, Interval(ge=1, le=1000)] = 64
    """The most that a program may print to each of stdout and stderr."""
    threads: Annotated[int, Interval(ge=0, le=1000)] = 16
    """Threads, besides the first. A program cannot start processes."""

    def __post_init__(self) -> None:
        for field in fields(self):
            refuse_outside(annotations_of(Limits)[field.name], getattr(self, field.name), field.name)


@dataclass(frozen=True)
class Outcome:
    """The result of one program."""

    passed: bool
    """The program ran to its end without an exception, and its check raised none."""
    reason: Reason
    """"passed"; "failed": the check raised an exception of its own; "exception": the program raised one; "exit": the
    program ended itself before its end; "timeout": too much wall clock or CPU time; "memory"; "output": it printed too
    much; "killed": a signal ended it."""
    stdout: str
    """The program's output, cut at the limit. The check's is discarded."""
    stderr: str
    """The program's output, then the traceback of the program or of its check."""
    seconds: float
    """Wall clock."""
    tier: str
    """The tier that confined the program."""


GUEST = Path(__file__).parent / "guest"
PYTHON = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
ENVIRONMENT = {"PYTHONHASHSEED": "0"}
"""The environment of the guest, and none of its programs: with it, sets have the same order in every run."""
HOW = "install bubblewrap (Debian: apt install bubblewrap), on Linux 5.13 or later; root without capabilities cannot"
START = """
import os, sys
os.environ.clear()
sys.path.append(sys.argv[1])
from guest.zygote import main
main(*sys.argv[2:])
"""


def libraries() -> list[str]:
    """The folders that Python reads: its standard library and the system's shared libraries."""
    prefix = Path(sys.base_prefix)
    system = "/usr/lib /usr/lib64 /lib /lib64 /usr/share/zoneinfo"
    folders = (prefix / "lib", prefix / "lib64", *map(Path, system.split()))
    return sorted({str(folder) for folder in folders if folder.is_dir()})


def _python(tier: str, path: str) -> list[str]:
    """The command of the guest, whose package `guest` is in the folder `path`."""
    return [str(PYTHON), *"-s -S -P -B -u -X utf8 -c".split(), START, path, tier, json.dumps(libraries())]


def bubblewrap() -> list[str]:
    """The command of the tier "bubblewrap". Raises SandboxError if bwrap is not installed."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxError("bwrap is not installed")
    command = [bwrap, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    command += ["--die-with-parent", "--new-session", "--hostname", "sandbox"]
    # The guest mounts each program's /tmp. Root needs no user namespace for that; each program then gets its own.
    command += ["--cap-add", "CAP_SYS_ADMIN", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    command += [] if os.geteuid() == 0 else ["--unshare-user"]
    bound = {path: path for path in (*libraries(), str(PYTHON))} | {"/sandbox/guest": str(GUEST)}
    for parent in sorted({parent for path in (*bound, "/dev/null") for parent in Path(path).parents}):
        command += ["--perms", "0755", "--dir", str(parent)]  # by itself, bwrap makes them for root alone
    for path, source in bound.items():
        command += ["--ro-bind", source, path]
    # Not /dev/urandom, which would be writable: os.urandom is a system call.
    command += ["--dev-bind", "/dev/null", "/dev/null", "--tmpfs", "/tmp"]
    return [*command, "--remount-ro", "/", "--chdir", "/", "--", *_python("bubblewrap", "/sandbox")]


TIERS: dict[str, Callable[[], list[str]]] = {
    "bubblewrap": bubblewrap,
    "landlock": lambda: _python("landlock", str(GUEST.parent)),  # the guest finds out whether the kernel has it
}


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


class Sandbox(AbstractContextManager["Sandbox"]):
    """Runs untrusted Python programs, each in processes of its own that share nothing with another program.

    A context manager: leaving it ends all processes. tier: "bubblewrap" or "landlock"; None takes the first that works.

    Raises:
        SandboxError: No tier works. The message says why, and what to install.
        ValueError: A number of workers outside its range, or an unknown tier.
    """

    def __init__(self, workers: int = 2, limits: Limits | None = None, tier: str | None = None) -> None:
        refuse_outside(Few, workers, "workers")
        if tier not in (None, *TIERS):
            raise ValueError(f"the sandbox has no tier '{tier}': use {', '.join(TIERS)}")
        if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
            here = f"{sys.platform} {platform.machine()}"  # the guest has no system call numbers for it
            raise SandboxError(f"the sandbox runs on Linux, x86_64 or aarch64, not on {here}")
        self.limits = limits or Limits()
        # A guest of bubblewrap dies with the thread that starts it, and these threads live as long as the sandbox.
        self._threads = ThreadPoolExecutor(workers, "sandbox")
        self._idle: SimpleQueue[Worker] = SimpleQueue()
        self._workers: list[Worker] = []
        try:
            self.tier = self._first_that_works([tier] if tier else list(TIERS))
            for worker in self._threads.map(Worker, [self.tier] * (workers - 1)):
                self._add(worker)
        except BaseException:
            self.close()
            raise

    def _first_that_works(self, tiers: list[str]) -> str:
        reasons = []
        for tier in tiers:
            try:
                self._add(self._threads.submit(Worker, tier).result())
                return tier
            except SandboxError as error:
                reasons.append(f"{tier}: {error}")
        raise SandboxError(f"no sandbox works on this machine ({'; '.join(reasons)}): {HOW}")

    def _add(self, worker: Worker) -> None:
        self._workers.append(worker)
        self._idle.put(worker)

    def run(self, programs: Iterable[str | Program]) -> list[Outcome]:
        """Outcomes of programs; a string is a `Program` without a check. Raises SandboxError if the sandbox fails."""
        return list(self._threads.map(self._run_one, programs))

    def _run_one(self, program: str | Program) -> Outcome:
        worker = self._idle.get()
        try:
            return worker.run(Program(program) if isinstance(program, str) else program, self.limits)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Ends all processes."""
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.close()

    def __exit__(self, *_: object) -> None:
        self.close()


class Worker:
    """A guest, which dies with the thread that makes the worker; under landlock, with its socket. Raises SandboxError
    for one that does not confine."""

    def __init__(self, tier: str) -> None:
        self.tier = tier
        self._start()

    def _start(self) -> None:
        command = TIERS[self.tier]()
        with ExitStack() as started:
            self._host, guest = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            started.enter_context(self._host).settimeout(PATIENCE)
            self._errors = _memory_file(started)
            how: Any = {"stdout": subprocess.DEVNULL, "env": ENVIRONMENT, "cwd": "/", "start_new_session": True}
            try:
                with guest:
                    process = subprocess.Popen(command, stdin=guest.fileno(), stderr=self._errors, **how)
            except OSError as error:
                raise SandboxError(f"{error.filename or command[0]}: {error.strerror}") from error
            started.callback(process.wait)
            started.callback(process.kill)
            self._probe()
            self._resources = started.pop_all()

    def _probe(self) -> None:
        try:
            if self._host.recv(16) != b"ready":
                raise ConnectionError
            outcome = self._attempt(PROBE, Limits())
        except OSError:
            raise SandboxError(self._last_error()) from None
        if not outcome.passed:
            why = " ".join(outcome.stderr.splitlines()[-1:]) or outcome.reason
            raise SandboxError(f"a program is not confined: {why}")

    def _last_error(self) -> str:
        lines = os.pread(self._errors, 1 << 20, 0).decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "the guest does not answer"

    def close(self) -> None:
        """Kills the guest and all that runs in it."""
        self._resources.close()

    def run(self, program: Program, limits: Limits) -> Outcome:
        """Runs a program, and once more if the guest is lost. A lost guest is started again. Raises SandboxError if it
        cannot."""
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
            source, check, stdout, stderr = (_memory_file(stack) for _ in range(4))
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

    def _end(self, word: str) -> Any:
        """Ends the processes of the program and of the check. Word and answer: see `guest/zygote.py`."""
        self._host.send(word.encode())
        answer = self._host.recv(1 << 16)
        if not answer:
            raise ConnectionError("the guest ended")
        return json.loads(answer)


def _reason(found: dict[str, Any] | None, ended: Any, limits: Limits, in_time: bool) -> Reason:
    if found and found["reason"] != "gone":
        return found["reason"]
    (code, cpu_seconds), (check_code, check_cpu_seconds) = ended
    spent = max(cpu_seconds, check_cpu_seconds) >= ceil(limits.cpu_seconds)
    if not in_time or spent or -signal.SIGXCPU in (code, check_code):
        return "timeout"
    if found is None:  # the check's process ended without a verdict
        return "failed"
    if code is None:  # it closed its files, and runs on
        return "exception"
    return "killed" if code < 0 else "exit"


def _memory_file(stack: ExitStack) -> int:
    """A file that is closed with the stack."""
    file = os.memfd_create("sandbox")
    stack.callback(os.close, file)
    return file


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
