"""Signals to the processes that started the ranks; and quern under torchrun, by the lines of docs/parallelism.md."""

import errno
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistStoreError
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from quern.kernels.attention.autotune import PLAIN
from quern.machine import Machine
from quern.mesh import Mesh, await_listener
from quern.records import read_events, read_metrics
from quern.train import checkpoint, launch, manifest
from quern.train.guard import EXIT_STOPPED
from tests.support.faulty_ranks import PRETRAIN
from tests.support.line_server import ENVIRONMENT, ROOT
from tests.support.ranks import Ranks, free_port
from tests.support.small_text import write_text

STAGE = "out/runs/x/pretrain"
STATED_SECONDS = 30


def wait_for_step(folder: Path, more_than: int, processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Waits until the run in `folder` has trained more than this many steps, and returns the last one."""
    last = 0
    while last <= more_than:
        assert all(process.poll() is None for process in processes)
        time.sleep(0.05)
        last = max((line["step"] for line in read_metrics(folder / STAGE)), default=0)
    return last


def test_an_error_of_the_system_has_its_path_and_what_to_do() -> None:
    said: list[str] = []
    error = PermissionError(errno.EACCES, "Permission denied", "out")
    launch._report(error, launch.Place(0, 2, 0, 2, 0), said.append, None)  # pyright: ignore[reportPrivateUsage]
    assert said == ["out: Permission denied: make it readable and writable, or choose another place"]


def test_a_rank_has_its_share_of_the_cores_that_are_allowed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of the cores of all machines, nor of those that a job may not use."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(12)))
    for variables, threads in ({}, 12), ({"WORLD_SIZE": "2"}, 6), ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, 3):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            assert launch.place().threads == threads


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
def test_a_variable_that_is_no_number_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others than quern may have set it."""
    monkeypatch.setenv(name, "x")
    with pytest.raises(ValueError, match=f"variable {name} is 'x': set an integer, or unset it$"):
        launch.place()


def chosen(mesh: Mesh) -> list[object]:
    said: list[str] = []
    dtype = (torch.bfloat16, torch.float32)[mesh.rank]
    own = Machine(torch.device("cpu"), dtype, compile=mesh.rank == 1, threads=1, attention=PLAIN)
    all_use = launch.agreed(own, mesh, said.append)
    return [str(all_use.dtype), all_use.compile, all_use.attention == PLAIN, said]


def test_ranks_use_what_all_of_them_have(ranks: Ranks) -> None:
    """Numbers of two types, or gradients in two orders, would meet in one sum. Attention is picked again for fp32."""
    first = ["torch.float32", False, False, ["rank 0 computes in fp32, because another rank does"]]
    second = ["torch.float32", False, True, ["rank 1 runs eagerly, because another rank does"]]
    assert ranks(2, "tests.train.test_launch:chosen") == [first, second]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_to_one_of_two_nodes_stops_both_unless_nohup_ignores_it(tmp_path: Path, number: int) -> None:
    """One hosts the rendezvous; the first was started by nohup. Before SIGTERM another takes the killed second's place,
    without which the first, which then hosts, would take no further step."""
    write_text(tmp_path)
    port = free_port()
    flags = ["--train.steps", "100000", "--train.save-every", "50000", "--run", "x", "--resume", "--ranks", "1"]
    command = [sys.executable, "-m", "quern.cli.main", *PRETRAIN, *flags, "--nodes", "2"]
    command += ["--rendezvous", f"127.0.0.1:{port}"]
    with (tmp_path / "said").open("ab") as said:
        start = partial(subprocess.Popen[bytes], cwd=tmp_path, stdout=said, stderr=said, env=ENVIRONMENT)
        nodes = [start(["nohup", *command])]
        try:
            if number == signal.SIGTERM:
                await_listener("127.0.0.1", port, STATED_SECONDS, "the first")
            nodes.append(start(command))
            last = wait_for_step(tmp_path, 0, nodes)
            nodes[0].send_signal(signal.SIGHUP)
            last = wait_for_step(tmp_path, last + 5, nodes)
            if number == signal.SIGTERM:
                nodes[1].kill()
                nodes[1].wait()
                nodes[1] = start(command)
                while len([one for one in read_events(tmp_path / STAGE) if one["kind"] == "start"]) < 2:
                    assert nodes[0].poll() is None
                    time.sleep(0.05)
                last = wait_for_step(tmp_path, 0, nodes)
            begun = time.monotonic()
            nodes[1].send_signal(number)
            assert [node.wait(timeout=4 * STATED_SECONDS) for node in nodes] == [EXIT_STOPPED] * 2
            assert time.monotonic() - begun < STATED_SECONDS
        finally:
            for node in nodes:
                node.kill()
    text = (tmp_path / "said").read_text(encoding="utf-8")
    assert text.count("as asked, and saved: continue with `quern pretrain --resume") == 1 and "Traceback" not in text
    found = manifest.latest(tmp_path / STAGE / "checkpoints", pytest.fail)
    assert found is not None and found[1]["step"] > last


def test_a_machine_waits_for_the_one_where_all_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not torch, which gives up after a minute, with a traceback."""
    monkeypatch.setattr(launch, "MEET_SECONDS", 0.1)
    with pytest.raises(TimeoutError, match="^the machine did not answer at 240.0.0.1:29500 within 0 s"):
        launch._agent(["pretrain"], 1, 0, tmp_path, 2, "240.0.0.1:29500")  # pyright: ignore[reportPrivateUsage]


def test_of_two_commands_that_find_the_port_free_one_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both start before one listens. Each waits as long as the messages say; torch's default is 10 minutes."""
    other = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(launch, "await_listener", lambda *_, own: True)
    agent = launch._agent(["pretrain"], 1, 0, tmp_path, 2, f"127.0.0.1:{other.port}")  # pyright: ignore[reportPrivateUsage]
    limits = agent.get_worker_group().spec.rdzv_handler.settings.timeout
    assert limits.join.total_seconds() == launch.MEET_SECONDS == 15 * 60


LOST = "start the command again on every machine, with --resume"
UNMET = {
    "the machine of --rendezvous is lost": RendezvousConnectionError("the store is gone"),
    "cannot reach the other machines (the state is corrupt)": RendezvousStateError("the state is corrupt"),
    "cannot reach the other machines (wait timeout)": DistStoreError("wait timeout\nframe #0"),
    f"cannot reach the other machines (torch {torch.__version__} cannot replace rank 0's machine; 2.13 can)": (
        AssertionError()
    ),
}


@pytest.mark.parametrize(("said", "error"), UNMET.items())
def test_a_machine_that_cannot_meet_the_others_says_why(
    said: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The errors are torch's; it raised an AssertionError before 2.13."""

    def fail(handler: DynamicRendezvousHandler) -> None:
        raise error

    monkeypatch.setattr(DynamicRendezvousHandler, "next_rendezvous", fail)
    agent = launch._agent(["pretrain"], 1, 0, tmp_path, 1, "localhost:0")  # pyright: ignore[reportPrivateUsage]
    assert launch._supervise(agent, 0, 2) == f"{said}: {LOST}"  # pyright: ignore[reportPrivateUsage]


# torchrun -----------------------------------------------------------------------------------------------------

LINES = [
    line
    for line in (ROOT / "docs/parallelism.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("torchrun ")
]
TOY = """--depth 2 --text.vocab-size 320 --model.width 32 --model.head-dim 16 --model.context 48 --train.steps 2
 --train.batch-tokens 192 --no-compile --dtype fp32 --threads 1 --device cpu""".split()


@pytest.mark.parametrize("line", [LINES[0], *(pytest.param(line, marks=pytest.mark.campaign) for line in LINES[1:])])
def test_torchrun_starts_the_ranks(line: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a word and another word, \n\n" * 500, encoding="utf-8")
    assert len(LINES) == 2 and "--depth 8 --run eight" in line
    (tmp_path / "quern").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m quern "$@"\n', encoding="utf-8")
    (tmp_path / "quern").chmod(0o755)
    command = [sys.executable, "-m", "torch.distributed.run", *shlex.split(line.replace("--depth 8", ""))[1:], *TOY]
    env = ENVIRONMENT | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    flags = ["--data", "text.txt", "--out", "out"]
    done = subprocess.run([*command, *flags], env=env, cwd=tmp_path, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    saved = manifest.path_of(tmp_path / "out/runs/eight/pretrain/checkpoints", 2)
    assert len(list(saved.glob("*.safetensors"))) == 2, "a file of each rank"
    loaded, _ = checkpoint.load(saved)
    theirs = {name: torch.empty_like(tensor) for name, tensor in loaded.items()}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):  # PyTorch's own reader
        load(theirs, storage_reader=HuggingFaceStorageReader(str(saved)), no_dist=True)
    assert all(torch.equal(theirs[name], tensor) for name, tensor in loaded.items()) and len(loaded) > 10
