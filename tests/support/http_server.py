"""A real server in two threads, on a free loopback port, for the tests that talk to it over a socket."""

import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette

from quern.serve.server import configure

web = httpx.Client(verify=False, trust_env=False, timeout=60, limits=httpx.Limits(max_keepalive_connections=0))
"""A client of plain HTTP, a connection for each request. `httpx.get` loads all certificates each time: 25 ms."""


def counters(url: str) -> dict[str, float]:
    """The values of a server's /metrics by name, without the name of the model, the prefix and the buckets."""
    found: dict[str, float] = {}
    for name, labels, value in re.findall(r"^quern:(\S+?)\{(.*?)\} (\S+)$", web.get(f"{url}/metrics").text, re.M):
        reason = re.search(r'finished_reason="(\w+)"', labels)
        if "le=" not in labels:
            found[f"{name} {reason[1]}" if reason else name] = float(value)
    return found


@contextmanager
def running(app: Starlette, **more: Any) -> Iterator[str]:
    """Yields the base URL, "http://127.0.0.1:PORT"; stops the server afterwards. more: as in `configure`."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        server = uvicorn.Server(configure(app, timeout_graceful_shutdown=2, **more))
        threading.Thread(target=app.state.models.run, name="quern-engines", daemon=True).start()
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        deadline = time.monotonic() + 30
        while not server.started:
            assert thread.is_alive() and time.monotonic() < deadline, "the server did not start"
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive(), "the server did not stop"
