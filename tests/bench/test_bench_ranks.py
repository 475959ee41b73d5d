"""`quern bench ranks`: real processes that alternate on the same global batches; no speed."""

import json
import math
from pathlib import Path

import pytest

from quern.bench import command


def test_two_processes_against_one(tmp_path: Path) -> None:
    flags = ["--quick", "--rounds", "1", "--no-compile", "--threads", "1", "--dtype", "fp32", "--out", str(tmp_path)]
    assert command.main(["ranks", *flags], lambda line: None) == 0
    body = json.loads((tmp_path / "bench" / "ranks.json").read_text(encoding="utf-8"))
    found = {one["name"]: one["values"] for one in body["measures"]}
    assert all(len(values) == 1 and all(map(math.isfinite, values)) for values in found.values())
    one, two = found["one process, two threads"], found["two processes, one thread each"]
    assert found["two processes over one"] == pytest.approx([100 * b / a for a, b in zip(one, two, strict=True)])
    assert all(seconds > 0 for seconds in found["waiting for gradients, none leave early"])
