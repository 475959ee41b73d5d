"""Joining: a rank that does not connect ends the others in time. Signals to the process that started the ranks, on one
machine and on two, stop all ranks and save."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from quern.records import read_metrics
from quern.train import manifest
from quern.train.guard import EXIT_STOPPED
from tests.parallel.test_faults import PRETRAIN
from tests.support.line_server import ROOT
from tests.support.ranks import free_port
from tests.support.small_text import write_text

COULD_NOT = "rank 1 could not connect to the others, though all were there"
PROGRAM = """
import os
import sys

from quern.machine import detect
from quern.train import launch

launch.CONNECT_SECONDS = 1.0
with launch.joined("quern pretrain", 1, lambda threads: detect(device="cpu", threads=threads), 1, 5.0):
    print("joined")
"""


def test_who_cannot_connect_ends() -> None:
    """This process is the other rank: it arrives late at the store, and never connects. Waiting has no short limit."""
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
    assert said.splitlines()[-1] == f"quern pretrain: {COULD_NOT}, within 1 s; all end"


# Signals ----------------------------------------------------------------------------------------------------

ENDLESS = [*PRETRAIN, "--train.steps", "100000", "--train.save-every", "50000", "--run", "x", "--resume"]
STATED_SECONDS = 30


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_text(tmp_path)
    return tmp_path


def start(folder: Path, *flags: str, before: Sequence[str] = ()) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*before, sys.executable, "-m", "quern.cli.main", *ENDLESS, *flags],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )


def wait_for_step(folder: Path, more_than: int, processes: Sequence[subprocess.Popen[str]]) -> None:
    """Waits until the run in `folder` has trained more than this many steps."""
    stage = folder / "out/runs/x/pretrain"
    while not any(line["step"] > more_than for line in read_metrics(stage)):
        assert all(process.poll() is None for process in processes), processes[0].communicate()
        time.sleep(0.05)


def saved_step(folder: Path) -> int:
    found = manifest.latest(folder / "out/runs/x/pretrain/checkpoints", pytest.fail)
    assert found is not None
    return found[1]["step"]


@pytest.mark.parametrize(
    ("asked", "number"), [(0, signal.SIGHUP), pytest.param(1, signal.SIGTERM, marks=pytest.mark.campaign)]
)
def test_a_signal_to_one_of_two_nodes_stops_both(folder: Path, asked: int, number: int) -> None:
    """One of them hosts the rendezvous."""
    flags = ("--nodes", "2", "--ranks", "1", "--rendezvous", f"127.0.0.1:{free_port()}")
    nodes = [start(folder, *flags) for _ in range(2)]
    try:
        wait_for_step(folder, 0, nodes)
        begun = time.monotonic()
        nodes[asked].send_signal(number)
        said = [node.communicate(timeout=4 * STATED_SECONDS)[0] for node in nodes]
        seconds = time.monotonic() - begun
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [EXIT_STOPPED, EXIT_STOPPED], said
    assert seconds < STATED_SECONDS and saved_step(folder) > 0
    assert "".join(said).count(
        "as asked, and saved: continue with `quern pretrain --resume"
    ) == 1 and "Traceback" not in "".join(said)


def test_a_hang_up_does_not_stop_what_nohup_started_and_another_signal_does(folder: Path) -> None:
    process = start(folder, "--ranks", "2", before=("nohup",))
    try:
        wait_for_step(folder, 0, [process])
        assert process.stdout is not None
        process.stdout.close()
        process.send_signal(signal.SIGHUP)
        wait_for_step(folder, read_metrics(folder / "out/runs/x/pretrain")[-1]["step"] + 5, [process])
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == EXIT_STOPPED
    finally:
        process.kill()
    assert saved_step(folder) > 0
