"""A server process that runs `quern` commands on several ranks, with a fault in one of them at a chosen event.

    python tests/support/faulty_ranks.py        reads a JSON request per line of stdin, writes a JSON answer per line

Slow imports happen once, and one run without faults, in the server. For each run the server forks an agent, which acts
like torchrun: it holds the store through which the ranks connect, and forks the ranks. When a rank exits with an error,
the agent sends SIGTERM to the others, later SIGKILL, and restarts all. A request is a list of runs. Several run at
once, since they mostly wait. A run has `arguments` (of the command line), `ranks`, `restarts`, and `faults`: the fault
of each attempt (or null), as {"kind", "rank", "part", "number"}: see `Fault`; and `counted`: whether its events are
counted. tests/support/fork_server.py defines the parts of events. The machine's peak is not
measured.

An answer holds for each run `exits` (for each attempt, the ranks' statuses), `result` (the reported outcome, or null),
`events` (the number of each rank's events, if counted), `places` and `seconds` (of the faults, and the time from the
last one until no process of its attempt was left), `said` (all output).
"""

import gc
import json
import multiprocessing
import os
import resource
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from tests.support.events import Events
from tests.support.line_server import ROOT, LineServer, forked, run_first, status_of

SHUTDOWN_SECONDS = 30
AT_ONCE = 5
"""Concurrent runs."""
PRETRAIN = """pretrain --data text.jsonl --depth 2 --text.vocab-size 320 --model.width 32 --model.head-dim 16
 --model.kv-heads 1 --model.context 48 --train.batch-tokens 192 --train.micro-batch-tokens 144 --optim.lr-scale 0.3
 --train.log-every 1 --train.eval-every 8 --out out --no-compile --dtype fp32 --threads 1""".split()
SHORT = ("--train.steps", "12", "--train.save-every", "3")


class FaultyRanks(LineServer):
    """The client of the server."""

    def __init__(self, folder: Path) -> None:
        super().__init__([str(Path(__file__))], folder)
        self.folder = folder

    def __call__(self, arguments: Sequence[str], **more: Any) -> dict[str, Any]:
        return self.together([{"arguments": list(arguments), **more}])[0]

    def together(self, runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the answers to several runs, in order. By default two ranks start once, without faults."""
        plain = {"faults": [], "ranks": 2, "restarts": 0, "counted": False}
        return self.ask([plain | run for run in runs], gone=[{"said": "the server is gone"}])


# In a rank --------------------------------------------------------------------------------------------------


class Fault(Events):
    """A profile function that injects a fault into this process before its `number`-th event of a part, or at the
    beginning of a `step`. Without a fault it counts the events of each part, and those of "train" before each step.

    Kinds: "kill", "stop" and "term" send signals to this process; "agent" kills the agent; "raise" raises a ValueError;
    "disk" limits all files to 50,000 bytes from then on; "slow" sleeps in every step. In the `number`-th step, for any
    part, "nan" makes the rank's loss NaN.
    """

    def __init__(self, fault: dict[str, Any] | None, answers: int) -> None:
        from tests.support.fork_server import PARTS, TRAINING

        self.fault, self.answers = fault or {}, answers
        super().__init__(TRAINING, (self.fault.get("part", ""), self.fault.get("number", 0)), self.happen, PARTS)
        self.begins: list[int] = []
        self.woke = time.perf_counter()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_name == "accumulate":
            self.each_step(frame)
        super().__call__(frame, event, argument)

    def each_step(self, frame: FrameType) -> None:
        self.begins.append(self.counts["train"])
        step = len(self.begins)
        if self.fault.get("step") == step:
            self.happen(f"step {step}")
        if self.fault.get("kind") == "slow":
            own = time.perf_counter() - self.woke  # of the previous step, for any load of the machine
            time.sleep(min(2.0, own))
            self.woke = time.perf_counter()
        if self.fault.get("kind") == "nan" and self.fault["number"] == step:
            for _, _, scale in frame.f_locals["batch"].micros:
                scale.fill_(np.nan)

    def happen(self, place: str) -> None:
        sys.setprofile(None)  # it doubles the time of the run
        put(self.answers, place=place, at=time.time())
        kind = self.fault["kind"]
        signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
        if kind in signals:
            os.kill(os.getpid(), signals[kind])
        elif kind == "agent":
            os.kill(os.getppid(), signal.SIGKILL)
        elif kind == "raise":
            raise ValueError("planted")
        elif kind == "disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))


def put(answers: int, **facts: Any) -> None:
    os.write(answers, (json.dumps(facts) + "\n").encode())


def run_rank(rank: int, request: dict[str, Any], attempt: int, answers: int, listener: socket.socket) -> int:
    listener.close()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": str(attempt)}
    faults = request["faults"]
    fault = faults[attempt] if attempt < len(faults) else None
    counted = request["counted"]
    events = Fault(fault, answers)
    if counted or (fault and fault["rank"] == rank):
        sys.setprofile(events)
    status = status_of(request["arguments"])
    sys.setprofile(None)
    if counted:
        put(answers, rank=rank, events=events.counts | {"begins": events.begins})
    return status


# The agent --------------------------------------------------------------------------------------------------


def run_agent(request: dict[str, Any], answers: int, folder: Path) -> int:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    for attempt in range(request["restarts"] + 1):
        listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        port = listener.getsockname()[1]
        os.environ |= {"WORLD_SIZE": str(request["ranks"]), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "QUERN_PARENT": str(os.getpid())}
        os.environ["QUERN_RESULT"] = str(folder / "result.json")
        pids = {}
        for rank in range(request["ranks"]):
            pids[forked(partial(run_rank, rank, request, attempt, answers, listener))] = rank
        store = TCPStore(  # created after the forks, which would lose its threads
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        exits = supervised(pids)
        del store
        put(answers, exits=[exits[rank] for rank in range(request["ranks"])], ended=time.time())
        if not any(exits.values()):
            break
    return 0


def supervised(pids: dict[int, int]) -> dict[int, int]:
    """Returns rank → status, when all ranks have exited."""
    exits: dict[int, int] = {}
    until = None
    while len(exits) < len(pids):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            exits[pids[pid]] = os.waitstatus_to_exitcode(status)
        if until is None and any(exits.values()):
            until = time.monotonic() + SHUTDOWN_SECONDS
            for other in pids:
                if pids[other] not in exits:
                    os.kill(other, signal.SIGTERM)
        if until is not None and time.monotonic() > until:
            for other in pids:
                if pids[other] not in exits:
                    os.kill(other, signal.SIGKILL)
        time.sleep(0.01)
    return exits


# The server -------------------------------------------------------------------------------------------------


def answer(request: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"exits": [], "result": None, "events": {}, "places": [], "seconds": None}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reader, writer = os.pipe()
        pid = forked(partial(run_agent, request, writer, folder), folder / "said")
        os.close(writer)
        at = None
        with os.fdopen(reader, encoding="utf-8") as stream:  # ends when the agent and every rank have exited
            for line in stream:
                facts = json.loads(line)
                if "place" in facts:
                    found["places"].append(facts["place"])
                    at = facts["at"]
                elif "exits" in facts:
                    found["exits"].append(facts["exits"])
                    found["seconds"], at = (facts["ended"] - at, None) if at else (found["seconds"], None)
                else:
                    found["events"][facts["rank"]] = facts["events"]
        if at:
            found["seconds"] = time.time() - at
        os.waitpid(pid, 0)
        result, said = folder / "result.json", folder / "said"
        found["result"] = json.loads(result.read_text(encoding="utf-8")) if result.exists() else None
        found["said"] = said.read_text(encoding="utf-8") if said.exists() else ""
    return found


def together(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the answers, in order. A process waits for each."""
    with ProcessPoolExecutor(min(AT_ONCE, len(requests)), multiprocessing.get_context("fork")) as pool:
        return list(pool.map(answer, requests))


def serve() -> None:
    sys.path.insert(0, str(ROOT))
    # What the ranks import, trace and register: once for all of them.
    from quern.cli import main
    from quern.report import build  # noqa: F401
    from quern.stages import evaluate, pretrain, rl, run_all, session, sft  # noqa: F401
    from tests.support import fork_server  # noqa: F401

    session.measure_peak_flops = lambda machine: 1e12
    run_first(lambda name: main.main([*PRETRAIN, *SHORT, "--run", name]), "first")
    gc.collect()
    gc.freeze()  # children need not copy these objects
    for line in sys.stdin:
        print(json.dumps(together(json.loads(line))), flush=True)


if __name__ == "__main__":
    serve()
    os._exit(0)  # a clean shutdown would take seconds
