"""The zygote: a warm Python that forks two processes for each order, and ends both.

It reads orders (limits, and open files) and never a program or a check, so no process that it forks later finds
anything of an earlier one in its memory. Programs cannot start processes, so nothing is left when both have ended.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from . import confine
from .checker import verdict
from .program import Channel, encode, run_program

PRELOADED = """abc array ast base64 bisect calendar cmath collections contextlib copy dataclasses datetime decimal enum
fractions functools hashlib heapq io itertools json math numbers operator random re statistics string struct textwrap
threading time traceback types typing unittest uuid"""
"""Modules that programs often import: a fork has them already."""
CONFINED = "confined"
"""The first message of each process. Without it, the host reports that the sandbox failed."""
DYING = 2.0
"""Seconds that a process may take to end after it closed its files."""
_ABOVE = 32  # higher than the numbers of the zygote's files


def main(tier: str, readable: str) -> None:
    """Runs orders until the host closes its end of stdin. readable: JSON list of the folders that programs may read."""
    sys.path.pop()
    for module in PRELOADED.split():
        importlib.import_module(module)
    host = socket.socket(fileno=os.dup(0))
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    ruleset = confine.landlock(json.loads(readable)) if tier == "landlock" else None
    host.send(b"ready")
    gc.collect()
    gc.freeze()  # a fork then copies fewer pages
    while True:
        order, files, _, _ = socket.recv_fds(host, 1 << 16, 5)
        if not order:
            return
        host.send(json.dumps(_run(json.loads(order), files, null, ruleset, host)).encode())


def _run(limits: dict[str, Any], files: list[int], null: int, ruleset: int | None, host: socket.socket):
    """Forks both processes, waits for the host's word, ends them, and returns how they ended.

    The word is "end", or "gone" if the program's process seems to end by itself.
    """
    source, stdout, stderr, check, result = files
    (call_reader, call_writer), (answer_reader, answer_writer) = os.pipe(), os.pipe()

    def program(text: Any) -> None:
        channel = Channel(3, 4)
        channel.write(encode(CONFINED))
        run_program(text["source"], text["end"], channel)

    def checker(text: Any) -> None:
        channel = Channel(4, 5)
        if channel.receive() == CONFINED:
            os.write(3, CONFINED.encode() + b"\n")
            os.write(3, json.dumps(verdict(text["check"], text["end"], channel)).encode())

    def start(role: Callable[[Any], None], text: int, *kept: int) -> int:
        if pid := os.fork():
            return pid
        try:
            confine.apply(ruleset, limits)
            _keep(*kept, text)
            order = os.pread(len(kept), os.fstat(len(kept)).st_size, 0)
            os.close(len(kept))
            role(json.loads(order))
        except EOFError:  # the other process ended first
            pass
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    pids = [
        start(program, source, null, stdout, stderr, call_reader, answer_writer),
        start(checker, check, null, null, null, result, answer_reader, call_writer),
    ]
    for file in (*files, call_reader, call_writer, answer_reader, answer_writer):
        os.close(file)
    gone = host.recv(16) == b"gone"
    return [_end(pid, DYING if gone else 0) for pid in pids]


def _keep(*files: int) -> None:
    """Gives these files the numbers 0, 1, … and closes all others."""
    for number, file in enumerate([fcntl.fcntl(file, fcntl.F_DUPFD, _ABOVE) for file in files]):
        os.dup2(file, number)
    os.closerange(len(files), confine.MOST_FILES)


def _end(pid: int, seconds: float) -> tuple[int | None, float]:
    """Kills a process. Returns its exit code, None if it still ran after some seconds; and its CPU seconds."""
    deadline = time.monotonic() + seconds
    while not (ended := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    return os.waitstatus_to_exitcode(status) if ended else None, usage.ru_utime + usage.ru_stime
