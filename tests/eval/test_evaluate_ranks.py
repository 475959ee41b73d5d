"""`quern evaluate` on two ranks over gloo: the scores and answers of one process, and what a failing rank leaves."""

import json
import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quern.cli import main
from tests.eval.test_core import rows_of
from tests.parallel.test_faults import lines_with
from tests.support.exported import toy_recipe, write_run
from tests.support.faulty_ranks import FaultyRanks
from tests.support.rows import write_rows
from tests.support.small_text import write_text

PLAIN = "--no-compile --dtype fp32 --threads 1 --device cpu --stage pretrain".split()
ASKED = "--tasks core/copa core/winograd core/lambada_openai tinyworld chat/mmlu".split()
Files = dict[str, list[dict[str, Any]]]


class Runs:
    """Copies of a run with one random model, to be evaluated from files of tasks."""

    def __init__(self, folder: Path, server: FaultyRanks) -> None:
        self.folder, self.server = folder, server
        write_text(folder)
        write_run(folder / "source", replace(toy_recipe("llama", context=128), data=str(folder / "text.jsonl")))
        for name, kind, count in (("copa", "choice", 80), ("winograd_wsc", "schema", 20), ("lambada_openai", "", 20)):
            rows = rows_of(kind, count, random.Random(name))
            # So long that the questions of a task are several batches.
            longer = [row | ({"query": row["query"] * 8} if "query" in row else {}) for row in rows]
            write_rows(folder / f"{name}.jsonl", longer)
        mmlu = [{"question": f"{n} and {n}?", "choices": ["one", "two", "six"], "answer": n % 3} for n in range(50)]
        write_rows(folder / "mmlu.jsonl", mmlu)
        self.flags = [*PLAIN, "--bundle", str(folder), "--questions", "3"]

    def command(self, name: str, *flags: str) -> list[str]:
        if not (self.folder / name).is_dir():
            shutil.copytree(self.folder / "source", self.folder / name)
        return ["evaluate", "--out", str(self.folder / name), *self.flags, *flags]

    def files(self, name: str) -> Files:
        """The lines of all records of a run, without the time that they took."""
        run = self.folder / name / "runs/first"
        found = {}
        for path in sorted(run.rglob("*.jsonl")):
            lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
            found[str(path.relative_to(run))] = list(lines)
        return found


@pytest.fixture(scope="module")
def runs(faulty_server: FaultyRanks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    yield Runs(tmp_path_factory.mktemp("evaluated"), faulty_server)


@pytest.fixture(scope="module")
def alone(runs: Runs) -> Files:
    assert main.main(runs.command("alone", *ASKED, "--chat-data", str(runs.folder), "--contamination")) == 0
    return runs.files("alone")


def test_two_ranks_give_the_scores_and_the_answers_of_one(runs: Runs, alone: Files) -> None:
    found = runs.server(runs.command("both", *ASKED, "--chat-data", str(runs.folder), "--contamination"), counted=True)
    assert found["exits"] == [[0, 0]] and found["result"] == 0, found["said"]
    both = runs.files("both")
    assert both.keys() == alone.keys() and len(both) == 13, "evaluate, samples, 3 of CORE, 7 of the world, 1 of chat"
    for name in both.keys() - {"evaluate.jsonl"}:
        assert both[name] == alone[name], name
    for ours, theirs in zip(both["evaluate.jsonl"], alone["evaluate.jsonl"], strict=True):
        assert ours == theirs | {"value": pytest.approx(theirs["value"], rel=1e-9)}
    assert {line["task"] for line in both["evaluate.jsonl"]} >= {"validation", "train", "tinyworld/sums", "chat/mmlu"}
    assert found["said"].count("evaluating: pretrain") == 1
    work = [found["events"][rank]["train"] for rank in "01"]
    assert min(work) > 1500, "both ranks compute: one that only loads the model has 850 events"


def test_a_rank_is_killed_in_the_middle_of_core_and_the_next_evaluation_goes_on(runs: Runs, alone: Files) -> None:
    core = ("--tasks", "core/winograd", "core/lambada_openai", "core/copa")  # the last one has batches for both
    found = runs.server(runs.command("counted", *core), counted=True)
    assert found["result"] == 0, found["said"]
    fault = {"rank": 1, "part": "train", "number": int(0.95 * found["events"]["1"]["train"])}
    faults = [fault | {"kind": kind} for kind in ("kill", "raise")]
    how = {"ranks": 2, "restarts": 0, "counted": False}
    requests = [how | {"arguments": runs.command(one["kind"], *core), "faults": [one]} for one in faults]
    killed, raised = runs.server.together(requests)
    assert killed["exits"] == [[1, -9]] and raised["exits"] == [[1, 1]], (killed, raised)
    (gone,) = lines_with("quern evaluate:", killed["said"])  # its last heartbeat may be from before
    seen = r"last seen (setting up|evaluating); rank 0 is evaluating; all end"
    assert re.fullmatch(f"quern evaluate: rank 1 is gone or stopped, {seen}", gone)
    failed = "quern evaluate: rank 1 failed while evaluating: ValueError: planted; all end"
    assert lines_with("quern evaluate:", raised["said"]) == [failed]
    before = runs.files("kill")
    kept = [name for name in before if name.startswith("answers/pretrain/core/")]
    assert len(kept) == 2 and "evaluate.jsonl" not in before
    folder = runs.folder / "kill/runs/first"
    times = {name: (folder / name).stat().st_mtime_ns for name in kept}
    found = runs.server(runs.command("kill", *core))
    assert found["result"] == 0, found["said"]
    assert {name: (folder / name).stat().st_mtime_ns for name in kept} == times
    after = runs.files("kill")
    for name in alone:
        assert not name.startswith("answers/pretrain/core/") or after[name] == alone[name], name


def test_an_error_that_all_ranks_find_is_said_once(runs: Runs) -> None:
    found = runs.server(runs.command("none", "--tasks", "core/copa", "none.py"))
    assert found["result"] == 1 and found["exits"] == [[0, 0]]
    (line,) = lines_with("quern evaluate:", found["said"])
    told = "quern evaluate: there is no task 'none.py': use tinyworld, core, chat, or the path of a .py file"
    assert line.startswith(told)
