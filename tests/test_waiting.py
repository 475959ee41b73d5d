"""Every wait ends within three seconds of SIGTERM or Ctrl-C, and has said for whom it waits and until when.

The waits are in tests/support/waits.py: each runs as a verb of the command line, in a process that gets the signal.
"""

import json
import re
import signal
import subprocess
import sys
from typing import Any

import pytest

from tests.support.line_server import ROOT

LONGEST_SECONDS = 3.0
TIME = r"until \d\d:\d\d:\d\d"
WAITS = {
    "rank 0": rf"rank 1 of 2 at 127.0.0.1:\d+, {TIME}",
    "a store that does not answer": rf"rank 0 of 2 at 127.0.0.1:\d+, {TIME}",
    "rank 0's preparation": "rank 0, which prepares what all ranks read, without a time limit",
    "a collective": "a collective",
    "a lock": "process 7 on elsewhere, which writes to .*, without a time limit",
    "a silent server": rf"bytes of text.txt from 127.0.0.1:\d+, {TIME}",
    "a busy server": rf"127.0.0.1:\d+ before try 2 of 4 \(the server answers 503\), {TIME}",
    "machines": rf"the machines of --nodes 2 at 127.0.0.1:\d+, {TIME}",
    "processes of JAX": rf"2 processes at 127.0.0.1:\d+, {TIME}",
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All waits at once."""
    lines = json.dumps({wait: f"waiting for {line}" for wait, line in WAITS.items()})
    command = [sys.executable, str(ROOT / "tests/support/waits.py"), str(tmp_path_factory.mktemp("waits")), lines]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=120).stdout)


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_says_for_whom_and_ends_at_a_signal(ended: dict[str, Any], wait: str, which: signal.Signals) -> None:
    found = ended[f"{wait}/{which.name}"]
    assert re.search(f"^waiting for {WAITS[wait]}$", found["said"], re.M), found
    assert found["code"] in (-which, 128 + which), found
    assert found["seconds"] < LONGEST_SECONDS and "Traceback" not in found["said"], found
