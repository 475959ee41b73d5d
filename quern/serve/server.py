"""`quern serve`: opens the runs' models, compiles them, serves an OpenAI-compatible API and the page to chat on.

`create_app` builds the application, `serve` runs it, by default on loopback; `run` does both for runs, and looks for
newer checkpoints. With several replicas, each of them does so (replicas.py). Cross-origin requests fail, unless an
origin is named: a body must be declared as JSON, which browsers send across origins only with a permission, and a
request for another host name is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import math
import signal
import socket
import ssl
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.types import ASGIApp

from quern.generate.engine import Engine
from quern.machine import Machine
from quern.process import UNAWAITED
from quern.runs.load import load
from quern.runs.run_dir import STAGES, RunDir
from quern.serve.access import Hosts
from quern.serve.gate import HEADER_BYTES, HEADER_SECONDS, Connections, Frontier, Gate
from quern.serve.routes import ON_ERROR, Welcome, read_suggestions, routes
from quern.serve.worker import IDLE_SECONDS, REQUEST_SECONDS, Models
from quern.train import manifest

Result = TypeVar("Result")
TRIM_SECONDS = 5.0
TOKENIZING_THREADS = 1  # each keeps memory of its longest text
DRAIN_SECONDS = 30
"""Replies that are being written when the server is asked to stop have so long to end."""
WARM_ROWS = (1, 8, 32)
"""The sizes of the running batch for which `quern serve` compiles; the last one is the most rows that run together."""
WAITING_CONNECTIONS = 2048
LOOPBACK = Hosts("127.0.0.1")
Files = tuple[Path, Path] | None
"""The files of a certificate and of its key, for HTTPS."""


@dataclass(frozen=True)
class Place:
    """The place among the replicas. own_port: a port of this process alone, 0 for any; link: to the parent."""

    number: int
    port: int
    own_port: int
    threads: int
    link: socket.socket


@dataclass(frozen=True)
class Source:
    """The origin of a model. stage: None for the run's last one."""

    run_dir: RunDir
    stage: str | None
    machine: Machine
    prefix_megabytes: float

    def newest(self) -> tuple[str, int, int] | None:
        """The stage and step of the newest checkpoint, good or damaged, and when its files last changed."""
        for stage in [self.stage] if self.stage else reversed(STAGES):
            if found := manifest.candidates(self.run_dir.checkpoints(stage)):
                step, path = max(found.items())
                return stage, step, max(one.stat().st_ctime_ns for one in (path, *path.iterdir()))
        return None

    def open(self, log: Callable[[str], None]) -> tuple[Engine, str]:
        """An engine that is ready to serve, and what it holds. Raises the errors of `runs.load.load`."""
        loaded = load(self.run_dir, self.machine, log, self.stage)
        engine = Engine(loaded.model, loaded.tokenizer, self.machine, WARM_ROWS[-1], self.prefix_megabytes)
        engine.warm_up(WARM_ROWS)
        return engine, f"step {loaded.step:,} of {loaded.stage}"


def run(
    sources: Mapping[str, Source],
    host: str,
    port: int,
    gate: Gate,
    request_seconds: float,
    log: Callable[[str], None],
    *,
    watch_seconds: float,
    tls: Files,
    replica: Place | None,
    invite: Callable[[str, int], str] | None = None,
) -> None:
    """Serves until interrupted. Raises OSError for a taken port or an unreadable file, and the errors of `runs.load`.

    port: 0 picks a free one; watch_seconds: between two looks for newer checkpoints, 0 for never; tls: see
    `Files`; replica: the place of this process, whose port it shares; invite: makes what is printed at last from
    the scheme and the port.
    """
    prefix = f"replica {replica.number}: " if replica else ""
    with listen(host, replica.own_port if replica else port) as own:  # clients that come now wait for the model
        scheme, bound = f"http{'s' if tls else ''}", own.getsockname()[1]
        where = f" at {scheme}://{address(host, bound)}"
        app = open_app(sources, gate, request_seconds, lambda line: log(prefix + line), where, watch_seconds)
        listeners = [own]
        if replica:
            listeners.append(listen(host, replica.port, shared=True))
            # Not before: the port would be free for others until now. Closed connections would block it after the end.
            listeners[1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listeners[1].listen(WAITING_CONNECTIONS)
            replica.link.send(b".")  # ready
        if invite:
            log(invite(scheme, bound))
        serve(app, listeners, gate.trusted, tls)


def open_app(
    sources: Mapping[str, Source],
    gate: Gate,
    request_seconds: float,
    log: Callable[[str], None],
    where: str,
    watch_seconds: float,
) -> Starlette:
    """The application, its models loaded and compiled. where: the end of the line that tells so; others as in `run`."""
    engines, suggestions = {}, dict[str, Sequence[str]]()
    shown = {name: source.newest() for name, source in sources.items()}

    def welcome(*changed: str) -> Welcome:
        stages = {name: newest[0] if newest else "" for name, newest in shown.items()}
        for name in changed:
            try:
                suggestions[name] = read_suggestions(sources[name].run_dir.folder, stages[name])
            except (OSError, ValueError) as error:
                suggestions[name] = ()
                log(f"warning: {name} has no suggestions: {error}")
        return Welcome(dict(suggestions), [name for name, stage in stages.items() if stage == "pretrain"])

    begins = welcome(*sources)
    for name, source in sources.items():
        if source.machine.compile:
            sizes = ", ".join(map(str, WARM_ROWS))
            log(f"compiling for {sizes} replies at a time: a minute or two the first time, seconds later on")
        engines[name], what = source.open(log)
        log(f"serving {name} ({what}){where}")

    async def watch(models: Models) -> None:
        told: dict[str, list[str]] = {}  # lines of the last try for each model that failed
        while True:
            await asyncio.sleep(watch_seconds)
            for name, source in sources.items():
                before, lines = shown[name], list[str]()
                try:
                    if (newest := source.newest()) == before:
                        continue
                    shown[name] = newest
                    engine, what = await aside(partial(source.open, lines.append))
                except Exception as error:  # the server goes on with the model that it has, and tries again
                    lines.append(f"{name}: the newest checkpoint cannot be served ({error}); the one before goes on")
                    for line in lines if lines != told.get(name) else ():
                        log(line)
                    shown[name], told[name] = before, lines
                    continue
                for line in (*lines, f"{name}: new requests go to {what}"):
                    log(line)
                app.state.welcome = welcome(name)
                await models.replace(name, engine)

    app = create_app(engines, gate, request_seconds, watch if watch_seconds else None, begins)
    return app


def create_app(
    engines: Mapping[str, Engine],
    gate: Gate | None = None,
    request_seconds: float = REQUEST_SECONDS,
    watch: Callable[[Models], Awaitable[None]] | None = None,
    welcome: Welcome | None = None,
) -> Starlette:
    """Builds the application. Use `serve`, or run `app.state.models.run` in a thread beside the server: until then no
    request is answered.

    gate: by default a loopback host's; watch: runs beside the server, to replace models.
    """
    models, gate = Models(engines, request_seconds), gate or Gate(hosts=LOOPBACK)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(TOKENIZING_THREADS))
        running = [asyncio.ensure_future(give_memory_back())]
        if watch is not None:
            running.append(asyncio.ensure_future(watch(models)))
        try:
            yield
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await asyncio.to_thread(models.stop)

    middleware = [Middleware(Frontier, gate=gate)]
    app = Starlette(routes=routes(models), middleware=middleware, exception_handlers=ON_ERROR, lifespan=lifespan)
    app.state.models, app.state.welcome = models, welcome or Welcome()
    return app


async def aside(function: Callable[[], Result]) -> Result:
    """Runs a function in a thread of its own; OpenMP's threads for it end with it. The program's end waits for none."""
    done = Future[Result]()

    def run(done: Future[Result]) -> None:
        done.set_running_or_notify_cancel()
        try:
            done.set_result(function())
        except BaseException as error:
            done.set_exception(error)
        finally:
            del done  # an error holds this frame: see `Worker.call`

    threading.Thread(target=run, name=UNAWAITED, args=(done,), daemon=True).start()
    try:
        return await asyncio.wrap_future(done)
    finally:
        del done


async def give_memory_back() -> None:
    """Returns what large requests have freed to the system, every few seconds: the C library (glibc) keeps it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    while trim is not None:
        await asyncio.sleep(TRIM_SECONDS)
        await asyncio.to_thread(trim, 0)


def serve(app: Starlette, listeners: Sequence[socket.socket], trusted: Sequence[str] = (), tls: Files = None) -> None:
    """Serves an application of `create_app` until interrupted. trusted: as in `configure`; tls: see `Files`.

    Call it in the main thread, which runs the engines; the event loop has another one. SIGINT raises KeyboardInterrupt
    after the normal end. An error that ends the engines or the event loop ends both, and is raised.
    """
    prepare_process()
    server = uvicorn.Server(configure(app, trusted, tls, timeout_graceful_shutdown=DRAIN_SECONDS))
    engines = app.state.models
    with ended_by_signals(server.handle_exit), ThreadPoolExecutor(1, "quern-http") as threads:
        answering = threads.submit(server.run, sockets=list(listeners))
        answering.add_done_callback(lambda _: engines.end())
        try:
            engines.run()
        finally:  # without engines nothing is answered, and the executor waits for its thread
            server.should_exit = True
        while not answering.done():
            wait([answering], IDLE_SECONDS)
    answering.result()


def prepare_process() -> None:
    """Lets the event loop interrupt the engine's thread sooner than Python's 5 ms: a step takes less.

    What is loaded stays out of garbage collection: to look through it takes 0.2 s, in which nobody gets a token.
    """
    sys.setswitchinterval(0.0005)
    gc.collect()
    gc.freeze()


def configure(
    app: ASGIApp, trusted: Sequence[str] = (), tls: Files = None, connections: Connections | None = None, **more: Any
) -> Any:
    """uvicorn's configuration with bounds on connections. trusted: proxies whose X-Forwarded-… are believed."""
    connections = connections or Connections(trusted)
    if tls:
        connections.tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        connections.tls.load_cert_chain(*tls)
    http: Any = connections.make
    return uvicorn.Config(
        connections.follow(app),
        http=http,
        loop="asyncio" if tls else "auto",  # uvloop reads on while `start_tls` begins
        ws="none",
        timeout_keep_alive=math.ceil(HEADER_SECONDS),
        h11_max_incomplete_event_size=2 * HEADER_BYTES,
        proxy_headers=bool(trusted),
        forwarded_allow_ips=list(trusted),
        access_log=False,
        log_level="error",  # a warning for each request that is no HTTP would fill the log
        **more,
    )


@contextlib.contextmanager
def ended_by_signals(stop: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """SIGTERM and SIGINT call `stop`, which asks the body to end; SIGINT then raises KeyboardInterrupt."""
    interrupted = False

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted |= number == signal.SIGINT
        stop(number, frame)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if interrupted:
        raise KeyboardInterrupt


def address(host: str, port: int) -> str:
    """An address as in a URL, where IPv6 has brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(host: str, port: int, shared: bool = False) -> socket.socket:
    """Opens a socket on which `serve` answers; port 0 picks a free one. Raises OSError, which names the flag.

    shared: Other processes of this user may open the same port so. The socket then only reserves the port, and gets
    connections once its method `listen` is called.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        if not shared:
            return socket.create_server((host, port), family=family)
        opened = socket.socket(family)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        opened.bind((host, port))
        return opened
    except (OSError, UnicodeError, OverflowError) as error:
        reason = str(getattr(error, "strerror", "no such host or port")).partition(" (")[0]
        raise OSError(f"cannot serve at {address(host, port)} ({reason}): choose another --port or --host") from error
