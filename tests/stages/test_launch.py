"""Joining: a rank that stays away after all have met does not keep the others waiting without end."""

import os
import subprocess
import sys
import time
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

COULD_NOT = "rank 1 could not connect to the others, though all were there"
PROGRAM = """
import os
import sys

from quern.machine import detect
from quern.stages import launch

launch.CONNECT_SECONDS = 1.0
with launch.joined("quern pretrain", 1, lambda threads: detect(device="cpu", threads=threads), 1, 5.0):
    print("joined")
"""


def test_who_cannot_connect_ends() -> None:
    """The other one, this process, meets it at the store, late, and does no more. Who waits for the others has time."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "RANK": "1",
        "WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    try:
        store.set("start", "1")
        store.wait(["1/came"], timedelta(seconds=60))
        time.sleep(1.2)
        assert process.poll() is None
        store.set("1/complete", "yes")
        said = process.communicate(timeout=60)[0]
    finally:
        process.kill()
    assert process.returncode == 1, said
    assert (
        said == "quern pretrain: rank 1 could not connect to the others, though all were there, within 1 s; all end\n"
    )
