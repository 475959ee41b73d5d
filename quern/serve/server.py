"""The HTTP server: an OpenAI-compatible API over one or more engines, and the page to chat on.

`create_app` builds the application, `serve` runs it, by default on loopback. Cross-origin requests fail, unless an
origin is named: a body must be declared as JSON, which browsers send across origins only with a permission, and a
request for another host name is refused.
"""

import asyncio
import contextlib
import ctypes
import gc
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from quern.generate.engine import Engine
from quern.serve.gate.connections import HEADER_BYTES, Connections
from quern.serve.gate.frontier import Frontier, Gate
from quern.serve.gate.hosts import Hosts
from quern.serve.models import IDLE_SECONDS, Models
from quern.serve.page import Welcome, page_routes
from quern.serve.routes import ON_ERROR, routes
from quern.serve.worker import Limits

TRIM_SECONDS = 5.0
TOKENIZING_THREADS = 1  # each keeps memory of its longest text
DRAIN_SECONDS = 30
"""Replies that are being written when the server is asked to stop have so long to end."""
WARM_ROWS = (1, 8, 32)
"""The sizes of the running batch for which `quern serve` compiles; the last one is the most rows that run together."""
LOOPBACK = Hosts("127.0.0.1")


def create_app(
    engines: Mapping[str, Engine],
    gate: Gate | None = None,
    limits: Limits | None = None,
    watch: Callable[[Models], Awaitable[None]] | None = None,
    welcome: Welcome | None = None,
) -> Starlette:
    """Builds the application. watch: runs beside the server, to replace models. gate: by default a loopback host's."""
    models = Models(engines, limits or Limits())
    gate = gate or Gate(hosts=LOOPBACK)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(TOKENIZING_THREADS))
        models.start()
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
    if gate.origins:
        named = {"allow_origins": gate.origins, "allow_methods": ["*"], "allow_headers": ["*"], "max_age": 600}
        middleware.append(Middleware(CORSMiddleware, **named))
    paths = [*routes(models), *page_routes(welcome or Welcome())]
    app = Starlette(routes=paths, middleware=middleware, exception_handlers=ON_ERROR, lifespan=lifespan)
    app.state.models = models
    return app


def prepare_process() -> None:
    """Lets the event loop interrupt the engine's thread sooner than Python's 5 ms: a step takes less.

    What is loaded stays out of garbage collection: to look through it takes 0.2 s, in which nobody gets a token.
    """
    sys.setswitchinterval(0.0005)
    gc.collect()
    gc.freeze()


async def give_memory_back() -> None:
    """Returns what large requests have freed to the system, every few seconds: the C library (glibc) keeps it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    while trim is not None:
        await asyncio.sleep(TRIM_SECONDS)
        await asyncio.to_thread(trim, 0)


def configure(app: ASGIApp, trusted: Sequence[str] = (), connections: Connections | None = None, **more: Any) -> Any:
    """uvicorn's configuration with bounds on connections. trusted: proxies whose X-Forwarded-… are
    believed."""
    connections = connections or Connections(trusted)
    http: Any = connections.make
    return uvicorn.Config(
        connections.follow(app),
        http=http,
        ws="none",
        h11_max_incomplete_event_size=2 * HEADER_BYTES,
        proxy_headers=bool(trusted),
        forwarded_allow_ips=list(trusted),
        access_log=False,
        **more,
    )


def serve(app: Starlette, listeners: Sequence[socket.socket], trusted: Sequence[str] = (), **tls: Any) -> None:
    """Serves an application of `create_app` until interrupted; `tls`: settings of uvicorn's Config.

    Call it in the main thread, which runs the engines; the event loop has another one. SIGINT raises KeyboardInterrupt
    after the normal end.
    """
    prepare_process()
    config = configure(app, trusted, log_level="warning", timeout_graceful_shutdown=DRAIN_SECONDS, **tls)
    server, engines = uvicorn.Server(config), app.state.models

    def answer() -> None:
        try:
            server.run(sockets=list(listeners))
        finally:
            engines.end()

    thread = threading.Thread(target=answer, name="quern-http")
    with ended_by_signals(server.handle_exit):
        engines.elsewhere = True
        thread.start()
        engines.run()
        while thread.is_alive():
            thread.join(IDLE_SECONDS)


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


def listen(host: str, port: int, shared: bool = False) -> socket.socket:
    """Opens a socket on which `serve` answers; port 0 picks a free one. Raises ValueError or OSError, which name the
    flag.

    shared: Other processes of this user may open the same port so. The socket then only reserves the port, and gets
    connections once its method `listen` is called.
    """
    if not 0 <= port <= 65535:
        raise ValueError(f"--port must be 0 (any that is free) to 65535, not {port}")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        if not shared:
            return socket.create_server((host, port), family=family)
        opened = socket.socket(family)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        opened.bind((host, port))
        return opened
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]
        raise OSError(f"cannot serve at {host}:{port} ({reason}): choose another --port or --host") from error
