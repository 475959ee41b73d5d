"""Two processes of two devices each equal one device, also a refusal of one of them."""

import json
import subprocess
import sys
from pathlib import Path

from tests.support.jax_process import Grug, environment
from tests.support.line_server import ROOT
from tests.support.ranks import free_port


def together(commands: list[list[str]], tmp_path: Path) -> list[str]:
    """Runs Python processes of two devices; returns their outputs."""
    started = [
        subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment(tmp_path / f"compiled-{i}", devices=2),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i, command in enumerate(commands)
    ]
    answers = [process.communicate(timeout=280)[0] for process in started]
    assert [process.returncode for process in started] == [0] * len(started), answers
    return answers


def test_two_processes_are_one(grug: Grug, tmp_path: Path) -> None:
    words = ["-m", "tests.grug.two_processes", f"127.0.0.1:{free_port()}"]
    answers = together([[*words, str(i), str(tmp_path / "checkpoints")] for i in range(2)], tmp_path)
    found = [json.loads(next(line for line in out.splitlines() if line.startswith("{"))) for out in answers]
    assert found[0] == found[1]
    assert found[0]["named alike"] == "name-0"
    assert found[0]["refusal"] == "process 0 found no text"
    assert found[0]["one raised"] and not found[0]["none raised"]
    one = grug("two_processes:expected", folder=str(tmp_path / "checkpoints"))
    gaps = [abs(a - b) / abs(b) for a, b in zip(found[0]["losses"], one["losses"], strict=True)]
    assert max(gaps) <= 1e-5, gaps
    assert one["step"] == 1 and one["weights"] <= 1e-5
