"""The board: its answers, from files alone, and the HTTP server that gives them, on loopback by default.

    GET  /report/RUN               the page that `quern report` wrote
    POST /api/manage               renames or removes a run, for a client on this machine
    GET  /api/list[?study=NAME]    runs or trials, their status, recipes and last values; tables of the study
    POST /api/curves               points that the page does not have yet (`Board.curves`)

Every answer but the page and a report is JSON. The name of a run in a request is compared with the runs that were
found before it becomes a path; `RunDir` checks the new name of a run. A request for another host name is refused, so
that a page of another site cannot read the records through a name that resolves to 127.0.0.1.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from quern.lab.board.reader import KINDS, Entry, Run, StudyRecords, is_number
from quern.lab.options import BoardOptions
from quern.records import METRICS, read_regular
from quern.runs import manage
from quern.runs.run_dir import STAGES, RunDir
from quern.serve.access import Hosts
from quern.train.metrics import CURVES, RL_CURVES

REPORT = "report.html"
OVERVIEW_POINTS, MOST_POINTS = 32, 2000  # lines sampled from each run before any curve is asked for, and at most
AXES = ("steps", "tokens", "flops", "seconds")
LABELS = {curve.key: [f"{curve.title}, {curve.unit}", curve.share] for curve in (*RL_CURVES, *CURVES)}
"""Metric → its name for readers, and whether it is a share."""


class NotFound(Exception):
    """A request names something that is not there."""


class Board:
    """The answers of the server. Several threads may ask. out: the output folder."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self._lock = threading.Lock()
        self._runs: dict[str, Run] = {}
        self._studies: dict[str, StudyRecords] = {}

    def listing(self, study: str | None = None) -> dict[str, Any]:
        """All runs, or all trials of a study, with status and last values. Raises NotFound."""
        with self._lock:
            self._scan()
            entries = self._entries(study)
            recipes = [entry.recipe for entry in entries.values()]
            first = recipes[0] if recipes else {}  # the fields that all recipes have with one value are told apart
            constant = {k: v for k, v in first.items() if all(k in one and one[k] == v for one in recipes)}
            last = [entry.curve.last for entry in entries.values()]
            drawn = {name for values in last for name, value in values.items() if is_number(value)}
            body = {
                "folder": str(self.out),
                "studies": sorted(self._studies),
                "kinds": {name: study.kind for name, study in self._studies.items()},
                "metrics": sorted(drawn - {"step", *AXES}),
                "labels": LABELS,
                "constant": constant,
                "runs": [_shown(name, entry, constant) for name, entry in entries.items()],
            }
            return body | (self._studies[study].tables() if study is not None else {})

    def curves(self, request: dict[str, Any]) -> dict[str, Any]:
        """The points of some entries that the page does not have yet."""
        x, y, asked, points = (request.get(name) for name in ("x", "y", "runs", "points"))
        if x not in AXES or not isinstance(y, str) or not isinstance(asked, dict) or not isinstance(points, int):
            raise ValueError(f"send x (one of {', '.join(AXES)}), y, points and runs")
        points = min(max(points, 2), MOST_POINTS)
        found: dict[str, Any] = {}
        with self._lock:
            entries, now = self._entries(request.get("study")), time.time()
            for name, known in asked.items():
                entry = entries.get(name)
                if entry is None or not (isinstance(known, list) and len(known) == 2 and all(map(is_number, known))):
                    continue
                if isinstance(entry, Run):
                    entry.refresh(points, now)
                fresh = known[0] != entry.curve.identity
                xs, ys = entry.points(x, y, 0 if fresh else int(known[1]))
                at = [entry.curve.identity, entry.curve.end]
                if fresh or at != known:
                    found[name] = {"at": at, "fresh": fresh, "x": xs, "y": ys}
        return {"runs": found}

    def report(self, run: str) -> bytes:
        """The page of a run's report. Raises NotFound."""
        with self._lock:
            self._scan()
            folder = next((entry.folder.parent for entry in self._runs.values() if entry.name == run), None)
        if folder is None or not (folder / REPORT).exists():
            raise NotFound("there is no such report: `quern report` writes it")
        return read_regular(folder / REPORT)

    def manage(self, request: dict[str, Any]) -> dict[str, Any]:
        """Renames a run, or removes it. Raises ValueError if it is in use, or if the new name cannot be had."""
        action, run, to = request.get("action"), request.get("run"), request.get("to")
        with self._lock:
            self._scan()
            if not any(entry.name == run for entry in self._runs.values()):
                raise NotFound("there is no such run")
            told: list[str] = []
            if action == "rename" and isinstance(to, str) and to:
                manage.rename(RunDir(self.out, str(run)), RunDir(self.out, to), told.append)
            elif action == "remove":
                manage.remove(RunDir(self.out, str(run)), told.append)
            else:
                raise ValueError("send action (rename or remove), run, and for rename a name in to")
        return {"told": told}

    def _entries(self, study: Any) -> dict[str, Any]:
        if study is None:
            return self._runs
        if not isinstance(study, str) or study not in self._studies:
            raise NotFound("there is no such study")
        return self._studies[study].entries

    def _scan(self) -> None:
        now = time.time()
        found = (path.parent for path in self.out.glob(f"runs/*/*/{METRICS}"))  # under their run, as they are trained
        folders = sorted(found, key=lambda stage: (stage.parent.name, [*STAGES, stage.name].index(stage.name)))
        self._runs = {(name := f"{f.parent.name}/{f.name}"): self._runs.get(name) or Run(f) for f in folders}
        studies = {path.parent.name: path.parent for trials in KINDS for path in self.out.glob(f"lab/*/{trials}")}
        self._studies = {name: self._studies.get(name) or StudyRecords(path) for name, path in studies.items()}
        for run in self._runs.values():
            run.refresh(OVERVIEW_POINTS, now)
        for study in self._studies.values():
            study.refresh(now)


def _shown(name: str, entry: Entry, constant: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": name,
        "run": entry.name,
        "stage": entry.stage,
        "status": entry.status,
        "reason": entry.reason,
        "age": round(entry.age, 1),
        "steps": entry.steps,
        "damaged": entry.curve.damaged,
        "report": isinstance(entry, Run) and (entry.folder.parent / REPORT).exists(),
        "at": [entry.curve.identity, entry.curve.end],
        "last": {field: value for field, value in entry.curve.last.items() if is_number(value)},
        "recipe": {field: value for field, value in entry.recipe.items() if field not in constant},
    }


# The HTTP server --------------------------------------------------------------------------------------------


MAX_BODY_BYTES = 4 << 20
WEB = Path(__file__).parent / "web"
TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
FILES = "board.css board.js curves.js plot.js state.js tables.js views.js icon.svg vendor/uPlot.js vendor/uPlot.css"
PAGE = {"/": "index.html", **{f"/{name}": name for name in FILES.split()}}  # path → file below `WEB`
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
    request_queue_size = 128  # with Python's 5, a page that opens many connections at once waits for seconds

    def __init__(self, options: BoardOptions) -> None:
        """Raises OSError if the address cannot be used; the message names the flags."""
        self.board = Board(options.out)
        self.hosts = Hosts(options.host)
        try:
            self.address_family = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0][0]
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
            return self._json({"error": "this server does not answer for that host name"}, 403)
        try:
            (self._get if self.command == "GET" else self._post)()
        except NotFound as error:
            self._json({"error": str(error) or "there is no such page"}, 404)
        except (ValueError, OSError) as error:
            self._json({"error": str(error)}, 400)

    do_POST = do_GET

    def _get(self) -> None:
        url = urlsplit(self.path)
        if url.path == "/api/list":
            study = parse_qs(url.query).get("study", [None])[0]
            return self._json(self.server.board.listing(study))
        if url.path.startswith("/report/"):
            content = self.server.board.report(unquote(url.path.removeprefix("/report/")))
            return self._send(200, TYPES["html"], content, REPORT_POLICY)
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
