"""`quern serve`: opens the runs' models, compiles them, serves them, and watches for newer checkpoints.

With several replicas, each of them does so (replicas.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from starlette.applications import Starlette

from quern.generate.engine import Engine
from quern.machine import Machine
from quern.runs.load import load
from quern.runs.run_dir import STAGES, RunDir
from quern.serve.gate.frontier import Gate
from quern.serve.models import Models
from quern.serve.page import read_welcome
from quern.serve.replicas import Place
from quern.serve.server import WARM_ROWS, create_app, listen, serve
from quern.serve.worker import Limits
from quern.train import manifest

WAITING_CONNECTIONS = 2048


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
            if steps := manifest.steps(self.run_dir.checkpoints(stage)):
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
    where: str,
    watch_seconds: float,
) -> Starlette:
    """The application, its models loaded and compiled. where: the end of the line that tells so; others as in `run`."""
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
                    with ThreadPoolExecutor(1) as threads:  # OpenMP's threads for it end with it
                        opened = asyncio.get_running_loop().run_in_executor(threads, source.open, log)
                        engine, what = await opened
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
    watch_seconds: float,
    tls: tuple[Path, Path] | None,
    replica: Place | None,
    invite: Callable[[str, int], str] | None = None,
) -> None:
    """Serves until interrupted. Raises OSError for a taken port or an unreadable file, and the errors of `runs.load`.

    port: 0 picks a free one; watch_seconds: between two looks for newer checkpoints, 0 for never; tls: the files of the
    certificate and of its key; replica: the place of this process, whose port it shares; invite: makes what is printed
    at last from the scheme and the port.
    """
    prefix = f"replica {replica.number}: " if replica else ""
    files = {} if tls is None else {"ssl_certfile": str(tls[0]), "ssl_keyfile": str(tls[1])}
    with listen(host, replica.own_port if replica else port) as own:  # clients that come now wait for the model
        scheme, bound = f"http{'s' if tls else ''}", own.getsockname()[1]
        where = f" at {scheme}://{host}:{bound}"
        app = open_app(sources, gate, limits, lambda line: log(prefix + line), where, watch_seconds)
        listeners = [own]
        if replica:
            listeners.append(listen(host, replica.port, shared=True))
            listeners[1].listen(WAITING_CONNECTIONS)
            replica.report_ready()
        if invite:
            log(invite(scheme, bound))
        serve(app, listeners, gate.trusted, **files)
