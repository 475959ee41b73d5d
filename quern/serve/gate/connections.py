"""Bounds on connections: bytes of headers, seconds for each part of a request, connections of one address and in all.

uvicorn's parsers bound none of these. A `Connection` stands between the socket and uvicorn's protocol: it counts bytes
and keeps deadlines. `Connections.follow` is ASGI middleware that tells it how far the request is.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from quern.serve.routes import MAX_BODY_BYTES

HEADER_BYTES = 1 << 16
RAW_BODY_BYTES = 2 * MAX_BODY_BYTES  # chunk sizes, extensions and trailers included
MOST_CONNECTIONS = 4096
SEPARATOR = b"\r\n\r\n"


class Deadlines(NamedTuple):
    """Seconds after which a connection is closed."""

    headers: float = 10.0
    """From the connection, or the last response, to the end of a request's headers."""
    body: float = 60.0
    """From the end of the headers to the end of the body."""
    unread: float = 60.0
    """For how long a client may leave a response unread."""


ORDINARY = Deadlines()


class Connections:
    """Every open connection of a server. A proxy, in `trusted`, may have all connections, another address half of them.
    When all are taken, the one that has waited longest for a request is closed for a new one. parse: makes uvicorn's
    protocol."""

    def __init__(
        self,
        trusted: Sequence[str] = (),
        most: int | None = None,
        deadlines: Deadlines = ORDINARY,
        parse: Callable[..., asyncio.Protocol] = AutoHTTPProtocol,
    ) -> None:
        self.deadlines, self._parse = deadlines, parse
        self._trusted = [ipaddress.ip_network(one) for one in trusted]
        self._most = most or max(8, min(MOST_CONNECTIONS, os.sysconf("SC_OPEN_MAX") // 2))
        self._open: dict[Connection, str] = {}
        self._of: Counter[str] = Counter()

    def make(self, *, app_state: dict[str, Any], **how: Any) -> asyncio.Protocol:
        """Makes the protocol of a new connection, in the place of uvicorn's `http` class."""
        connection = Connection(self)
        connection.inner = self._parse(app_state={**app_state, "connection": connection}, **how)
        return connection

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

    def __init__(self, connections: Connections) -> None:
        self._all, self._loop = connections, asyncio.get_running_loop()
        self.since = time.monotonic()
        self.waits_for_request = True
        self._body_missing = self._headers_seen = False
        self._bytes, self._tail = 0, b""
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport: asyncio.Transport = transport  # uvloop's is none by class
        self.inner.connection_made(transport)
        peer = transport.get_extra_info("peername")
        if not self._all.enter(self, str(peer[0]) if isinstance(peer, tuple) else ""):
            self._refuse(503, "Too many connections are open: try again later.")
        self._within(self._all.deadlines.headers)

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.leave(self)
        self._within(None)
        self.resume_writing()
        self.inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._transport.is_closing():
            return
        self._bytes += self._counted(data)
        if self._bytes <= (RAW_BODY_BYTES if self._body_missing else HEADER_BYTES):
            self.inner.data_received(data)
        elif self._body_missing:
            self._refuse(413, f"The body takes more than {RAW_BODY_BYTES:,} bytes.")
        elif self.waits_for_request:
            self._refuse(431, f"The headers of the request take more than {HEADER_BYTES:,} bytes.")
        else:  # further requests behind one that is being answered: a message would stand within its response
            self.close()

    def eof_received(self) -> bool | None:
        return self.inner.eof_received()

    def pause_writing(self) -> None:
        self._unread = self._loop.call_later(self._all.deadlines.unread, self._transport.abort)
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
        self.inner.resume_writing()

    def headed(self, has_body: bool) -> None:
        """Notes that the headers of a request are complete."""
        self.waits_for_request, self._headers_seen, self._body_missing = False, True, has_body
        self._bytes = 0
        self._within(self._all.deadlines.body if has_body else None)

    def read(self) -> None:
        """Notes that the body of the request is complete: what comes next is another request."""
        if self._body_missing:
            self._body_missing, self._bytes = False, 0
            self._within(None)

    def answered(self) -> None:
        """Notes that the response is complete. A body that nobody read may still arrive."""
        self.since = time.monotonic()
        self.waits_for_request, self._headers_seen, self._tail = True, False, b""
        self._within(self._all.deadlines.body if self._body_missing else self._all.deadlines.headers)

    def close(self) -> None:
        self._transport.close()

    def _counted(self, data: bytes) -> int:
        """Bytes of the data that count: behind the end of the headers, only once the application has begun."""
        if not self.waits_for_request or self._body_missing:
            return len(data)
        if self._headers_seen:
            return 0
        if not self._tail:
            data = data.lstrip(b"\r\n")  # parsers skip empty lines before a request
        seen = self._tail + data
        end = seen.find(SEPARATOR)
        self._headers_seen = end >= 0
        counted = len(data) if end < 0 else end + len(SEPARATOR) - len(self._tail)
        self._tail = seen[-len(SEPARATOR) + 1 :]
        return counted

    def _within(self, seconds: float | None) -> None:
        """Replaces the deadline, at which the connection is closed."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self._loop.call_later(seconds, self.close)

    def _refuse(self, status: int, message: str) -> None:
        body = json.dumps({"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}})
        head = f"HTTP/1.1 {status} Refused\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self._transport.write(f"{head}connection: close\r\nretry-after: 1\r\n\r\n{body}".encode())
        self._transport.close()
