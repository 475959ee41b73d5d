"""Two processes of two devices each equal one device; a refusal ends both; and the twin imports no torch."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from quern.runs.run_dir import RunDir
from quern.runs.run_lock import run_lock
from tests.support.jax_process import Grug, environment
from tests.support.line_server import ROOT


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def test_two_processes_are_one(grug: Grug, tmp_path: Path) -> None:
    coordinator = f"127.0.0.1:{free_port()}"
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.grug.two_processes", coordinator, str(i), str(tmp_path / "checkpoints")],
            cwd=ROOT,
            env=environment(tmp_path / f"compiled-{i}", devices=2),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    answers = [process.communicate(timeout=280) for process in started]
    assert [process.returncode for process in started] == [0, 0], answers[0][1][-2000:] + answers[1][1][-2000:]
    found = [json.loads(out.strip().splitlines()[-1]) for out, _ in answers]
    assert found[0] == found[1]
    assert found[0]["named alike"] == "name-0"
    assert found[0]["refusal"] == "process 0 found no text"
    assert found[0]["one raised"] and not found[0]["none raised"]
    one = grug("two_processes:expected", folder=str(tmp_path / "checkpoints"))
    gaps = [abs(a - b) / abs(b) for a, b in zip(found[0]["losses"], one["losses"], strict=True)]
    assert max(gaps) <= 1e-5, gaps
    assert one["step"] == 1 and one["weights"] <= 1e-5


@pytest.mark.campaign
def test_a_refusal_of_process_0_ends_every_process(tmp_path: Path) -> None:
    coordinator, out = f"127.0.0.1:{free_port()}", tmp_path / "out"
    command = [sys.executable, "-m", "quern.cli.main", "grug", "train", "--out", str(out), "--run", "busy"]
    command += ["--dtype", "fp32", "--processes.coordinator", coordinator, "--processes.count", "2"]
    with run_lock(RunDir(out, "busy"), "another command"):
        started = [
            subprocess.Popen(
                [*command, "--processes.id", str(i)],
                cwd=tmp_path,
                env=environment(tmp_path / f"compiled-{i}", devices=1),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for i in range(2)
        ]
        answers = [process.communicate(timeout=280)[0] for process in started]
    assert [process.returncode for process in started] == [1, 1], answers
    assert all("run 'busy' is in use by process" in answer for answer in answers), answers


def test_importing_the_twin_imports_no_torch() -> None:
    modules = sorted(
        f"quern.grug.{path.stem}" for path in (ROOT / "quern" / "grug").glob("*.py") if path.stem != "__init__"
    )
    assert len(modules) >= 8
    code = f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
    code += "print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"
