"""`quern bench grug`: both trainers in one run, JAX in its own process."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from quern.bench import command
from quern.bench.data import Setup
from quern.bench.jax import jax_order
from quern.bench.material import reference
from quern.bench.options import BenchOptions
from quern.flags.check_flags import read
from tests.support.jax_process import environment
from tests.support.line_server import ROOT
from tests.support.toy_training import CPU


@pytest.fixture(autouse=True)
def compiled_quickly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(tmp_path / "compiled", devices=1).items():
        monkeypatch.setenv(name, value)


def test_both_trainers_are_measured_and_recorded(tmp_path: Path) -> None:
    said: list[str] = []
    quick = ["--quick", "--rounds", "2", "--no-compile", "--threads", "1", "--dtype", "fp32"]
    options = read(BenchOptions, ["grug", *quick, "--out", str(tmp_path)], prog="quern bench")
    assert command.run(options, said.append) == 0
    body = json.loads((tmp_path / "bench" / "grug.json").read_text(encoding="utf-8"))
    measures = {measure["name"]: measure["values"] for measure in body["measures"]}
    trainers = ["PyTorch", "JAX, whole loss", "JAX, blockwise loss"]
    assert list(measures) == [*trainers, "JAX / PyTorch", "whole / blockwise"]
    assert all(len(values) == 2 and all(math.isfinite(x) and x > 0 for x in values) for values in measures.values())
    whole, blocks = measures["JAX, whole loss"], measures["JAX, blockwise loss"]
    assert measures["whole / blockwise"] == pytest.approx([a / b for a, b in zip(whole, blocks, strict=True)])
    assert body["settings"]["jax"] and any("JAX / PyTorch" in line for line in said)


TORCH_FREE = """
import json, sys
from quern.bench import jax
try:
    list(jax.answers(json.loads(sys.argv[1]), iter(["facts"])))
except ValueError as error:  # when it has the state of the training, and traces the step
    print("torch" in sys.modules, "jax" in sys.modules, error)
"""


def test_the_jax_process_loads_no_torch() -> None:
    order = jax_order(reference(True, 5), Setup(CPU, 5, quick=True), 17)
    command = [sys.executable, "-c", TORCH_FREE, json.dumps(order)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("False True blocks of 17 positions"), done.stdout + done.stderr
