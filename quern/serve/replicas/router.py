"""What listens on the port of replicas: every request passes the frontier here, then goes to one replica.

A request that begins like an earlier one goes to the same replica, which has kept that prompt, unless others have much
less to do. The router reads and writes HTTP/1.0 on the replicas' Unix sockets: a response ends with its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from quern.serve.answers import JSON, STREAM_END, server_sent
from quern.serve.gate.frontier import Frontier, Gate
from quern.serve.replicas.processes import Replica
from quern.serve.requests.errors import ApiError
from quern.serve.routes import on_api_error, on_failure, read_body, unless_gone
from quern.serve.worker import stopped

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
OWN_HEADERS = {"connection", "content-length", "transfer-encoding", "expect", "authorization", "keep-alive"}
"""Of a request, which the router writes itself or keeps to itself."""
ENDING_HEADERS = {"connection", "transfer-encoding", "date", "server", "x-request-id"}
"""Of a response, which the router's own server writes."""
OPENING = 256
"""Characters or tokens of a prompt by which its replica is chosen."""
MOST_OPENINGS = 10_000
SLACK = 8
"""Open requests that a replica may have beyond the least busy one and still get a prompt that it knows."""


class Lost(Exception):
    """The replica stopped before its response was complete."""


def opening(body: bytes) -> bytes | None:
    """What requests of one conversation have in common: the messages up to the first one of the user, or the beginning
    of a prompt. None for a body without these.
    """
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(request, dict):
        return None
    said = request.get("messages") or request.get("input") or request.get("prompt")
    if not isinstance(said, str | list):
        return None
    asked = [number for number, one in enumerate(said) if isinstance(one, dict) and one.get("role") == "user"]
    begin = said[: asked[0] + 1 if asked else OPENING]
    return hashlib.sha256(json.dumps([request.get("model"), begin]).encode()).digest()


class Router:
    """Chooses replicas. replicas: All of them, ready or not."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._last: OrderedDict[bytes, Replica] = OrderedDict()

    def choose(self, key: bytes | None, but: Sequence[Replica] = ()) -> Replica:
        """The replica for a request with this opening. but: which not. Raises ApiError (503) if none is ready."""
        ready = [one for one in self._replicas if one.ready and one not in but]
        if not ready:
            raise stopped("no replica is ready")
        chosen = min(ready, key=lambda one: (one.open, one.served))
        if key is None:
            return chosen
        known = self._last.pop(key, None)
        if known in ready and known is not None and known.open <= chosen.open + SLACK:
            chosen = known
        self._last[key] = chosen
        if len(self._last) > MOST_OPENINGS:
            self._last.popitem(last=False)
        return chosen

    async def forward(self, http: Request) -> Response:
        """The response of one replica."""
        body = await read_body(http)
        key, tried = opening(body), []
        while True:
            replica = self.choose(key, tried)
            try:
                exchange = await Exchange.begin(replica)
                break
            except OSError:  # it has just died: nothing was sent, so another one can answer
                tried.append(replica)
        try:
            answer = await unless_gone(http, exchange.ask(http.method, target(http), http.headers.raw, body))
        except Lost:
            message = "The replica that had this request stopped: send it again."
            raise ApiError(message, status=503, kind="server_error") from None
        finally:
            if not exchange.streaming:
                exchange.close()
        return Response(status_code=499) if answer is None else answer

    async def health(self, _: Request) -> Response:
        ready = sum(one.ready for one in self._replicas)
        body = {"status": "ok" if ready else "no replica is ready", "replicas": len(self._replicas), "ready": ready}
        return JSON(body, 200 if ready else 503)

    async def metrics(self, _: Request) -> Response:
        """The metrics of all replicas, each with the label `replica`."""
        pages = await asyncio.gather(*(self._page(one) for one in self._replicas if one.ready))
        return Response(merge({number: page for number, page in pages if page}), media_type=CONTENT_TYPE_LATEST)

    async def _page(self, replica: Replica) -> tuple[int, str]:
        try:
            exchange = await Exchange.begin(replica)
        except OSError:
            return replica.number, ""
        try:
            return replica.number, bytes(
                (await exchange.ask("GET", b"/metrics", [(b"host", b"localhost")], b"")).body
            ).decode()
        except Lost:
            return replica.number, ""
        finally:
            exchange.close()


class Exchange:
    """One request to a replica, on a connection of its own. Close it at the end."""

    def __init__(self, replica: Replica, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._replica, self._reader, self._writer = replica, reader, writer
        self.streaming = False

    @classmethod
    async def begin(cls, replica: Replica) -> Exchange:
        """Connects. The replica counts as busier at once. Raises OSError if nothing answers there."""
        replica.open += 1
        replica.served += 1
        try:
            return cls(replica, *await asyncio.open_unix_connection(replica.path))
        except BaseException:
            replica.open -= 1
            raise

    def close(self) -> None:
        self._writer.close()
        self._replica.open -= 1

    async def ask(self, method: str, target: bytes, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> Response:
        """Sends a request; returns the response: a stream, or a complete one. Raises Lost if the replica stops."""
        sent = [(name, value) for name, value in headers if name.decode("latin-1") not in OWN_HEADERS]
        sent += [(b"connection", b"close"), (b"content-length", str(len(body)).encode())]
        lines = [method.encode() + b" " + target + b" HTTP/1.1", *(name + b": " + value for name, value in sent)]
        try:
            self._writer.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)
            first, *rest = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").strip().split("\r\n")
            told = [(name.lower(), value) for name, _, value in (line.partition(": ") for line in rest)]
            values = dict(told)
            if values.get("content-type", "").startswith("text/event-stream"):
                response: Response = Stream(self)
            elif method == "HEAD":
                response = Response()
            elif "content-length" in values:
                response = Response(await self._reader.readexactly(int(values["content-length"])))
            else:
                response = Response(b"".join([chunk async for chunk in self.chunks()]))
        except (OSError, asyncio.IncompleteReadError) as error:
            raise Lost from error
        response.status_code = int(first.split()[1])
        response.raw_headers = [(a.encode("latin-1"), b.encode("latin-1")) for a, b in told if a not in ENDING_HEADERS]
        return response

    async def chunks(self) -> AsyncIterator[bytes]:
        """The chunks of a response without a length."""
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            yield (await self._reader.readexactly(size + 2))[:-2]

    async def events(self) -> AsyncIterator[bytes]:
        """The events of a stream, which ends properly even if the replica stops."""
        try:
            async for chunk in self.chunks():
                yield chunk
        except (OSError, asyncio.IncompleteReadError):
            error = ApiError("The replica that wrote this reply stopped.", status=503, kind="server_error")
            yield f"\n\n{server_sent(error.body)}{STREAM_END}".encode()


class Stream(StreamingResponse):
    """Server-sent events from a replica. The exchange ends with the response, even if no byte was sent."""

    body = b""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange.events())
        self._exchange = exchange
        exchange.streaming = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._exchange.close()


def target(http: Request) -> bytes:
    """The path and the query of a request, as they were sent."""
    query = http.scope["query_string"]
    return http.scope.get("raw_path", http.url.path.encode()) + (b"?" + query if query else b"")


def merge(pages: dict[int, str]) -> str:
    """One page in Prometheus' text format, the samples of each metric together. pages: by the replica's number."""
    families: dict[str, tuple[list[str], list[str]]] = {}
    for number, page in pages.items():
        comments: list[str] = []
        samples: list[str] = []
        for line in page.splitlines():
            if line.startswith("# HELP "):
                comments, samples = families.setdefault(line.split()[2], ([], []))
            if line.startswith("#"):
                comments += [] if line in comments else [line]
            else:  # every metric has at least the label of its model
                samples.append(line.replace("{", f'{{replica="{number}",', 1))
    return "".join(f"{line}\n" for comments, samples in families.values() for line in (*comments, *samples))


def create_router(replicas: Sequence[Replica], gate: Gate, stop: Callable[[], Any]) -> Starlette:
    """The application in front of replicas. stop: Ends them, after the last response."""
    router = Router(replicas)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.to_thread(stop)

    app = Starlette(
        routes=[
            Route("/health", router.health),
            Route("/metrics", router.metrics),
            Route("/{path:path}", router.forward, methods=METHODS),
        ],
        exception_handlers={ApiError: on_api_error, Exception: on_failure},
        lifespan=lifespan,
    )
    if gate.origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=gate.origins, allow_methods=["*"], allow_headers=["*"], max_age=600
        )
    app.add_middleware(Frontier, gate=gate)
    return app
