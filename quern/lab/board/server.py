"""The HTTP server of the board: a fixed set of pages and two questions, on loopback by default.

    GET  /report/RUN               the page that `quern report` wrote
    POST /api/manage               renames or removes a run, for a client on this machine
    GET  /api/list[?study=NAME]    runs or trials, their status, recipes and last values; tables of the study
    POST /api/curves               points that the page does not have yet (`Board.curves`)

No path of a request is opened. A request for another host name is refused, so that a page of another site cannot read
the records through a name that resolves to 127.0.0.1.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from quern.lab.board.reader import Board, NotFound
from quern.lab.options import BoardOptions
from quern.serve.access import Hosts

MAX_BODY_BYTES = 4 << 20
WEB = Path(__file__).parent / "web"
TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
FILES = "board.css board.js curves.js plot.js state.js tables.js views.js icon.svg vendor/uPlot.js vendor/uPlot.css"
PAGE = {"/": "index.html", **{f"/{name}": name for name in FILES.split()}}
"""Path → file below `WEB`."""
SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
REPORT_POLICY = SECURITY_HEADERS | {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}


class Server(ThreadingTCPServer):
    """Answers for one output folder. Bound when it is created; `serve_forever` runs it."""

    # HTTPServer would look up the host's full name, which can take seconds.
    allow_reuse_address = daemon_threads = True

    def __init__(self, options: BoardOptions) -> None:
        """Raises OSError if the address cannot be used; the message names the flags."""
        self.board = Board(options.out)
        self.hosts = Hosts(options.host)
        try:
            found = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0]
            self.address_family = found[0]
            super().__init__((options.host, options.port), Handler)
        except OSError as error:
            raise OSError(
                f"cannot serve at {options.host}:{options.port} ({error.strerror}): choose another --port or --host"
            ) from error

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints no traceback for a client that has left."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://[{host!s}]:{port}" if ":" in str(host) else f"http://{host!s}:{port}"


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    timeout = 60
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        if self.headers.get("Host", "") not in self.server.hosts:
            self.close_connection = True  # the body, if any, was not read
            return self._error(403, "this server does not answer for that host name")
        try:
            (self._get if self.command == "GET" else self._post)()
        except NotFound as error:
            self._error(404, str(error) or "there is no such page")
        except (ValueError, OSError) as error:
            self._error(400, str(error))

    do_POST = do_GET

    def _get(self) -> None:
        url = urlsplit(self.path)
        if url.path == "/api/list":
            study = parse_qs(url.query).get("study", [None])[0]
            return self._json(self.server.board.listing(study))
        if url.path.startswith("/report/"):
            content = self.server.board.report(unquote(url.path.removeprefix("/report/")))
            return self._send(200, "text/html; charset=utf-8", content, REPORT_POLICY)
        if url.path not in PAGE:
            raise NotFound
        file = PAGE[url.path]
        self._send(200, TYPES[file.rpartition(".")[2]], (WEB / file).read_bytes())

    def _post(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            self.close_connection = True
            raise ValueError(f"send a body of at most {MAX_BODY_BYTES:,} bytes with its Content-Length")
        content = self.rfile.read(int(length))
        asked = {"/api/curves": self.server.board.curves, "/api/manage": self.server.board.manage}.get(self.path)
        if asked is None:
            raise NotFound
        if self.headers.get_content_type() != "application/json":  # other sites cannot send this type unasked
            raise ValueError("send the body as JSON, with the header 'Content-Type: application/json'")
        try:
            request = json.loads(content)
        except (ValueError, RecursionError):
            request = None
        if not isinstance(request, dict):
            raise ValueError("send a JSON object")
        if self.path == "/api/manage" and not ipaddress.ip_address(self.client_address[0]).is_loopback:
            raise ValueError("runs are renamed and removed on the machine that has them: quern runs")
        self._json(asked(request))

    def _json(self, body: Any, status: int = 200) -> None:
        self._send(status, "application/json", json.dumps(body, allow_nan=False).encode("ascii"))

    def _error(self, status: int, message: str) -> None:
        self._json({"error": message}, status)

    def _send(self, status: int, media_type: str, content: bytes, more: Mapping[str, str] = SECURITY_HEADERS) -> None:
        self.send_response(status)
        headers = {"Content-Type": media_type, "Content-Length": str(len(content)), "Cache-Control": "no-store"}
        for name, value in {**headers, **more}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def version_string(self) -> str:
        return "quern"

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: the page sends one every two seconds."""


def run(options: BoardOptions, log: Callable[[str], None]) -> int:
    """Serves the board until Ctrl-C; returns the exit code."""
    if not options.out.is_dir():
        raise FileNotFoundError(f"there is no folder {options.out}: name the output folder of your runs with --out")
    with Server(options) as server:
        threading.Thread(target=server.board.listing, daemon=True).start()  # while the user opens the browser
        log(f"the board of {options.out} is at {server.url} (Ctrl-C stops it)")
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            log("stopped")
    return 0
