"""Several server processes behind one port, where the kernel gives each connection to one of them (SO_REUSEPORT).

`quern serve … --replicas 2` becomes the parent of the replicas. Each replica runs the same command and reads its place
from the environment, as the ranks of a training do (train/launch.py). The parent starts a replica again when it dies.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

import torch

from quern.machine import Machine, worker_variables
from quern.process import end_with_parent, environment, waiting
from quern.serve.server import DRAIN_SECONDS, Place, address, ended_by_signals, listen

PLACE = "QUERN_REPLICA"
"""Variable: the fields of a replica's `Place`."""
LOOK_SECONDS, RESTART_SECONDS = 0.2, 1.0


def join() -> Place | None:
    """Returns the place that a parent gave to this process; None if there is none. The process ends with the parent."""
    given = environment().get(PLACE)
    if given is None:
        return None
    number, port, own_port, threads, descriptor = map(int, given.split())
    link = socket.socket(fileno=descriptor)
    threading.Thread(target=end_with_parent, args=(link.makefile("rb"),), daemon=True).start()
    return Place(number, port, own_port, threads, link)


class Replica:
    """One replica, seen from its parent. start: starts its process with a place whose link is given."""

    def __init__(self, number: int, start: Callable[[int, int], subprocess.Popen[bytes]]) -> None:
        self.number, self._start, self._was_ready = number, start, False
        self._begin()

    def _begin(self) -> None:
        self.ready, (self._link, theirs) = False, socket.socketpair()
        self._link.setblocking(False)
        with theirs:
            self.process = self._start(self.number, theirs.fileno())

    def look(self, log: Callable[[str], None]) -> None:
        """Notes that it is ready, and starts it again after its death. Raises RuntimeError if it was never ready."""
        with contextlib.suppress(OSError):  # nothing was sent, or the link is closed
            self.ready |= self._link.recv(1) == b"."
        self._was_ready |= self.ready
        code = self.process.poll()
        if code is None:
            return
        if not self._was_ready:
            raise RuntimeError(f"replica {self.number} did not start: it ended with code {code}")
        log(f"replica {self.number} ended with code {code}; it is started again")
        self._link.close()
        time.sleep(RESTART_SECONDS)
        self._begin()

    def stop(self) -> None:
        """Asks the process to end after its replies. Before it is ready, it writes none, and is killed."""
        self._link.close()
        if not self.ready:
            self.process.kill()


def run(
    command: Sequence[str], count: int, scheme: str, host: str, port: int, machine: Machine, log: Callable[[str], None]
) -> None:
    """Runs replicas until a signal; SIGTERM and SIGINT let the replies that have begun end.

    command: starts a replica, which `join`s. Each has a port of its own, `port` + 1 + its number, and on GPUs a GPU.
    scheme: http or https.

    Raises OSError for a taken port, RuntimeError for a replica that did not start, ValueError for too few GPUs and
    without Linux.
    """
    if sys.platform != "linux":
        raise ValueError("--replicas needs Linux, which spreads the connections: start servers behind a proxy instead")
    if machine.device.type == "cuda" and count > torch.cuda.device_count():
        raise ValueError(f"--replicas {count} needs as many GPUs, and there are {torch.cuda.device_count()}")
    variables, replicas, stopping = worker_variables(machine), list[Replica](), threading.Event()

    def start(number: int, link: int) -> subprocess.Popen[bytes]:
        given = number, shared, port and port + 1 + number, max(1, machine.threads // count), link
        env = {**environment(), **variables(number), PLACE: " ".join(map(str, given))}
        # In a process group of its own: a Ctrl-C in the terminal is for the parent.
        return subprocess.Popen(command, env=env, pass_fds=(link,), process_group=0)

    def look() -> None:
        for one in replicas:
            one.look(log)

    with listen(host, port, shared=True) as reserved:
        shared = reserved.getsockname()[1]
        for number in range(count if port else 0):
            listen(host, port + 1 + number).close()
        try:
            replicas += [Replica(number, start) for number in range(count)]
            with waiting(lambda: f"the models of replicas {[o.number for o in replicas if not o.ready]}", log=log):
                while not all(one.ready for one in replicas):
                    time.sleep(LOOK_SECONDS)
                    look()
            log(f"serving with {count} replicas at {scheme}://{address(host, shared)}")
            with ended_by_signals(lambda *_: stopping.set()):
                while not stopping.wait(LOOK_SECONDS):
                    look()
        finally:
            for one in replicas:
                one.stop()
            for one in replicas:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    one.process.wait(DRAIN_SECONDS + 10)
                one.process.kill()
