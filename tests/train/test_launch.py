"""Joining: a rank that does not connect ends the others in time. Signals to the processes that started the ranks."""

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
from tests.support.faulty_ranks import PRETRAIN
from tests.support.line_server import ENVIRONMENT
from tests.support.ranks import free_port
from tests.support.small_text import write_text

COULD_NOT = "rank 1 could not connect to the others, though all were there"
PROGRAM = """
from quern.machine import detect
from quern.train import launch

launch.CONNECT_SECONDS = 1.0
with launch.joined("quern pretrain", 1, lambda threads: detect(device="cpu", threads=threads), 1, 5.0):
    print("joined")
"""
STATED_SECONDS = 30


def test_who_cannot_connect_ends() -> None:
    """This process is the other rank: it arrives late at the store, and never connects. Waiting has no short limit."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    of_the_rank = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "RANK": "1", "WORLD_SIZE": "2"}
    of_the_rank |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=ENVIRONMENT | of_the_rank,
    ) as process:
        try:
            store.set("start", "1")
            store.wait(["1/came"], timedelta(seconds=200))
            time.sleep(1.2)
            assert process.poll() is None
            store.set("1/complete", "yes")
            said = process.communicate(timeout=80)[0]
        finally:
            process.kill()
    assert process.returncode == 1, said
    assert said.splitlines()[-1] == f"quern pretrain: {COULD_NOT}, within 1 s; all end"


def wait_for_step(folder: Path, more_than: int, processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Waits until the run in `folder` has trained more than this many steps, and returns the last one."""
    while (
        last := max((line["step"] for line in read_metrics(folder / "out/runs/x/pretrain")), default=0)
    ) <= more_than:
        assert all(process.poll() is None for process in processes)
        time.sleep(0.05)
    return last


@pytest.mark.parametrize("number", [signal.SIGHUP, pytest.param(signal.SIGTERM, marks=pytest.mark.campaign)])
def test_a_signal_to_one_of_two_nodes_stops_both_unless_nohup_ignores_it(tmp_path: Path, number: int) -> None:
    """One of them hosts the rendezvous; the first was started by nohup."""
    write_text(tmp_path)
    flags = ["--train.steps", "100000", "--train.save-every", "50000", "--run", "x", "--resume", "--ranks", "1"]
    command = [sys.executable, "-m", "quern.cli.main", *PRETRAIN, *flags, "--nodes", "2"]
    command += ["--rendezvous", f"127.0.0.1:{free_port()}"]
    with (tmp_path / "said").open("ab") as said:
        nodes = [
            subprocess.Popen([*before, *command], cwd=tmp_path, stdout=said, stderr=said, env=ENVIRONMENT)
            for before in (["nohup"], [])
        ]
        try:
            last = wait_for_step(tmp_path, 0, nodes)
            nodes[0].send_signal(signal.SIGHUP)
            wait_for_step(tmp_path, last + 5, nodes)
            begun = time.monotonic()
            nodes[1].send_signal(number)
            assert [node.wait(timeout=4 * STATED_SECONDS) for node in nodes] == [EXIT_STOPPED] * 2
            assert time.monotonic() - begun < STATED_SECONDS
        finally:
            for node in nodes:
                node.kill()
    text = (tmp_path / "said").read_text(encoding="utf-8")
    assert text.count("as asked, and saved: continue with `quern pretrain --resume") == 1 and "Traceback" not in text
    found = manifest.latest(tmp_path / "out/runs/x/pretrain/checkpoints", pytest.fail)
    assert found is not None and found[1]["step"] > last
