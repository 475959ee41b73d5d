"""`quern bench ranks`: real processes that alternate on the same global batches; no speed."""

import json
import math
from pathlib import Path

import pytest

from quern.bench import command
from quern.bench.options import read_options


def test_two_processes_against_one(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    flags = f"--trace {trace} --quick --rounds 1 --no-compile --threads 1 --dtype fp32 --out {tmp_path}".split()
    assert command.run(read_options(["ranks", *flags]), lambda line: None) == 0
    body = json.loads((tmp_path / "bench" / "ranks.json").read_text(encoding="utf-8"))
    found = {one["name"]: one["values"] for one in body["measures"]}
    assert all(len(v) == 1 + n.startswith("timeline") and all(map(math.isfinite, v)) for n, v in found.items())
    one, two = found["one process, two threads"], found["two processes, one thread each"]
    assert found["two processes over one"] == pytest.approx([100 * b / a for a, b in zip(one, two, strict=True)])
    assert all(seconds > 0 for seconds in found["waiting for gradients, none leave early"])
    spans = [event for event in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"] if event["ph"] == "X"]
    names = [{event["name"] for event in spans if event["pid"] == rank} for rank in (0, 1)]
    expected = {"last backward pass", "update", "gloo:all_reduce", "gloo:all_gather", "waiting: all_gather over data"}
    assert all(own > expected for own in names)
    for name in ("gloo:all_reduce", "gloo:all_gather"):
        assert len(found[f"timeline: {name}"]) == 2 and all(0 <= v <= 100 for v in found[f"timeline: {name}, hidden"])
