"""The processes of replicas: started, started again when one dies, and stopped. What runs in them is in process.py."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quern import child
from quern.serve.server import DRAIN_SECONDS
from quern.terminal import counted
from quern.waits.waiting import waiting

LONGEST_PAUSE_SECONDS = 60.0
"""Before a replica that dies again and again is started again."""


@dataclass(eq=False)
class Replica:
    """One replica. path: its Unix socket; ready: it answers there; open, served: requests of the router."""

    number: int
    path: Path
    ready: bool = False
    open: int = 0
    served: int = 0


class Processes:
    """Keeps one process running for each replica.

    Args:
        replicas: The replicas.
        order: The order of a replica's process, from which process.py starts.
        variables: Environment variables of the process of a replica, by its number.
        log: Takes lines for the user.
    """

    def __init__(
        self,
        replicas: list[Replica],
        order: Callable[[Replica], Mapping[str, Any]],
        variables: Callable[[int], Mapping[str, str]],
        log: Callable[[str], None],
    ) -> None:
        self.replicas, self._order, self._variables, self._log = replicas, order, variables, log
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._running: dict[int, child.Child] = {}
        self._failure: RuntimeError | None = None
        self._threads = [threading.Thread(target=self._keep, args=(one,), daemon=True) for one in replicas]

    def start(self) -> None:
        """Returns when every replica is ready. Raises RuntimeError with the error of one that does not start."""
        for thread in self._threads:
            thread.start()
        with self._changed, waiting(self._absent, log=self._log):
            self._changed.wait_for(lambda: self._failure or all(one.ready for one in self.replicas))
            if self._failure:
                raise self._failure

    def _absent(self) -> str:
        absent = [one.number for one in self.replicas if not one.ready]
        return f"the models of {counted(len(absent), 'replica')} ({', '.join(map(str, absent))})"

    def stop(self) -> None:
        """Lets every replica end the replies that are being written, and waits for the processes' ends."""
        with self._changed:
            self._stopping.set()
            for number, process in self._running.items():
                process.close()
                if not self.replicas[number].ready:  # it writes no reply, and may import for seconds before it listens
                    process.process.kill()
        for thread in self._threads:
            thread.join(DRAIN_SECONDS + 10)

    def _keep(self, replica: Replica) -> None:
        """Runs a replica's process, and another one after its death. In a thread of its own."""
        was_ready, pause = False, 1.0
        while not self._stopping.is_set():
            try:
                self._run(replica)
            except RuntimeError as error:  # the process has ended
                if self._stopping.is_set():
                    return
                was_ready, pause = was_ready or replica.ready, 1.0 if replica.ready else pause
                with self._changed:
                    replica.ready = False
                    if not was_ready:
                        self._failure = error
                        self._changed.notify_all()
                        return
                self._log(f"{error}; it is started again in {pause:g} s")
                self._stopping.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _run(self, replica: Replica) -> None:
        name = f"replica {replica.number}"
        order, variables = self._order(replica), self._variables(replica.number)
        with child.start("quern.serve.replicas.process", name, order, variables) as process:
            with self._changed:
                self._running[replica.number] = process
                if self._stopping.is_set():
                    process.close()
            while True:
                answer = process.answer()
                if "log" in answer:
                    self._log(f"{name}: {answer['log']}")
                    continue
                with self._changed:
                    replica.ready = True
                    self._changed.notify_all()
