"""The timeline of several ranks: which share of communication is hidden, worked out by hand, and one file for all."""

import json
from pathlib import Path
from typing import Any

import pytest

from quern.train.timeline import communication, merge


def span(name: str, begin: float, end: float, **fields: Any) -> dict[str, Any]:
    return {"ph": "X", "pid": 71, "tid": 3, "name": name, "ts": begin, "dur": end - begin} | fields


EVENTS = [
    # Ran from 10 to 40 and from 50 to 60; the rank waited from 30 to 45 and from 55 to 56.
    span("gloo:all_reduce", 10, 30),
    span("gloo:all_reduce", 20, 40),
    span("waiting: all_reduce over data", 30, 45),
    span("gloo:all_reduce", 50, 60),
    span("waiting: all_gather over data", 55, 56),
    # Waits that touch no part of it: all of it is hidden.
    span("ncclDevKernel_AllGather", 100, 120),
    span("aten::mm", 0, 200),
]


def test_the_share_is_that_of_the_time_in_which_the_rank_waits() -> None:
    found = communication({"traceEvents": EVENTS})
    assert found == {
        "gloo:all_reduce": pytest.approx((40e-6, 11e-6)),
        "ncclDevKernel_AllGather": pytest.approx((20e-6, 0)),
    }


def test_one_file_has_the_ranks_on_one_clock(tmp_path: Path) -> None:
    """The second rank's profile counts from 5 microseconds later. Arrows between its operators stay its own."""
    arrow = {"ph": "s", "pid": 71, "tid": 3, "name": "fwdbwd", "ts": 11, "id": 1}
    own = {"ph": "X", "pid": "Spans", "tid": 0, "name": "the profiler", "ts": 0, "dur": 1}
    first = {"baseTimeNanoseconds": 1_000_000, "traceEvents": [span("update", 10, 12), arrow, own]}
    second = first | {"baseTimeNanoseconds": 1_005_000}
    merge(tmp_path / "trace.json", [first, second])
    body = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    events = body["traceEvents"]
    assert body["baseTimeNanoseconds"] == 1_000_000
    assert [(e["pid"], e["ts"]) for e in events if e["ph"] == "X"] == [(0, 10), (1, 15)]
    assert len({e["id"] for e in events if e["ph"] == "s"}) == 2
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["rank 0", "rank 1"]
