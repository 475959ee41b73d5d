"""The gate of every connection and request: bounds on bytes, times and connections; hosts, keys and rates.

uvicorn's parsers bound nothing. A `Connection` stands between the socket and uvicorn's protocol: it counts bytes and
keeps deadlines. `Connections.follow` is ASGI middleware that tells it how far the request is. `Frontier` is the
middleware of host names, API keys, rates, security headers and the access log.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import math
import os
import re
import ssl
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from quern.serve.access import Hosts, Keys
from quern.serve.answers import error_response
from quern.serve.routes import MAX_BODY_BYTES, page_paths
from quern.serve.schema import ApiError, as_api_error

HEADER_BYTES = 1 << 16
RAW_BODY_BYTES = 2 * MAX_BODY_BYTES  # chunk sizes, extensions and trailers included
MOST_CONNECTIONS = 4096
# After so long a connection is closed:
HEADER_SECONDS = 10.0  # from the connection, or the last response, to the end of a request's headers
BODY_SECONDS = 60.0  # from the end of the headers to the end of the body
UNREAD_SECONDS = 60.0  # for which a client may leave a response unread
SEPARATOR = b"\r\n\r\n"
UPGRADE = re.compile(rb"(?i)\r\nupgrade(?=:)")  # Java's client sends this header; httptools then reads no body


class Connections:
    """Every open connection of a server. A proxy, in `trusted`, may have all connections, another address half of them.
    When all are taken, the one that has waited longest for a request is closed for a new one."""

    def __init__(self, trusted: Sequence[str] = ()) -> None:
        self.tls: ssl.SSLContext | None = None  # the certificate, for HTTPS
        self._trusted = [ipaddress.ip_network(one) for one in trusted]
        files = os.sysconf("SC_OPEN_MAX")  # -1: as many as one likes
        self._most = max(8, min(MOST_CONNECTIONS, files // 2)) if files > 0 else MOST_CONNECTIONS
        self._open: dict[Connection, str] = {}
        self._of: Counter[str] = Counter()

    def make(self, *, app_state: dict[str, Any], **how: Any) -> asyncio.BaseProtocol:
        """Makes the protocol of a new connection, in the place of uvicorn's `http` class."""
        connection = Connection(self)
        protocol: Any = AutoHTTPProtocol
        connection.inner = protocol(app_state={**app_state, "connection": connection}, **how)
        return connection if self.tls is None else Handshake(self.tls, connection, self)

    def follow(self, app: ASGIApp) -> ASGIApp:
        """Wraps an application: its requests tell their connections how far they are."""

        async def followed(scope: Scope, receive: Receive, send: Send) -> None:
            connection = scope.get("state", {}).get("connection") if scope["type"] == "http" else None
            if connection is None:
                return await app(scope, receive, send)
            headers = Headers(scope=scope)
            connection.headed("transfer-encoding" in headers or headers.get("content-length", "0") != "0")

            async def received() -> Message:
                message = await receive()
                if not message.get("more_body", False):
                    connection.read()
                return message

            try:
                await app(scope, received, send)
            finally:
                connection.answered()

        return followed

    def enter(self, connection: Connection, address: str) -> bool:
        """Counts a connection in. Returns False if there is no room for it."""
        trusted = not address or any(ipaddress.ip_address(address) in network for network in self._trusted)
        share = self._most if trusted else self._most // 2
        if self._of[address] >= share and not self._close_idle(address):
            return False
        if len(self._open) >= self._most and not self._close_idle(None):
            return False
        self._open[connection] = address
        self._of[address] += 1
        return True

    def leave(self, connection: Connection) -> None:
        connection.within(None)
        address = self._open.pop(connection, None)
        if address is not None:
            self._of[address] -= 1
            if not self._of[address]:
                del self._of[address]

    def _close_idle(self, address: str | None) -> bool:
        """Closes the connection, of an address or of any, that has waited longest for a request."""
        idle = [one for one, own in self._open.items() if one.waits_for_request and address in (None, own)]
        if idle:
            longest = min(idle, key=lambda one: one.since)
            self.leave(longest)
            longest.close()
        return bool(idle)


class Connection(asyncio.Protocol):
    """One connection. It waits for a request, then for the rest of its body, then for the end of the response."""

    inner: asyncio.Protocol
    _transport: asyncio.Transport

    def __init__(self, connections: Connections) -> None:
        self._all, self._loop = connections, asyncio.get_running_loop()
        self.since = time.monotonic()
        self.waits_for_request = True
        self._body_missing = self._headers_seen = False
        self._bytes, self._tail = 0, b""
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.inner.connection_made(transport)
        if transport.get_extra_info("sslcontext") is None and not self.accepted(transport):
            self._refuse(503, "Too many connections are open: try again later.")

    def accepted(self, transport: Any) -> bool:
        """Counts the connection in, and begins its deadlines. Returns False if there is no room for it."""
        self._transport = transport
        self.within(HEADER_SECONDS)
        peer = transport.get_extra_info("peername")
        return self._all.enter(self, str(peer[0]) if isinstance(peer, tuple) else "")

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.leave(self)
        self.resume_writing()
        self.inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._transport.is_closing():
            return
        before, in_headers, counted = self._tail, not self._headers_seen, self._counted(data)
        self._bytes += counted
        if in_headers:
            data = UPGRADE.sub(rb"\g<0>-", before + data[:counted])[len(before) :] + data[counted:]
        if self._bytes <= (RAW_BODY_BYTES if self._body_missing else HEADER_BYTES):
            self.inner.data_received(data)
        elif self._body_missing and not self.waits_for_request:
            self._refuse(413, f"The body takes more than {RAW_BODY_BYTES:,} bytes.")
        elif self.waits_for_request and not self._body_missing:
            self._refuse(431, f"The headers of the request take more than {HEADER_BYTES:,} bytes.")
        else:  # a message would stand within the response to a request, or behind it, as the response to the next one
            self.close()

    def eof_received(self) -> bool | None:
        return self.inner.eof_received()

    def pause_writing(self) -> None:
        self._unread = self._loop.call_later(UNREAD_SECONDS, self._transport.abort)
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
        self.inner.resume_writing()

    def headed(self, has_body: bool) -> None:
        """Notes that the headers of a request are complete."""
        self.waits_for_request, self._headers_seen, self._body_missing = False, True, has_body
        self._bytes = 0
        self.within(BODY_SECONDS if has_body else None)

    def read(self) -> None:
        """Notes that the body of the request is complete: what comes next is another request."""
        if self._body_missing:
            self._body_missing, self._bytes = False, 0
            self.within(None)

    def answered(self) -> None:
        """Notes that the response is complete. A body that nobody read may still arrive."""
        self.since = time.monotonic()
        self.waits_for_request, self._headers_seen, self._tail = True, False, b""
        self.within(BODY_SECONDS if self._body_missing else HEADER_SECONDS)

    def close(self) -> None:
        self._transport.close()

    def _counted(self, data: bytes) -> int:
        """Bytes of the data that count: behind the end of the headers, only once the application has begun."""
        if not self.waits_for_request or self._body_missing:
            return len(data)
        if self._headers_seen:
            return 0
        tail = self._tail
        seen = tail + data if tail else data.lstrip(b"\r\n")  # parsers skip empty lines before a request
        end = seen.find(SEPARATOR)
        self._headers_seen, self._tail = end >= 0, seen[-len("\r\nupgrade") :]
        return (len(seen) if end < 0 else end + len(SEPARATOR)) - len(tail)

    def within(self, seconds: float | None) -> None:
        """Replaces the deadline, at which the connection is closed."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self._loop.call_later(seconds, self.close)

    def _refuse(self, status: int, message: str) -> None:
        body = json.dumps(ApiError(message).body)
        head = f"HTTP/1.1 {status} Refused\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self._transport.write(f"{head}connection: close\r\nretry-after: 1\r\n\r\n{body}".encode())
        self._transport.close()


class Handshake(asyncio.Protocol):
    """The TLS handshake before a connection. It is counted from its first byte on, of which uvicorn never hears."""

    def __init__(self, context: ssl.SSLContext, connection: Connection, connections: Connections) -> None:
        self._context, self._connection, self._all = context, connection, connections
        self._held = b""  # arrived with the end of the handshake

    def connection_made(self, transport: Any) -> None:
        if self._connection.accepted(transport):
            transport.pause_reading()  # until TLS reads
            self._task = asyncio.get_running_loop().create_task(self._agree(transport))  # a loop holds tasks weakly
        else:
            transport.close()

    def data_received(self, data: bytes) -> None:
        self._held += data

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.leave(self._connection)

    async def _agree(self, transport: asyncio.Transport) -> None:
        tls = partial(asyncio.get_running_loop().start_tls, transport, self, self._context, server_side=True)
        try:
            secured = await tls(ssl_handshake_timeout=HEADER_SECONDS, ssl_shutdown_timeout=HEADER_SECONDS)
        except OSError:  # no TLS, a client that left or waited, a certificate that it refuses
            secured = None
        if secured is None or secured.is_closing():
            return self._all.leave(self._connection)
        secured.set_protocol(self._connection)
        self._connection.connection_made(secured)
        if self._held:
            self._connection.data_received(self._held)


# Requests ----------------------------------------------------------------------------------------------------

SECURITY_HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
PUBLIC = {"/health", *page_paths()}
"""Paths that need no key, if the server has keys."""
MOST_CLIENTS = 10_000  # whose rates are remembered
PACE, BURST = 250, 50
"""Requests of one client that are begun in a second, and how many may come at once before; `UNIT_BYTES` of a body count
as one more. Each takes the interpreter from the engine for a moment; further ones wait."""
UNIT_BYTES = 1 << 14


@dataclass(frozen=True)
class Gate:
    """Who may come in, and how often."""

    hosts: Hosts
    """The accepted host names."""
    keys: Keys | None = None
    """The keys that are accepted; None for no keys."""
    log: Callable[[str], None] | None = None
    """Takes a JSON line for each request when it has ended; no line has text of a prompt or a reply."""
    per_minute: int = 0
    """POST requests a minute on average of the holder of a key, up to as many at once after a pause; 0 for any number.
    Without keys, this and `at_once` count by the client's address."""
    at_once: int = 0
    """The most POST requests that a holder may have open at the same time; 0 for any number."""
    origins: Sequence[str] = ()
    """Web pages of these origins may use the API in a browser."""
    trusted: Sequence[str] = ()
    """Addresses or networks of proxies, whose X-Forwarded-For is believed."""


class Pace:
    """Lets each client begin `per_second` requests, `burst` more at once before (ATM's generic cell rate algorithm)."""

    def __init__(self, per_second: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second, self._burst, self._clock = per_second, burst, clock
        self._next: dict[str, float] = {}  # client → when its next request may begin, without its burst

    def wait(self, client: str, cost: int = 1, patient: bool = True) -> float:
        """Seconds after which a request may begin. It counts, unless it is refused: a client that is not patient."""
        now = self._clock()
        at = max(self._next.pop(client, -math.inf), now - self._burst / self._per_second)
        wait = max(0.0, at - now)
        # Put last: the first client is the one that has been silent for longest. A forgotten one has its burst again.
        self._next[client] = at + cost / self._per_second if patient or not wait else at
        if len(self._next) > MOST_CLIENTS:
            self._next.pop(next(iter(self._next)))
        return wait


def _too_many(why: str, seconds: int) -> ApiError:
    message = f"Too many requests: {why}. Try again in {seconds} s."
    code = "rate_limit_exceeded"
    return ApiError(message, status=429, kind="rate_limit_error", code=code, retry_after=seconds)


class Frontier:
    """Middleware. gate: Who may come in."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        every = dict.fromkeys(("allow_methods", "allow_headers", "expose_headers"), ["*"])
        cors = partial(CORSMiddleware, allow_origins=gate.origins, max_age=600, **every)
        self._shared: Callable[[ASGIApp], ASGIApp] = cors if gate.origins else lambda app: app
        self._app, self._gate = self._shared(app), gate
        self._pace = Pace(PACE, BURST)
        self._rate = Pace(gate.per_minute / 60, gate.per_minute - 1) if gate.per_minute else None
        self._open: Counter[str] = Counter()  # POST requests of each client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers, keys = Headers(scope=scope), self._gate.keys
        holder = None if keys is None else keys.holder(headers.get("authorization", ""))
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "id": f"req_{uuid.uuid4().hex}",
            "key": holder,
            "method": scope["method"],
            "path": scope["path"],
            "status": 499,  # the client left before there was an answer
        }
        start = time.perf_counter()

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update({**SECURITY_HEADERS, "x-request-id": line["id"]})
                line["status"] = message["status"]
            await send(message)

        client = holder or (scope["client"] or ("",))[0]
        counted = False
        try:
            length = headers.get("content-length", "0")
            known = length.isdecimal() and len(length) < 10 and "transfer-encoding" not in headers
            size = min(int(length), MAX_BODY_BYTES) if known else MAX_BODY_BYTES
            if seconds := self._pace.wait(client, 1 + size // UNIT_BYTES):
                await asyncio.sleep(seconds)
            refusal = self._refusal(headers.get("host", ""), scope["path"], holder, scope["method"])
            if refusal is None and scope["method"] == "POST":
                refusal = self._excess(client)
                counted = refusal is None
            app = self._app if refusal is None else self._shared(error_response(refusal))
            try:
                await app(scope, receive, send_with_headers)
            except Exception as error:  # uvicorn logs it
                if line["status"] == 499:
                    failed = self._shared(error_response(as_api_error(error)))
                    await failed(scope, receive, send_with_headers)
                raise
        finally:
            if counted:
                self._open[client] -= 1
                if not self._open[client]:
                    del self._open[client]
            if self._gate.log is not None:
                self._gate.log(json.dumps(line | {"seconds": round(time.perf_counter() - start, 4)}))

    def _excess(self, client: str) -> ApiError | None:
        """The error of a request of a client that has too many; without an error, the request is counted."""
        if self._gate.at_once and self._open[client] >= self._gate.at_once:
            return _too_many(f"{self._gate.at_once} of your requests are open already", 1)
        if self._rate is not None and (wait := self._rate.wait(client, patient=False)):
            return _too_many(f"you may make {self._gate.per_minute} requests a minute", max(1, math.ceil(wait - 1e-6)))
        self._open[client] += 1
        return None

    def _refusal(self, host: str, path: str, holder: str | None, method: str) -> ApiError | None:
        if host not in self._gate.hosts:
            named = f"for {host.partition(':')[0]!r}: name it with --allowed-hosts" if host else "without a Host header"
            return ApiError(f"This server does not answer {named}.", status=403, code="foreign_host")
        # A browser asks with OPTIONS, without a key, whether a page of another origin may send its request.
        if self._gate.keys is not None and holder is None and path not in PUBLIC and method != "OPTIONS":
            message = "The API key is missing or wrong: send 'Authorization: Bearer KEY'."
            return ApiError(message, status=401, code="invalid_api_key", kind="authentication_error")
        return None
