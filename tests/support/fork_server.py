"""Runs `quern` commands in forked children, and ends one by SIGKILL at a chosen event. A process of its own.

    python tests/support/fork_server.py LOG COMMAND…  a JSON request per line of stdin, a JSON answer per line of stdout

Everything slow to import is imported once, also what a command imports when it needs it, and the command runs once in
the server, so that what a process traces and registers is there for all children: one costs milliseconds. A
request holds `arguments` (the command line's) and, optionally, `kill`: [part, number], or `counted`: true. Events
(events.py) begin with `Stage.train`: what comes before, such as the flags and the model, writes nothing of the run's
stage, and a death there proves little. `part` is "save" (inside a checkpoint's save), "resume" (inside the loop's
resume) or "train" (anywhere else). The machine's peak, which only the `mfu` column shows, is not measured. A request's
`signal` is sent instead of SIGKILL.

An answer holds `status` (the exit code, or minus the signal), `place` (where the child died, or null) and `events`
(how many of each part there were, if the child came to its end). Without `kill` and `counted` nothing is counted, which
takes half as long.
"""

import gc
import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

import markdown_it  # noqa: F401
import rustbpe  # noqa: F401

from quern.cli import main, options, verbs  # noqa: F401
from quern.kernels.attention import autotune  # noqa: F401
from quern.recipes import gpt  # noqa: F401
from quern.stages import pretrain, rl, session, sft  # noqa: F401
from quern.train import checkpoint, loop
from tests.support.events import Events
from tests.support.line_server import forked, run_first, status_of

TRAINING = ("train", "parallel", "optim", "model", "kernels", "records.py", "data/loader.py", "data/token_file.py")
PARTS: dict[CodeType, str] = {checkpoint.save.__code__: "save", loop.resume.__code__: "resume"}


def profiled(events: Events) -> None:
    """Makes the training of this process call `events`."""
    train = session.Stage.train

    def begin(*args: Any, **kwargs: Any) -> int:
        sys.setprofile(events)
        return train(*args, **kwargs)

    session.Stage.train = begin


def child(request: dict[str, Any], answer: int) -> int:
    which, kill = request.get("signal", signal.SIGKILL), request.get("kill")

    def die(place: str) -> None:
        if which == signal.SIGKILL:
            os.write(answer, json.dumps({"place": place}).encode())
        os.kill(os.getpid(), which)

    events = Events((*TRAINING, "stages/jax"), kill and tuple(kill), die, PARTS)
    if kill or request.get("counted"):
        profiled(events)
    status = status_of(request["arguments"])
    sys.setprofile(None)
    sys.stdout.flush()
    os.write(answer, json.dumps({"events": events.counts}).encode())
    return status


def serve(log: Path) -> None:
    for line in sys.stdin:
        reader, writer = os.pipe()
        pid = forked(partial(child, json.loads(line), writer), log)
        os.close(writer)
        with os.fdopen(reader) as answers:
            answer = {"place": None, "events": None} | json.loads(answers.read() or "{}")
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(json.dumps(answer | {"status": status}), flush=True)


if __name__ == "__main__":
    from quern.stages.jax import train as jax_train  # JAX itself starts in the children

    session.measure_peak_flops = lambda machine: 1e12
    jax_train.measure_peak_flops = lambda dtype, mesh: 1e12  # type: ignore[assignment]
    at = sys.argv.index("--run") + 1
    run_first(lambda name: main.main([*sys.argv[2:at], name, *sys.argv[at + 1 :]]), sys.argv[at])
    gc.collect()
    gc.freeze()  # children need not copy these objects
    serve(Path(sys.argv[1]))
    os._exit(0)  # a clean shutdown would take seconds
