"""Runs `quern` commands in forked children, and ends one by SIGKILL at a chosen event. A process of its own.

    python tests/support/fork_server.py LOG COMMAND…  a JSON request per line of stdin, a JSON answer per line of stdout

Everything slow to import is imported once, also what a command imports when it needs it, and the command runs once in
the server, so that what a process traces and registers is there for all children: one costs milliseconds. A
request holds `arguments` (the command line's) and, optionally, `kill`: [part, number], or `counted`: true. Events are
the calls that quern's own training code makes or receives, of Python and of C functions alike, as Python's profiler
sees them: before each forward, gradient, update, write, fsync and rename there is one. They begin with `Session.train`:
what comes before, such as the flags and the model, writes nothing of the run's stage, and a death there proves little.
`part` is "save" (inside a checkpoint's save), "resume" (inside the loop's resume) or "train" (anywhere else). Nothing
of quern is replaced, except that the machine's peak is not measured, which only the `mfu` column would show. A
request's `signal` is sent instead of SIGKILL.

An answer holds `status` (the exit code, or minus the signal), `place` (where the child died, or null) and `events`
(how many of each part there were, if the child came to its end). Without `kill` and `counted` nothing is counted, which
takes half as long.
"""

import gc
import json
import os
import signal
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import markdown_it  # noqa: F401
import rustbpe  # noqa: F401

from quern.cli import main, options, verbs  # noqa: F401
from quern.kernels.attention import autotune  # noqa: F401
from quern.recipes import gpt  # noqa: F401
from quern.rl import environments  # noqa: F401
from quern.stages import pretrain, rl, session, sft  # noqa: F401
from quern.train import checkpoint, loop
from tests.support.line_server import run_first, serve_forks

ROOT = Path(main.__file__).parents[1]
TRAINING = tuple(
    str(ROOT / part)
    for part in ("train", "parallel", "optim", "model", "kernels", "records.py", "data/loader.py", "data/token_file.py")
)
PARTS: dict[CodeType, str] = {checkpoint.save.__code__: "save", loop.resume.__code__: "resume"}


class Events:
    """A profile function: counts the events of each part, and sends this process a signal before one of them."""

    def __init__(self, kill: tuple[str, int] | None, which: int, answer: int) -> None:
        self.kill, self.which, self.answer = kill, which, answer
        self.counts = {"train": 0, "save": 0, "resume": 0}
        self.part = "train"
        self.ours: dict[str, bool] = {}  # by file, asked on every call that Python makes: the hash of a code is slow

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        ours = self.ours.get(code.co_filename)
        if ours is None:
            ours = code.co_filename.startswith(TRAINING)
            self.ours[code.co_filename] = ours
        if not ours or event in ("c_return", "c_exception"):
            return
        if code in PARTS and event in ("call", "return"):
            self.part = PARTS[code] if event == "call" else "train"
        if event == "return":
            return
        part = self.part
        self.counts[part] += 1
        if self.kill == (part, self.counts[part]):
            called = getattr(argument, "__name__", "") if event == "c_call" else ""
            place = f"{part}: {Path(code.co_filename).name} {code.co_name} {called}".rstrip()
            if self.which == signal.SIGKILL:
                os.write(self.answer, json.dumps({"place": place}).encode())
            os.kill(os.getpid(), self.which)


def profiled(events: Events) -> None:
    """Makes the training of this process call `events`."""
    train = session.Session.train

    def begin(*args: Any, **kwargs: Any) -> int:
        sys.setprofile(events)
        return train(*args, **kwargs)

    session.Session.train = begin


def child(request: dict[str, Any], answer: int) -> int:
    part_and_number = request.get("kill")
    which = request.get("signal", signal.SIGKILL)
    events = Events(tuple(part_and_number) if part_and_number else None, which, answer)
    if part_and_number or request.get("counted"):
        profiled(events)
    try:
        status = main.main(request["arguments"])
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    sys.setprofile(None)
    sys.stdout.flush()
    os.write(answer, json.dumps({"events": events.counts}).encode())
    return status


if __name__ == "__main__":
    session.measure_peak_flops = lambda machine: 1e12
    at = sys.argv.index("--run") + 1
    run_first(lambda name: main.main([*sys.argv[2:at], name, *sys.argv[at + 1 :]]), sys.argv[at])
    gc.collect()
    gc.freeze()  # children need not copy these objects
    serve_forks(child, Path(sys.argv[1]), {"place": None, "events": None})
    os._exit(0)  # a clean shutdown would take seconds
