"""A small Hugging Face Hub on loopback: the listing of data sets, and files that are answered by another host."""

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34


@dataclass
class Hub:
    """What the server has and was asked for.

    Args:
        url: Its address.
        sets: OWNER/NAME → path → bytes.
        cards: OWNER/NAME → the list `configs` of the card.
        revisions: Those that exist besides the default one.
        token: Needed for every set, if it is not empty.
        digests: Whether the listing has the SHA-256 of files.
        cut: The first answer of a file breaks off after so many bytes; 0 for never.
        held: OWNER/NAME/PATH of a file whose second half trickles until `released` is set.
        released: Lets the second half through.
        asked: (path, authorization) of each request.
    """

    url: str
    sets: dict[str, dict[str, bytes]] = field(default_factory=dict)
    cards: dict[str, list[Any]] = field(default_factory=dict)
    revisions: tuple[str, ...] = ()
    token: str = ""
    digests: bool = True
    cut: int = 0
    held: str = ""
    released: threading.Event = field(default_factory=threading.Event)
    asked: list[tuple[str, str | None]] = field(default_factory=list)

    def files_asked(self) -> list[str]:
        """The paths of the files that were sent, in order."""
        return [path.partition("/cdn/")[2] for path, _ in self.asked if path.startswith("/cdn/")]


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
            hub.asked.append((path, authorization))
            root, *parts = path.strip("/").split("/")
            if root == "cdn":
                return self.file(hub.sets["/".join(parts[:2])]["/".join(parts[2:])], "/".join(parts) == hub.held)
            if hub.token and authorization != f"Bearer {hub.token}":
                return self.answer(401, b"{}", X_Error_Code="GatedRepo", X_Error_Message="the set is gated")
            name = "/".join(parts[1:3]) if root == "api" else "/".join(parts[:2])
            if root not in ("api", "datasets") or name not in hub.sets:
                return self.answer(404, b"{}", X_Error_Code="RepoNotFound")
            if root == "datasets":  # datasets/OWNER/NAME/resolve/COMMIT/PATH
                file = "/".join(parts[4:])
                digest = hashlib.sha256(hub.sets[name][file]).hexdigest()
                host = f"http://localhost:{urlsplit(hub.url).port}"
                return self.answer(302, b"", Location=f"{host}/cdn/{name}/{file}", X_Linked_Etag=f'"{digest}"')
            if parts[3:4] == ["revision"] and "/".join(parts[4:]) not in hub.revisions:
                return self.answer(404, b"{}", X_Error_Code="RevisionNotFound")
            return self.answer(200, json.dumps(self.listing(name)).encode())

        def listing(self, name: str) -> dict[str, Any]:
            files = [{"rfilename": "README.md", "size": 9, "blobId": "0" * 40}]
            for file, body in hub.sets[name].items():
                lfs = {"sha256": hashlib.sha256(body).hexdigest(), "size": len(body), "pointerSize": 130}
                files.append({"rfilename": file, "size": len(body), "blobId": "1" * 40, "lfs": lfs})
                if not hub.digests:
                    del files[-1]["lfs"]
            card = {"configs": hub.cards[name]} if name in hub.cards else {}
            return {"id": name, "sha": COMMIT, "siblings": files, "cardData": card, "tags": [], "private": False}

        def file(self, body: bytes, held: bool) -> None:
            wanted = self.headers.get("Range")
            start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
            self.send_header("Content-Length", str(len(body) - start))
            self.send_header("ETag", '"one"')
            self.end_headers()
            end = len(body) if start or not hub.cut else hub.cut
            if held:
                with suppress(OSError):  # the client has gone
                    while start < end and not hub.released.is_set():
                        step = max(1, len(body) // 2 - start)
                        self.wfile.write(body[start : start + step])
                        start += step
                        hub.released.wait(0.02)
            with suppress(OSError):
                self.wfile.write(body[start:end])

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
