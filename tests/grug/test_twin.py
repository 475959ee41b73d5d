"""The JAX twin's checks, which assert in JAX's process (tests/support/jax_process.py); and two processes of two devices
each equal one device."""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.jax_process import Grug, environment
from tests.support.line_server import ROOT
from tests.support.ranks import free_port

HERE = Path(__file__).parent
CHECKS = [
    f"{module}:{name}"
    for module in ("pieces", "verbs")
    for name in re.findall(r"^def (check_\w+)", (HERE / f"{module}.py").read_text(encoding="utf-8"), re.M)
]


@pytest.mark.parametrize("check", CHECKS)
def test_check(grug: Grug, check: str) -> None:
    grug(check)


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "experiments/grug").glob("*.py")))
def test_every_experiment_passes_the_gauntlet(grug: Grug, name: str) -> None:
    grug("pieces:passes", name=name)


def test_two_processes_are_one(grug: Grug, tmp_path: Path) -> None:
    command, checkpoints = ["-m", "tests.grug.two_processes", f"127.0.0.1:{free_port()}"], str(tmp_path / "checkpoints")
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = list[subprocess.Popen[str]]()
    for number in range(2):
        asked = [sys.executable, *command, str(number), checkpoints]
        env = environment(tmp_path / f"compiled-{number}", devices=2)
        started.append(subprocess.Popen(asked, cwd=ROOT, env=env, **pipes))
    answers = [process.communicate(timeout=280)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], answers
    found = [json.loads(next(line for line in out.splitlines() if line.startswith("{"))) for out in answers]
    assert found[0] == found[1]
    assert found[0]["named alike"] == "name-0"
    assert found[0]["refusal"] == "process 0 found no text"
    assert found[0]["one raised"] and not found[0]["none raised"]
    one = grug("two_processes:expected", folder=checkpoints)
    gaps = [abs(a - b) / abs(b) for a, b in zip(found[0]["losses"], one["losses"], strict=True)]
    assert max(gaps) <= 1e-5, gaps
    assert one["step"] == 1 and one["weights"] <= 1e-5


def test_processes_that_cannot_meet_say_so_where_jax_would_crash() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        places = [(free_port(), 0), (free_port(), 1), (busy.getsockname()[1], 0)]
        joins = "from quern.grug import mesh; mesh.START_SECONDS = 1; mesh.join_processes('127.0.0.1:{}', 2, {})"
        started = [
            subprocess.Popen([sys.executable, "-c", joins.format(*place)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
            for place in places
        ]
        said = [process.communicate(timeout=280)[1].splitlines()[-1] for process in started]
    assert [process.returncode for process in started] == [1, 1, 1]
    for line, (port, _) in zip(said[:2], places[:2], strict=True):
        assert line.startswith(f"not all of 2 processes at 127.0.0.1:{port} met within 1 s: start each of them")
    assert re.fullmatch(r"ValueError: process 0 cannot listen at .*in use.*: give a free port", said[2]), said
