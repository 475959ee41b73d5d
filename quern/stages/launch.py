"""Several processes for one command: starts them with torch's elastic agent (torchrun), and joins them to a mesh.

`quern pretrain … --ranks 2` becomes the ranks' parent; each rank runs the same command, finds its place in the
environment, and joins. When a rank dies, the others end, and all start anew, up to `restarts` times; they go on from
the newest good checkpoint by themselves. An outcome that a restart would not change (done, stopped by a signal,
diverged, a recipe that is refused) travels in a file, because the agent takes every exit code but 0 for a failure. When
the parent dies, however it does, the ranks notice and end. On several machines torchrun itself is called:
runs/multinode.sh.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch

from quern.machine import Machine, environment, hand_down
from quern.mesh import Mesh, PeersLostError, alone, connect, disconnect
from quern.train.checkpoint import CheckpointError
from quern.train.watch import Watch

RESULT, PARENT = "QUERN_RESULT", "QUERN_PARENT"
"""Name the file in which the first rank of a machine says how it ended, and the launching process."""
SHUTDOWN_SECONDS = 300
"""After a signal to the parent: how long the ranks may take to finish their step and to save."""
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


def launch(arguments: Sequence[str], ranks: int, restarts: int) -> int:
    """Runs `quern` with these arguments on `ranks` processes of this machine; returns the command's exit code.

    SIGTERM and SIGINT reach every rank: they finish the step, save and end. A second one ends them at once.
    """
    folder = Path(tempfile.mkdtemp(prefix="quern-"))
    result = folder / "result.json"
    hand_down(
        {
            RESULT: str(result),
            PARENT: str(os.getpid()),
            "OMP_NUM_THREADS": "1",
            "LOGLEVEL": "CRITICAL",  # of the agent: what it would say, the ranks say better
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_SECONDS),
        }
    )
    try:
        code = _supervise(arguments, ranks, restarts, folder)
        return json.loads(result.read_text(encoding="utf-8")) if result.exists() else code
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _supervise(arguments: Sequence[str], ranks: int, restarts: int, folder: Path) -> int:
    # Imported late: it reads the log level when it is.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=folder.name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
    )
    try:
        elastic_launch(config, sys.executable)("-m", "quern.cli", *arguments)
    except SignalException as asked:
        return 128 + asked.sigval
    except ChildFailedError as failed:
        ends = {rank: failure.signal_name() for rank, failure in failed.failures.items() if failure.exitcode < 0}
        signals = "".join(f"; rank {rank} was ended by {name}" for rank, name in sorted(ends.items()))
        _say(f"quern {arguments[0]}: given up after {restarts} restarts{signals}")
    return 1


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
    so does what befalls another rank (train/watch.py; timeout: see there). command: what the reports begin with.
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
        fall.watch = Watch(mesh, timeout, fall.say, lambda: os.getppid() != parent, lambda: _leave(1))
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

    def say(self, line: str) -> None:
        _say(f"{self.command}: {line}")

    @contextmanager
    def limited(self, seconds: float, what: str) -> Iterator[Callable[[], None]]:
        """Gives what starts the clock: this process ends, to be started anew, where it is not done in time."""

        def end() -> None:
            self.say(f"rank {self.here.rank} could not {what}, within {seconds:.0f} s; all end")
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
                self.say(str(error))
            return finish(1)
        if not isinstance(error, _Terminated):
            self.say(f"rank {self.here.rank} failed while it joined the others: {type(error).__name__}: {error}")
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
                self.say(str(error))
                return finish(1)
            words = watch.words_of_main(wait_seconds=5)
            if words == (str(error), True):
                return finish(1)
        at = f"in step {step + 1}" if step is not None else "before its first step"
        reason = f"rank {self.here.rank} failed {at}: {type(error).__name__}: {error}"
        watch.fell(reason)
        if not isinstance(error, EXPECTED) or environment().get("QUERN_TRACEBACK"):
            traceback.print_exception(error)
        self.say(f"{reason}; all end")
        return 1


def _leave_if_over(parent: int) -> None:
    """Ends a rank that was started after the outcome stood, or whose parent is gone."""
    given = environment()
    if RESULT in given and Path(given[RESULT]).exists():
        _leave(0)
    if int(given.get(PARENT, parent)) != parent:
        _leave(1)


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")  # in one piece, since others write there too
    sys.stderr.flush()


def _leave(code: int) -> NoReturn:
    """Ends this process now: leaving in good order would wait for collectives that cannot end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
