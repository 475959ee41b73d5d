"""A process that forks one child for each wait and signal, sends the signal, and prints what the child did.

    python tests/support/waits.py FOLDER LINES      prints {"wait/SIGNAL": {"code", "seconds", "said"}}

LINES, a JSON object, has the pattern of each wait's line, after which the signal is sent. Slow imports happen once. A
child runs its wait as a verb of `quern`, under the handlers of the command line.
"""

import fcntl
import json
import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from huggingface_hub import errors, get_session  # noqa: F401  (slow)

from quern.cli import main, summaries, verbs
from quern.machine import detect
from quern.process import to_stderr
from quern.stages.session import main_first
from quern.temporaries import alone_in
from quern.text import downloads
from quern.text.repositories import Repository
from quern.train import launch
from tests.support.line_server import forked
from tests.support.ranks import free_port

SIGNALS = (signal.SIGTERM, signal.SIGINT)
LONGEST_SECONDS = 40.0
SILENT = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc"
BUSY = b"HTTP/1.1 503 Busy\r\nRetry-After: 50\r\nContent-Length: 0\r\n\r\n"


def join(rank: int, port: int, body: Any = None) -> None:
    """A rank that a user started by hand."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    machine = detect(device="cpu", threads=1, compile=False)
    with launch.joined("quern wait", 1, lambda threads: machine, 1, 60.0) as (_, mesh):
        (body or (lambda mesh: None))(mesh)


def beside(port: int, body: Any) -> None:
    """Rank 1, beside a rank 0 that prepares something for a long time."""
    if os.fork() == 0:

        def prepare(mesh: Any) -> None:
            with main_first(mesh):
                time.sleep(LONGEST_SECONDS)

        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        join(0, port, prepare)
    join(1, port, body)


def follow(mesh: Any) -> None:
    with main_first(mesh):
        pass


def blocked(mesh: Any) -> None:
    """A collective in which rank 0 does not take part."""
    to_stderr("waiting for a collective")
    mesh.world.barrier()


def stalled(answer: bytes) -> int:
    """The port of a server that sends this and then nothing."""
    listener = socket.create_server(("127.0.0.1", 0))
    kept = []

    def serve() -> None:
        while True:
            connection = listener.accept()[0]
            kept.append(connection)
            connection.recv(65536)
            connection.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    return listener.getsockname()[1]


def download(folder: Path, answer: bytes) -> None:
    os.environ |= {"HF_ENDPOINT": f"http://127.0.0.1:{stalled(answer)}", "no_proxy": "*"}
    downloads.download(Repository("a/b", "0" * 40, {"text.txt": (9, None)}), "text.txt", folder / "text.txt")


def locked(folder: Path) -> None:
    (folder / ".lock").write_text("process 7 on elsewhere", encoding="utf-8")
    holder = os.open(folder / ".lock", os.O_RDWR)
    fcntl.flock(holder, fcntl.LOCK_EX)
    with alone_in(folder, to_stderr):
        pass


def jax_processes() -> None:
    from quern.grug.mesh import join_processes  # JAX must not start in the process that forks

    join_processes(f"127.0.0.1:{free_port()}", 2, 0)


WAITS = {
    "rank 0": lambda folder: join(0, free_port()),
    "a store that does not answer": lambda folder: join(1, stalled(b"")),
    "rank 0's preparation": lambda folder: beside(free_port(), follow),
    "a collective": lambda folder: beside(free_port(), blocked),
    "a lock": locked,
    "a silent server": lambda folder: download(folder, SILENT),
    "a busy server": lambda folder: download(folder, BUSY),
    "machines": lambda folder: launch.launch(["pretrain"], 1, 0, nodes=2, rendezvous=f"127.0.0.1:{free_port()}"),
    "processes of JAX": lambda folder: jax_processes(),
}


def run_child(name: str, folder: Path) -> int:
    folder.mkdir()
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    summaries.SUMMARIES["wait"] = "waits"
    verbs.VERBS["wait"] = lambda verb, rest: WAITS[name](folder)
    return main.main(["wait"])


def watch(name: str, line: str, which: signal.Signals, folder: Path) -> dict[str, Any]:
    said, found = folder.with_suffix(".said"), ""
    pid = forked(partial(run_child, name, folder), said)
    until = time.monotonic() + LONGEST_SECONDS
    while not re.search(f"^{line}$", found, re.M) and time.monotonic() < until and not os.waitpid(pid, os.WNOHANG)[0]:
        time.sleep(0.1)
        found = said.read_text(encoding="utf-8") if said.exists() else ""
    begun, status = time.monotonic(), None
    try:
        os.kill(pid, which)
        while time.monotonic() < begun + 6 and status is None:
            ended, code = os.waitpid(pid, os.WNOHANG)
            status = os.waitstatus_to_exitcode(code) if ended else None
            time.sleep(0.02)
        seconds = time.monotonic() - begun
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        seconds = time.monotonic() - begun
    return {"code": status, "seconds": seconds, "said": said.read_text(encoding="utf-8")}


def serve(folder: Path) -> dict[str, Any]:
    """All waits at once, each watched by a process of its own."""
    lines = json.loads(sys.argv[2])
    pairs = [(name, which) for name in WAITS for which in SIGNALS]
    with ProcessPoolExecutor(len(pairs), multiprocessing.get_context("fork")) as pool:
        found = [
            pool.submit(watch, name, lines[name], which, folder / f"{number}-{which.name}")
            for number, (name, which) in enumerate(pairs)
        ]
        return {f"{name}/{which.name}": one.result() for (name, which), one in zip(pairs, found, strict=True)}


if __name__ == "__main__":
    print(json.dumps(serve(Path(sys.argv[1]))))
