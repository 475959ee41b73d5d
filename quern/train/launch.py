"""Several processes for one command: starts them with torch's elastic agent (torchrun), and joins them to a mesh.

`quern pretrain … --ranks 2` becomes the ranks' parent; each rank runs the same command, finds its place in the
environment, and joins. When a rank dies, the others end, and all start anew, up to `restarts` times; they go on from
the newest good checkpoint by themselves. An outcome that a restart would not change (done, stopped by a signal,
diverged, a recipe that is refused) travels in a file, because the agent takes every exit code but 0 for a failure. When
the parent dies, however it does, the ranks notice and end. On several machines the same command runs on each, and the
agents meet at one address (`--nodes`, `--rendezvous`).

The parent forwards signals to its ranks and leaves the agent running: the ranks of all machines stop after the same
step and end with 0, so the agents end together. An agent that handles the signal itself leaves without telling the
others, which then wait for it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch

from quern.machine import Machine, environment, set_child_env
from quern.mesh import Mesh, PeersLostError, alone, connect, disconnect
from quern.train.checkpoint import CheckpointError
from quern.train.guard import heeded
from quern.train.heartbeat import Watch

RESULT, PARENT = "QUERN_RESULT", "QUERN_PARENT"
"""Name the file in which the first rank of a machine says how it ended, and the launching process."""
TOGETHER_SECONDS = 1.0
"""Signals to the parent within this time count as one: the scheduler, the shell and a script may each send it."""
EXIT_SECONDS = 10.0
"""How long a machine whose ranks have ended waits for the other machines'."""
MEET_SECONDS = 900
"""How long a machine waits for the others to start."""
CONNECT_SECONDS = 60.0
"""Once all ranks are there: how long they may take to connect to each other."""
USERS = (ValueError, OSError, ImportError, CheckpointError)
"""Errors that before training are the user's to mend: said once, by one rank, and not tried again."""
EXPECTED = (*USERS, RuntimeError)
"""Errors that explain themselves without a traceback."""


@dataclass(frozen=True)
class Place:
    """Where this process stands among those of the command; restart: how often they were started anew."""

    rank: int
    ranks: int
    local_rank: int
    restart: int

    @property
    def main(self) -> bool:
        return self.rank == 0


def place() -> Place:
    """As torchrun has told this process; alone when it has not."""
    given = environment()

    def number(name: str, default: int) -> int:
        return int(given.get(name, default))

    return Place(
        number("RANK", 0), number("WORLD_SIZE", 1), number("LOCAL_RANK", 0), number("TORCHELASTIC_RESTART_COUNT", 0)
    )


# The parent -------------------------------------------------------------------------------------------------


def launch(arguments: Sequence[str], ranks: int, restarts: int, nodes: int = 1, rendezvous: str = "") -> int:
    """Runs `quern` with these arguments on several processes, and waits for them.

    SIGTERM, SIGINT and SIGHUP make the ranks of every machine finish the step, save and end. A second SIGTERM or SIGINT
    ends them at once.

    Args:
        arguments: the command line, after `quern`.
        ranks: processes on this machine.
        restarts: how often all are started again when one dies.
        nodes: machines that run this command together.
        rendezvous: host:port where they meet, on one of them; not used for one machine.

    Returns:
        The command's exit code; 128 + the signal's number where a signal came before training began.
    """
    folder = Path(tempfile.mkdtemp(prefix="quern-"))
    result = folder / "result.json"
    set_child_env(
        {
            RESULT: str(result),
            PARENT: str(os.getpid()),
            "OMP_NUM_THREADS": "1",
            "LOGLEVEL": "CRITICAL",  # of the agent: what it would say, the ranks say better
            "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT",  # the others are `_Asked`'s
        }
    )
    try:
        agent = _agent(arguments, ranks, restarts, folder, nodes, rendezvous if nodes > 1 else "localhost:0")
        with _Asked(agent) as asked:
            failure = _supervise(agent, restarts, nodes)
        if result.exists():
            return json.loads(result.read_text(encoding="utf-8"))
        if asked.signal is not None:
            _say(f"quern {arguments[0]}: stopped by {asked.signal.name} before training began")
            return 128 + asked.signal
        _say(f"quern {arguments[0]}: {failure}")
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _agent(arguments: Sequence[str], ranks: int, restarts: int, folder: Path, nodes: int, rendezvous: str) -> Any:
    """torch's elastic agent, as torch.distributed.launcher makes it, with a shorter wait at the end."""
    # Imported late: it reads the log level when it is.
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
    from torch.distributed.launcher.api import LaunchConfig

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # also where it was imported before
    config = LaunchConfig(nodes, nodes, ranks)  # for torch's own defaults
    meeting = RendezvousParameters("c10d", rendezvous, "quern", nodes, nodes, timeout=MEET_SECONDS)
    spec = WorkerSpec(
        role="quern",
        local_world_size=ranks,
        rdzv_handler=get_rendezvous_handler(meeting),
        entrypoint=sys.executable,
        args=("-m", "quern.cli.main", *arguments),
        max_restarts=restarts,
        monitor_interval=config.monitor_interval,
        numa_options=config.numa_options,
    )
    logs = DefaultLogsSpecs(log_dir=str(folder))
    return LocalElasticAgent(spec, logs, exit_barrier_timeout=EXIT_SECONDS)


def _supervise(agent: Any, restarts: int, nodes: int) -> str:
    """Runs the agent to its end; says what failed, where the ranks have left no outcome."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.rendezvous.api import (
        RendezvousClosedError,
        RendezvousError,
        RendezvousTimeoutError,
    )

    spec = agent.get_worker_group().spec
    try:
        result = agent.run()
    except SignalException as asked:
        return f"ended by {asked.sigval.name}"
    except RendezvousClosedError:
        return "another machine was asked to stop before training began, or has ended"
    except RendezvousTimeoutError:
        return f"not all of {nodes} machines came within {MEET_SECONDS / 60:.0f} minutes"
    except RendezvousError as error:
        return f"cannot reach the other machines: {error}"
    finally:
        spec.rdzv_handler.shutdown()
    failures = result.failures if result else {}
    ends = {rank: failure.signal_name() for rank, failure in failures.items() if failure.exitcode < 0}
    signals = "".join(f"; rank {rank} was ended by {name}" for rank, name in sorted(ends.items()))
    return f"given up after {restarts} restarts{signals}"


class _Asked:
    """While open, forwards signals to the agent's ranks. signal: the first one that came.

    A thread does it: a handler may interrupt the agent where it holds a lock of the rendezvous.
    """

    def __init__(self, agent: Any) -> None:
        self.signal: signal.Signals | None = None
        self._agent = agent
        self._heard: queue.SimpleQueue[signal.Signals] = queue.SimpleQueue()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> _Asked:
        for which in heeded():
            self._before[which] = signal.signal(which, lambda number, _: self._heard.put(signal.Signals(number)))
        threading.Thread(target=self._forward, name="signals", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        for which, handler in self._before.items() if self.signal is None else ():  # else the process is about to end
            signal.signal(which, handler)

    def _forward(self) -> None:
        from torch.distributed.elastic.rendezvous.api import RendezvousError

        self.signal = self._heard.get()
        until = time.monotonic() + TOGETHER_SECONDS
        asked: set[int] = set()
        closed = False
        while True:
            for pid in self._pids() - asked:  # also those that were just being started
                self._send(pid, signal.SIGTERM)
                asked.add(pid)
            if not closed:
                closed = True
                with contextlib.suppress(RendezvousError):
                    self._agent.get_worker_group().spec.rdzv_handler.set_closed()  # no machine starts ranks again
            with contextlib.suppress(queue.Empty):
                again = self._heard.get(timeout=0.2)
                if again != signal.SIGHUP and time.monotonic() > until:
                    for pid in self._pids():
                        self._send(pid, signal.SIGKILL)

    def _pids(self) -> set[int]:
        return {worker.id for worker in self._agent.get_worker_group().workers if worker.id is not None}

    def _send(self, pid: int, which: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.kill(pid, which)


# A rank -----------------------------------------------------------------------------------------------------


def finish(code: int) -> int:
    """The exit code of a rank whose command has ended by itself: under `launch` 0, and the file says the rest."""
    path = environment().get(RESULT)
    if path is None:
        return code
    if place().local_rank == 0:
        part = Path(path + ".part")
        part.write_text(json.dumps(code), encoding="utf-8")
        os.replace(part, path)
    return 0


@contextmanager
def joined(
    command: str, tp: int, detect: Callable[[int | None], Machine], threads: int | None, timeout: float
) -> Iterator[tuple[Machine, Mesh]]:
    """This rank's machine and mesh. detect: given the number of threads; by default the cores are shared equally.

    With several ranks nothing is raised: an error inside is reported, with the rank and the step, and ends the process;
    so does what befalls another rank (train/heartbeat.py; timeout: see there). command: what the reports begin with.
    """
    here = place()
    if here.ranks == 1:
        yield detect(threads), alone()
        return
    parent = os.getppid()
    _leave_if_over(parent)
    fall = _Fall(command, here)
    with fall:
        if torch.cuda.is_available():
            torch.cuda.set_device(here.local_rank)
        machine = detect(threads or max(1, (os.cpu_count() or 1) // here.ranks))
        with fall.limited(CONNECT_SECONDS, "connect to the others, though all were there") as begin:
            mesh = connect(tp, machine.device, here.rank, here.ranks, met=begin)
        fall.watch = Watch(mesh, timeout, fall.log, lambda: os.getppid() != parent, lambda: _leave(1))
        yield machine, mesh
        mesh.world.barrier()
        fall.watch.close()
        mesh.world.barrier()  # nobody's store goes while another still watches
        disconnect(mesh)


def restarted(mesh: Mesh) -> bool:
    """Whether the ranks of any machine were started anew: then all resume."""
    return any(mesh.world.gather_objects(place().restart > 0))


class _Terminated(BaseException):
    """SIGTERM outside the training loop."""


class _Fall:
    """Around a rank's work: reports what ends it, and ends it without waiting for anyone."""

    def __init__(self, command: str, here: Place) -> None:
        self.command, self.here = command, here
        self.watch: Watch | None = None
        self._falling = threading.Event()

    def log(self, line: str) -> None:
        _say(f"{self.command}: {line}")

    @contextmanager
    def limited(self, seconds: float, what: str) -> Iterator[Callable[[], None]]:
        """Gives what starts the clock: this process ends, to be started anew, where it is not done in time."""

        def end() -> None:
            self.log(f"rank {self.here.rank} could not {what}, within {seconds:.0f} s; all end")
            _leave(1)

        clock = threading.Timer(seconds, end)
        clock.daemon = True
        try:
            yield clock.start
        finally:
            clock.cancel()

    def __enter__(self) -> None:
        signal.signal(signal.SIGTERM, self._terminate)

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        """The agent ends the ranks that another has left behind; they say first whom they miss."""
        if not self._falling.is_set():
            raise _Terminated

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, (SystemExit, GeneratorExit)):
            return
        self._falling.set()
        _leave(self._before_watch(error) if self.watch is None else self._watched(error, self.watch))

    def _before_watch(self, error: BaseException) -> int:
        """Nothing connects the ranks yet; what is wrong on a machine is said by its first rank."""
        if isinstance(error, USERS):
            if self.here.local_rank == 0:
                self.log(str(error))
            return finish(1)
        if not isinstance(error, _Terminated):
            self.log(f"rank {self.here.rank} failed while it joined the others: {type(error).__name__}: {error}")
        return 1

    def _watched(self, error: BaseException, watch: Watch) -> int:
        step = watch.mesh.whereabouts.step
        if isinstance(error, (PeersLostError, _Terminated)):
            watch.lost(str(error))
            words = watch.words_of_main()
            return finish(1) if words and words[1] else 1
        if isinstance(error, USERS) and step is None:
            if self.here.main:
                watch.fell(str(error), final=True)
                self.log(str(error))
                return finish(1)
            words = watch.words_of_main(wait_seconds=5)
            if words == (str(error), True):
                return finish(1)
        at = f"in step {step + 1}" if step is not None else "before its first step"
        reason = f"rank {self.here.rank} failed {at}: {type(error).__name__}: {error}"
        watch.fell(reason)
        if not isinstance(error, EXPECTED) or environment().get("QUERN_TRACEBACK"):
            traceback.print_exception(error)
        self.log(f"{reason}; all end")
        return 1


def _leave_if_over(parent: int) -> None:
    """Ends a rank that was started after the outcome stood, or whose parent is gone."""
    given = environment()
    if RESULT in given and Path(given[RESULT]).exists():
        _leave(0)
    if int(given.get(PARENT, parent)) != parent:
        _leave(1)


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # nobody may be listening any more
        sys.stderr.write(line + "\n")  # in one piece, since others write there too
        sys.stderr.flush()


def _leave(code: int) -> NoReturn:
    """Ends this process now: leaving in good order would wait for collectives that cannot end."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)
