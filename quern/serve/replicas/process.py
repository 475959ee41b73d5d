"""One replica, a child process: the server on a Unix socket, which the router alone can reach.

It ends like a server that gets SIGTERM when its parent closes its standard input, or dies.
"""

from __future__ import annotations

import socket
import threading
from pathlib import Path

from quern import child
from quern.kernels.attention.autotune import select_attention
from quern.machine import detect
from quern.runs.run_dir import RunDir
from quern.serve.command import Source, open_app
from quern.serve.gate.frontier import Gate
from quern.serve.server import serve
from quern.serve.worker import Limits

WAITING_CONNECTIONS = 2048


def main() -> None:
    order, requests = child.orders()
    threading.Thread(target=child.end_with_parent, args=(requests,), daemon=True).start()
    with child.replying() as reply:
        machine = select_attention(detect(**order["machine"]))
        sources = {
            name: Source(RunDir(Path(out), run), stage, machine, megabytes)
            for name, (out, run, stage, megabytes) in order["sources"].items()
        }
        path = Path(order["path"])
        path.unlink(missing_ok=True)  # of the process before
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(path))
            listener.listen(WAITING_CONNECTIONS)
            limits = Limits(seconds=order["request_seconds"])
            app = open_app(
                sources, Gate(), limits, lambda line: reply({"log": line}), watch_seconds=order["watch_seconds"]
            )
            reply({"ready": True})
            serve(app, listener, app.state.models.thread)


if __name__ == "__main__":
    main()
