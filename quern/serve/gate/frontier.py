"""The first checks of every request: host names, API keys, rates, security headers, the access log."""

from __future__ import annotations

import asyncio
import json
import math
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quern.serve.answers import error_response
from quern.serve.errors import ApiError
from quern.serve.gate.hosts import Hosts
from quern.serve.gate.keys import Keys
from quern.serve.page import page_paths
from quern.serve.routes import MAX_BODY_BYTES

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

    hosts: Hosts | None = None
    """The accepted host names; None for any."""
    keys: Keys | None = None
    """The keys that are accepted; None for no keys."""
    log: Callable[[str], None] | None = None
    """Takes a JSON line for each request when it has ended; no line has text of a prompt or a reply."""
    per_minute: int = 0
    """The most POST requests that the holder of a key may make in a minute; 0 for any number. Without keys, this and
    `at_once` count by the client's address."""
    at_once: int = 0
    """The most POST requests that a holder may have open at the same time; 0 for any number."""
    origins: Sequence[str] = ()
    """Web pages of these origins may use the API in a browser."""
    trusted: Sequence[str] = ()
    """Addresses or networks of proxies, whose X-Forwarded-For is believed."""


class Pace:
    """Lets `per_second` requests of each client begin, `burst` more at once before (ATM's generic cell rate
    algorithm)."""

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
        self._app, self._gate = app, gate
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
            app = self._app if refusal is None else error_response(refusal)
            await app(scope, receive, send_with_headers)
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
        if self._gate.hosts is not None and host not in self._gate.hosts:
            message = f"This server does not answer for the host {host!r}: name it with --allowed-hosts."
            return ApiError(message, status=403, code="foreign_host")
        # A browser asks with OPTIONS, without a key, whether a page of another origin may send its request.
        if self._gate.keys is not None and holder is None and path not in PUBLIC and method != "OPTIONS":
            message = "The API key is missing or wrong: send 'Authorization: Bearer KEY'."
            return ApiError(message, status=401, code="invalid_api_key", kind="authentication_error")
        return None
