"""Runs the JAX twin's stage in processes that get signals: a server that imports once and forks before JAX starts.

    python -m tests.grug.runs LOG     a JSON request on each line of stdin, a JSON answer on each of stdout

A request holds `arguments` (of `quern grug train`), `at`: null, or the number of the event before which the child sends
itself the signal `sent`, and `counted`: whether events are counted. Events (events.py) are those of the loop, its
backend, checkpoints and records.py, in any thread. An answer holds `status` (the exit code, or minus the signal) and
`events`.
"""

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from quern.cli import main
from quern.stages.jax import train as jax_train
from tests.support.events import Events
from tests.support.line_server import serve_forks

COUNTED = ("stages/jax/backend.py", "train/checkpoint.py", "train/loop.py", "records.py")


def child(request: dict[str, Any], answer: int) -> int:
    events = Events(COUNTED, ("train", request["at"] or 0), lambda place: os.kill(os.getpid(), request["sent"]))
    if request["at"] or request["counted"]:
        threading.setprofile(events)
        sys.setprofile(events)
    status = main.main(["grug", "train", *request["arguments"]])
    sys.setprofile(None)
    sys.stdout.flush()
    os.write(answer, json.dumps({"events": events.counts["train"]}).encode())
    return status


if __name__ == "__main__":
    # Only the `mfu` column needs the peak, and measuring it takes longer than these runs.
    jax_train.measure_peak_flops = lambda dtype, mesh: 1e12  # type: ignore[assignment]
    serve_forks(child, Path(sys.argv[1]), {"events": None})
    os._exit(0)  # a clean shutdown would take seconds
