"""`quern serve`: opens the runs' models, compiles them, serves them, and watches for newer checkpoints.

With several replicas, each process does so, behind the router of this one (replicas/).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI

from quern.generate.engine import Engine
from quern.machine import Machine, machine_flags, worker_variables
from quern.runs.load import load
from quern.runs.run_dir import STAGES, RunDir
from quern.serve.engine_thread import in_new_thread
from quern.serve.gate.frontier import Gate
from quern.serve.models import Models
from quern.serve.page import read_welcome
from quern.serve.replicas.processes import Processes, Replica
from quern.serve.replicas.router import create_router
from quern.serve.server import WARM_ROWS, create_app, listen, serve
from quern.serve.worker import Limits
from quern.temporaries import scratch_folder
from quern.train import checkpoint


@dataclass(frozen=True)
class Source:
    """Where a model comes from. stage: None for the run's last one."""

    run_dir: RunDir
    stage: str | None
    machine: Machine
    prefix_megabytes: float

    def newest(self) -> tuple[str, int] | None:
        """The stage and step of the newest checkpoint, good or damaged."""
        for stage in [self.stage] if self.stage else reversed(STAGES):
            if steps := checkpoint.steps(self.run_dir.checkpoints(stage)):
                return stage, max(steps)
        return None

    def open(self, log: Callable[[str], None]) -> tuple[Engine, str]:
        """An engine that is ready to serve, and what it holds. Errors are those of `runs.load.load`."""
        loaded = load(self.run_dir, self.machine, log, self.stage)
        engine = Engine(
            loaded.model, loaded.tokenizer, self.machine, max_rows=WARM_ROWS[-1], prefix_megabytes=self.prefix_megabytes
        )
        engine.warm_up(WARM_ROWS)
        return engine, f"step {loaded.step:,} of {loaded.stage}"


def open_app(
    sources: Mapping[str, Source],
    gate: Gate,
    limits: Limits,
    log: Callable[[str], None],
    where: str = "",
    *,
    watch_seconds: float = 0,
) -> FastAPI:
    """The application, its models loaded and compiled.

    Args:
        sources: The models' sources by the names that requests use.
        gate: Who may come in.
        limits: Of each model's requests.
        log: Takes lines for the user.
        where: Where the models are served, as the end of such a line.
        watch_seconds: Time between two looks for newer checkpoints; 0 for never.

    Raises:
        FileNotFoundError, CheckpointError: As `runs.load.load`.
    """
    engines = {}
    shown = {name: source.newest() for name, source in sources.items()}
    for name, source in sources.items():
        if source.machine.compile:
            sizes = ", ".join(map(str, WARM_ROWS))
            log(f"compiling for {sizes} replies at a time: a minute or two the first time, seconds later on")
        engines[name], what = source.open(log)
        log(f"serving {name} ({what}){where}")

    async def watch(models: Models) -> None:
        while True:
            await asyncio.sleep(watch_seconds)
            for name, source in sources.items():
                newest = source.newest()
                if newest == shown[name]:
                    continue
                shown[name] = newest
                try:
                    engine, what = await in_new_thread(lambda source=source: source.open(log))
                except Exception as error:  # the server goes on with the model that it has
                    log(f"{name}: the newest checkpoint cannot be served ({error}); going on with the one before")
                    continue
                log(f"{name}: new requests go to {what}")
                await models.replace(name, engine)

    first = next(iter(sources.values()))
    welcome = read_welcome(first.run_dir.folder, (first.newest() or ("",))[0])
    return create_app(engines, gate, limits, watch if watch_seconds else None, welcome)


def run(
    sources: Mapping[str, Source],
    host: str,
    port: int,
    gate: Gate,
    limits: Limits,
    log: Callable[[str], None],
    *,
    watch_seconds: float = 0,
    tls: tuple[Path, Path] | None = None,
    replicas: int = 1,
) -> None:
    """Serves until interrupted.

    Args:
        sources, gate, limits, log, watch_seconds: As in `open_app`.
        host: The address to listen on.
        port: 0 picks a free one.
        tls: The files of the certificate and of its key, for HTTPS.
        replicas: Processes that each have the models.

    Raises:
        OSError: The port is taken, or a file cannot be read.
        FileNotFoundError, CheckpointError: As `runs.load.load`.
        RuntimeError: A replica did not start.
        ValueError: There are fewer GPUs than replicas.
    """
    files = {} if tls is None else {"ssl_certfile": str(tls[0]), "ssl_keyfile": str(tls[1])}
    with listen(host, port) as listener:  # clients that come now wait until the model is compiled
        address = f"at http{'s' if tls else ''}://{host}:{listener.getsockname()[1]}"
        if replicas == 1:
            app = open_app(sources, gate, limits, log, f" {address}", watch_seconds=watch_seconds)
            serve(app, listener, app.state.models.thread, gate.trusted, **files)
            return
        with started(sources, replicas, limits, log, watch_seconds) as processes:
            log(f"serving {', '.join(sources)} with {replicas} replicas {address}")
            serve(create_router(processes.replicas, gate, processes.stop), listener, None, gate.trusted, **files)


@contextlib.contextmanager
def started(
    sources: Mapping[str, Source], count: int, limits: Limits, log: Callable[[str], None], watch_seconds: float
) -> Iterator[Processes]:
    """The processes of replicas, all of them ready. On GPUs, each has one; on a CPU, they share the threads."""
    machine = next(iter(sources.values())).machine
    if machine.device.type == "cuda" and count > torch.cuda.device_count():
        raise ValueError(f"--replicas {count} needs as many GPUs, and there are {torch.cuda.device_count()}")
    flags = machine_flags(machine) | {"threads": max(1, machine.threads // count)}
    names = {
        name: (str(one.run_dir.out), one.run_dir.run, one.stage, one.prefix_megabytes) for name, one in sources.items()
    }

    def order(replica: Replica) -> dict[str, Any]:
        shared = {"sources": names, "request_seconds": limits.seconds, "watch_seconds": watch_seconds}
        return {"machine": flags, "path": str(replica.path), **shared}

    with scratch_folder() as folder:
        replicas = [Replica(number, folder / f"{number}.sock") for number in range(count)]
        processes = Processes(replicas, order, worker_variables(machine), log)
        try:
            processes.start()
            yield processes
        finally:
            processes.stop()
