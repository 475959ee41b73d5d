"""A small Hugging Face Hub on loopback: the listing of data sets, and files that are answered by another host."""

import hashlib
import http.server
import io
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

COMMIT = "c0ffee" + "0" * 34


def parquet(rows: list[dict[str, Any]]) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


@dataclass
class Hub:
    """The contents of the server and the requests that it got."""

    url: str
    sets: dict[str, dict[str, bytes]] = field(default_factory=dict)  # OWNER/NAME → path → bytes
    others: dict[str, bytes] = field(default_factory=dict)  # path → bytes that are no data set's
    cards: dict[str, list[Any]] = field(default_factory=dict)  # OWNER/NAME → the list `configs` of the card
    revisions: tuple[str, ...] = ()  # that exist besides the default one
    token: str = ""  # needed for every set, if it is not empty
    digests: bool = True  # whether the listing has the SHA-256 of files
    sent: dict[str, bytes] = field(default_factory=dict)  # OWNER/NAME/PATH → other bytes than those that are listed
    statuses: list[int] = field(default_factory=list)  # of the next answers to requests for files, instead of the file
    busy: dict[str, str] = field(default_factory=dict)  # headers of these answers
    headers: dict[str, str] | None = None  # of files; None for an ETag, which is the SHA-256
    conditions: bool = True  # whether If-Range is obeyed
    # (first, last) byte of the rest of a file → those of the answer, and its other headers, without empty ones.
    rest: Callable[[int, int], tuple[int, int, dict[str, str]]] = lambda first, last: (first, last, {})
    cuts: list[int | None] = field(default_factory=list)  # the next files break off after so many bytes; None: whole
    asked: list[tuple[str, str | None, str | None]] = field(default_factory=list)  # (path, authorization, range)

    def files_asked(self) -> list[str]:
        """The paths of the files that were sent, in order."""
        return [path.partition("/cdn/")[2] for path, _, _ in self.asked if path.startswith("/cdn/")]


@contextmanager
def hub_server() -> Iterator[Hub]:
    hub = Hub("")

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def answer(self, status: int, body: bytes, **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            path, authorization = unquote(urlsplit(self.path).path), self.headers.get("Authorization")
            hub.asked.append((path, authorization, self.headers.get("Range")))
            root, *parts = path.strip("/").split("/")
            name = "/".join(parts[1:3]) if root == "api" else "/".join(parts[:2])
            if root == "cdn":
                file = "/".join(parts)
                body = hub.sets[name]["/".join(parts[2:])]
                return self.file(hub.sent.get(file, body))
            if path.strip("/") in hub.others:
                return self.file(hub.others[path.strip("/")])
            if hub.token and authorization != f"Bearer {hub.token}":
                return self.answer(401, b"{}", X_Error_Code="GatedRepo", X_Error_Message="the set is gated")
            if root not in ("api", "datasets") or name not in hub.sets:
                return self.answer(404, b"{}", X_Error_Code="RepoNotFound")
            if root == "datasets":  # datasets/OWNER/NAME/resolve/COMMIT/PATH
                host = f"http://localhost:{urlsplit(hub.url).port}"
                return self.answer(302, b"", Location=f"{host}/cdn/{name}/{'/'.join(parts[4:])}")
            if parts[3:4] == ["revision"] and "/".join(parts[4:]) not in hub.revisions:
                return self.answer(404, b"{}", X_Error_Code="RevisionNotFound")
            return self.answer(200, json.dumps(self.listing(name)).encode())

        def listing(self, name: str) -> dict[str, Any]:
            files: list[dict[str, Any]] = [{"rfilename": "README.md", "size": 9, "blobId": "0" * 40}]
            for file, body in hub.sets[name].items():
                lfs = {"sha256": hashlib.sha256(body).hexdigest(), "size": len(body), "pointerSize": 130}
                listed = {"rfilename": file, "size": len(body), "blobId": "1" * 40}
                files.append({**listed, "lfs": lfs} if hub.digests else listed)
            card = {"configs": hub.cards[name]} if name in hub.cards else {}
            return {"id": name, "sha": COMMIT, "siblings": files, "cardData": card, "tags": [], "private": False}

        def file(self, body: bytes) -> None:
            if hub.statuses and (status := hub.statuses.pop(0)) != 200:
                return self.answer(status, b"{}", **hub.busy)
            etag = {"ETag": f'"{hashlib.sha256(body).hexdigest()}"'}
            headers = {"Date": self.date_time_string()} | (etag if hub.headers is None else hub.headers)
            wanted, condition = self.headers.get("Range"), self.headers.get("If-Range")
            if hub.conditions and condition and condition not in headers.values():
                wanted = None
            start, last, more = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0, len(body) - 1, {}
            if wanted and start > last:
                return self.answer(416, b"")
            if wanted:
                start, last, more = hub.rest(start, last)
                headers["Content-Range"] = f"bytes {start}-{last}/{len(body)}"
            self.send_response_only(206 if wanted else 200)
            for name, value in ({**headers, "Content-Length": str(last + 1 - start)} | more).items():
                if value:
                    self.send_header(name, value)
            self.end_headers()
            cut = hub.cuts.pop(0) if hub.cuts else None
            with suppress(OSError):
                self.wfile.write(body[start : last + 1][:cut])

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
