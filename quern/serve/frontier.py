"""What every request passes first: the host names that are answered for, API keys, security headers, the access log."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quern.serve.answers import error_response
from quern.serve.schema import ApiError

SECURITY_HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
GUARDED = ("/v1/", "/tokenize", "/detokenize", "/metrics", "/welcome")
"""Paths that need a key, if the server has keys. The page's files and /health are public."""


class Keys:
    """API keys, of which only the SHA-256 hashes are known. hashes: hash → the holder's name."""

    def __init__(self, hashes: Mapping[bytes, str]) -> None:
        self._hashes = dict(hashes)

    @classmethod
    def read(cls, path: Path) -> Keys:
        """Reads a file with a hash in hexadecimal and a name in each line; "#" begins a comment.

        Raises:
            OSError: The file cannot be read.
            ValueError: A line is not a hash and a name, or there is none.
        """
        hashes = {}
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            if not re.fullmatch(r"[0-9a-fA-F]{64}", words[0]) or len(words) != 2:
                raise ValueError(f"{path}:{number}: write the SHA-256 hash of a key, then its holder's name")
            hashes[bytes.fromhex(words[0])] = words[1]
        if not hashes:
            raise ValueError(f"{path} has no key: write the SHA-256 hash of a key, then its holder's name")
        return cls(hashes)

    def holder(self, authorization: str) -> str | None:
        """The name of the holder of the key in an Authorization header; None for a missing or wrong key."""
        kind, _, key = authorization.partition(" ")
        asked = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found = [name for known, name in self._hashes.items() if hmac.compare_digest(known, asked)]
        return found[0] if found and kind.lower() == "bearer" else None


class Frontier:
    """Middleware.

    Args:
        app: The application.
        hosts: The accepted host names; None for any.
        keys: The keys that are accepted; None for no keys.
        log: Takes a JSON line for each request when it has ended; no line has text of a prompt or a reply.
    """

    def __init__(
        self,
        app: ASGIApp,
        hosts: Sequence[str] | None,
        keys: Keys | None = None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self._app, self._keys, self._log = app, keys, log
        self._hosts = None if hosts is None else {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        holder = None if self._keys is None else self._keys.holder(headers.get("authorization", ""))
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

        try:
            refusal = self._refusal(headers.get("host", ""), scope["path"], holder)
            app = self._app if refusal is None else error_response(refusal)
            await app(scope, receive, send_with_headers)
        finally:
            if self._log is not None:
                self._log(json.dumps(line | {"seconds": round(time.perf_counter() - start, 4)}))

    def _refusal(self, host: str, path: str, holder: str | None) -> ApiError | None:
        if self._hosts is not None and host_name(host) not in self._hosts:
            return ApiError(f"This server does not answer for the host {host!r}.", status=403, code="foreign_host")
        if self._keys is not None and holder is None and path.startswith(GUARDED):
            message = "The API key is missing or wrong: send 'Authorization: Bearer KEY'."
            return ApiError(message, status=401, code="invalid_api_key", kind="authentication_error")
        return None


def host_name(host: str) -> str:
    """The host name in a Host header, in lower case, without port and brackets."""
    name = host.partition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    return name.lower()
