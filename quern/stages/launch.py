"""Several processes for one command: starts them with torchrun, and joins them to a mesh.

`quern pretrain … --ranks 2` becomes torchrun's parent; each rank runs the same command, finds its place in the
environment, and joins. When a rank dies, torchrun ends the others and starts all anew, up to `restarts` times; they go
on from the newest good checkpoint by themselves. An outcome that a restart would not change (done, stopped by a signal,
diverged, a recipe that is refused) travels in a file, because torchrun takes every exit code but 0 for a failure.
On several machines torchrun itself is called: runs/multinode.sh.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from quern.machine import Machine, environment
from quern.mesh import Mesh, connect, disconnect
from quern.train.guard import SIGNALS

RESULT = "QUERN_RESULT"
"""Names the file in which rank 0 says how it ended."""


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


def launch(arguments: Sequence[str], ranks: int, restarts: int) -> int:
    """Runs `quern` with these arguments on `ranks` processes of this machine; returns the command's exit code."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        # A session of its own: Ctrl-C reaches this process only, which passes it on once.
        with (
            subprocess.Popen(
                [*torchrun, f"--max-restarts={restarts}", "--module", "--", "quern.cli", *arguments],
                env={**environment(), RESULT: str(result), "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            ) as process,
            _passing_on(process),
        ):
            code = process.wait()
        return json.loads(result.read_text(encoding="utf-8")) if result.exists() else code or 1


@contextmanager
def _passing_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Signals to this process go to torchrun, which sends them to every rank."""

    def receive(number: int, frame: FrameType | None) -> None:
        process.send_signal(signal.SIGTERM)

    before = {which: signal.signal(which, receive) for which in SIGNALS}
    try:
        yield
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)


def finish(code: int) -> int:
    """The exit code of a rank whose command has ended by itself: under `launch` 0, and the file says the rest."""
    path = environment().get(RESULT)
    if path is None:
        return code
    if place().main:
        part = Path(path + ".part")
        part.write_text(json.dumps(code), encoding="utf-8")
        os.replace(part, path)
    return 0


@contextmanager
def joined(tp: int, detect: Callable[[int | None], Machine], threads: int | None) -> Iterator[tuple[Machine, Mesh]]:
    """This rank's machine and mesh. detect: given the number of threads; by default the cores are shared equally."""
    here = place()
    if here.ranks > 1:
        threads = threads or max(1, (os.cpu_count() or 1) // here.ranks)
        if torch.cuda.is_available():
            torch.cuda.set_device(here.local_rank)
    machine = detect(threads)
    mesh = connect(tp, machine.device, here.rank, here.ranks)
    yield machine, mesh
    disconnect(mesh)
