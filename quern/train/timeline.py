"""A timeline of some training steps for Perfetto (ui.perfetto.dev): what each rank computes, sends and waits for.

torch.profiler records a rank: its operators, the collectives that run on gloo's threads or as NCCL's kernels, and the
waits of a `ProcessGroup`. `merge` joins the ranks of one machine, whose clocks are the same, in one file of Chrome's
trace event format. Times are in microseconds after the file's `baseTimeNanoseconds`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from quern.mesh import WAITING
from quern.temporaries import whole_file, write_whole

Span = tuple[float, float]
"""Begin and end in microseconds."""
BACKENDS = "gloo:", "nccl"
"""How the names of the spans of collectives begin."""


@contextmanager
def recorded(path: Path) -> Iterator[None]:
    """Records what this process does in the body, also on its GPU, and writes the trace to a file."""
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=kinds, acc_events=True) as profiler:  # torch 2.11 warns of lost events without it
        yield
    with whole_file(path) as file:
        profiler.export_chrome_trace(str(file))
        if not file.stat().st_size:  # the profiler tells of its errors on standard error alone
            raise OSError(f"{path}: the trace could not be written")


def merge(path: Path, ranks: Sequence[dict[str, Any]]) -> None:
    """Writes the traces of all ranks, from rank 0, to one file: a process for each rank."""
    begin = min(trace["baseTimeNanoseconds"] for trace in ranks)
    events: list[dict[str, Any]] = []
    for rank, trace in enumerate(ranks):
        late = (trace["baseTimeNanoseconds"] - begin) / 1e3
        for event in trace["traceEvents"]:
            if isinstance(event["pid"], int) and event["ph"] != "M":  # others describe the profiler itself
                own = {"id": event["id"] * len(ranks) + rank} if "id" in event else {}  # ids of arrows
                events.append(event | own | {"pid": rank, "ts": event["ts"] + late})
        events.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}})
    write_whole(path, json.dumps({"baseTimeNanoseconds": begin, "displayTimeUnit": "ms", "traceEvents": events}))


def communication(trace: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Returns, by the name of a collective, the seconds in which one ran, and for how many of them the rank waited."""
    spans: dict[str, list[Span]] = {}
    waits = []
    for event in trace["traceEvents"]:
        if event["ph"] != "X" or not isinstance(event["pid"], int):
            continue
        span, name = (event["ts"], event["ts"] + event["dur"]), event["name"]
        if name.startswith(WAITING):
            waits.append(span)
        elif name.startswith(BACKENDS):
            spans.setdefault(name, []).append(span)
    waited = _seconds(waits)
    ran = {name: (_seconds(found), _seconds([*found, *waits])) for name, found in spans.items()}
    return {name: (seconds, max(0.0, seconds + waited - together)) for name, (seconds, together) in ran.items()}


def _seconds(spans: Sequence[Span]) -> float:
    """The length of the union of some spans."""
    total, reached = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total / 1e6
