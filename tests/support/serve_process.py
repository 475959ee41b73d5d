"""`quern serve` as a child process, with a run of a small random model: started, measured through /proc, stopped."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from quern.recipe import Resolved
from tests.support.exported import toy_recipe, write_run
from tests.support.line_server import ENVIRONMENT

RUN, MODEL = "first", "quern-first"
ON_CPU = "--no-compile --dtype fp32 --threads 1 --device cpu"


def small_recipe(context: int = 256) -> Resolved:
    """A `gpt` of two layers, the first with a short window. `exported.model_of` is its model, with random weights."""
    return toy_recipe("gpt", depth=2, context=context, windows="SL")


class Served:
    """A running server. pid: also the number of its process group, in which every child of the server is."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self.pid, self._log = process, process.pid, log
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")

    def wait_for_port(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not (found := re.search(r"^serving .* at http://127\.0\.0\.1:(\d+)$", self.log(), re.MULTILINE)):
            assert self.process.poll() is None and time.monotonic() < deadline, f"it did not start: {self.log()}"
            time.sleep(0.05)
        self.port = int(found[1])
        while self.refuses():  # the line is written before the event loop runs
            assert self.process.poll() is None and time.monotonic() < deadline, self.log()
            time.sleep(0.05)

    def refuses(self) -> bool:
        """Whether a new connection is refused."""
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=5).close()
        except ConnectionRefusedError:
            return True
        return False

    def resident_bytes(self) -> int:
        text = Path(f"/proc/{self.pid}/status").read_text(encoding="utf-8")
        return 1024 * int(re.findall(r"^VmRSS:\s+(\d+) kB$", text, re.MULTILINE)[0])

    def files(self) -> int:
        """Open files and sockets."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/task"))

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def left(self) -> bool:
        """Whether a process of the server is left after its end."""
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return False
        return True


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[Served]:
    """Starts a server on a free port; it may not listen yet: call `wait_for_port`. flags: of `quern serve`."""
    write_run(folder / "out", small_recipe())
    command = [sys.executable, "-m", "quern.cli.main", "serve", "--run", RUN, "--out", str(folder / "out")]
    log = folder / "serve.log"
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [*command, "--port", "0", *ON_CPU.split(), *flags],
            stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=ENVIRONMENT, start_new_session=True,
        )  # fmt: skip
    served = Served(process, log)
    try:
        yield served
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
