"""Runs a function on several ranks at once, in forked processes of one thread each that talk over gloo.

    python tests/support/ranks.py        a JSON request on each line of stdin, a JSON answer on each of stdout

A process of its own, so that what is slow to import is imported once and nothing is forked from a test's process,
which has threads. A request names a function `module:name` with arguments in JSON; it is called as
function(mesh, **arguments) on every rank, and what it returns (JSON) is the answer, rank by rank.
"""

import importlib
import json
import multiprocessing
import os
import socket
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.line_server import ROOT, LineServer


class Ranks(LineServer):
    """The server, from the outside: `ranks(2, "tests.module:function", tp=1, …)` → each rank's result."""

    def __init__(self) -> None:
        super().__init__([str(Path(__file__))])

    def __call__(self, ranks: int, function: str, tp: int = 1, zero: int = 2, **arguments: Any) -> list[Any]:
        """Raises AssertionError with every failed rank's traceback."""
        request = {"ranks": ranks, "tp": tp, "zero": zero, "function": function, "arguments": arguments}
        answers = self.ask(request, gone=[{"error": "the server of ranks is gone"}])
        failed = [f"rank {rank}: {one['error']}" for rank, one in enumerate(answers) if "error" in one]
        assert not failed, "\n".join(failed)
        return [one["result"] for one in answers]


# In the server ----------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def child(rank: int, port: int, request: dict[str, Any]) -> dict[str, Any]:
    import torch

    from quern.mesh import connect, disconnect

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    try:
        module, _, name = request["function"].partition(":")
        function = getattr(importlib.import_module(module), name)
        layout = {"rank": rank, "ranks": request["ranks"], "zero": request["zero"]}
        mesh = connect(request["tp"], torch.device("cpu"), timeout=timedelta(seconds=60), **layout)
        result = function(mesh, **request["arguments"])
        disconnect(mesh)
        return {"result": result}
    except BaseException:
        return {"error": traceback.format_exc()}


def serve() -> None:
    sys.path.insert(0, str(ROOT))
    import torch._dynamo  # noqa: F401  (1.2 s of every rank that calls an operator)

    fork = multiprocessing.get_context("fork")
    for line in sys.stdin:
        request = json.loads(line)
        importlib.import_module(request["function"].partition(":")[0])  # once, for all children of this and later ones
        count, one = request["ranks"], partial(child, port=free_port(), request=request)
        try:
            with ProcessPoolExecutor(count, fork, os.dup2, (2, 1)) as pool:  # what a rank prints is no answer
                answers = list(pool.map(one, range(count)))
        except BrokenProcessPool:
            answers = [{"error": "died without a word, or another rank did"}] * count
        print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    serve()
    os._exit(0)  # a clean shutdown would take seconds
