"""The board's reader against plain reading of the same files: samples, growth, rewinds, statuses, studies, speed."""

import json
import math
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from quern.lab.board.reader import Curve
from quern.lab.board.server import OVERVIEW_POINTS, Board, NotFound
from quern.records import StageFolder
from tests.support.rows import write_rows

EVERY = 250


def lines(steps: int, seed: int = 0, pad: int = 0) -> list[str]:
    """A metrics file with a line every ten steps and a validation every 250."""
    draw = random.Random(seed)
    found = []
    for step in range(10, steps + 1, 10):
        tokens = 8192 * step
        line: dict[str, Any] = {"step": step, "tokens": tokens, "flops": tokens * 5e6, "seconds": step / 8}
        line |= {"loss": 3 + draw.random(), "grad_norm": draw.random(), "tokens_per_second": 65536.0, "mfu": 0.41}
        if pad:
            line["note"] = "x" * draw.randrange(pad)
        found.append(json.dumps(line) + "\n")
        if step % EVERY == 0:
            found.append(json.dumps({"step": step, "tokens": tokens, "val_bpb": 1 + 10 / step}) + "\n")
    return found


def write_run(out: Path, name: str, content: str, events: Sequence[dict[str, Any]] = ()) -> Path:
    folder = out / "runs" / name / "pretrain"
    write_rows(folder / "events.jsonl", events)
    (folder / "metrics.jsonl").write_text(content)
    (folder / "recipe.json").write_text(json.dumps({"depth": 4, "train": {"eval_every": EVERY, "steps": 1000}}))
    return folder


def ask(board: Board, *names: str, **more: Any) -> dict[str, Any]:
    usual = {"x": "steps", "y": "loss", "points": 1000, "runs": dict.fromkeys(names, [0, 0])}
    return board.curves(usual | more)["runs"]


@pytest.mark.parametrize("seed", range(2))
def test_a_sample_is_true_lines_and_has_all_validations(tmp_path: Path, seed: int) -> None:
    written = lines(20_000, seed, pad=(0, 400)[seed % 2])
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(written))
    offsets, at = {}, 0
    for line in written:
        at += len(line)
        offsets[at] = json.loads(line)
    curve = Curve(path)
    curve.refresh(100)
    assert curve.rows == [(offset, offsets[offset]) for offset, _ in curve.rows]
    assert [offset for offset, _ in curve.rows] == sorted({offset for offset, _ in curve.rows})
    validations = [fields for _, fields in curve.rows if "val_bpb" in fields]
    assert validations == [fields for fields in offsets.values() if "val_bpb" in fields]
    assert 100 <= len(curve.rows) <= 100 + len(validations) + 30
    assert curve.end == path.stat().st_size and curve.damaged == 0
    steps = [0, *(fields["step"] for _, fields in curve.rows)]
    assert max(b - a for a, b in zip(steps, steps[1:], strict=False)) <= 3 * 20_000 / 100, "a hole in the sample"
    assert curve.last["loss"] == json.loads(written[-2])["loss"]


def test_only_new_bytes_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(lines(5000)))
    curve = Curve(path)
    curve.refresh(50)
    before = list(curve.rows)
    size = path.stat().st_size
    with path.open("r+b") as file:  # what was read is destroyed, in place; it would show if it were read again
        file.write(b"#" * (size - 1) + b"\n")
        file.seek(size)
        file.write(b'{"step": 5010, "loss": 2.5}\n{"step": 5020, "lo')
    curve.refresh(50)
    assert curve.rows[:-1] == before and curve.rows[-1][1] == {"step": 5010, "loss": 2.5}
    with path.open("ab") as file:  # the torn line is read when it is whole
        file.write(b'ss": 2.25}\n')
    curve.refresh(50)
    assert [fields["step"] for _, fields in curve.rows[-2:]] == [5010, 5020]
    assert curve.damaged == 0 and curve.end == path.stat().st_size


def test_a_page_gets_only_the_points_it_lacks_and_all_after_a_rewind(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "a", "".join(lines(500)))
    board = Board(tmp_path)
    board.listing()
    first = ask(board, "a/pretrain")["a/pretrain"]
    assert first["fresh"] and first["x"] == list(range(10, 501, 10))
    known = {"a/pretrain": first["at"]}
    assert ask(board, runs=known) == {}
    with StageFolder(folder) as records:
        records.metric(step=510, tokens=510 * 8192, loss=2.5)
    grown = ask(board, runs=known)["a/pretrain"]
    assert (grown["fresh"], grown["x"], grown["y"]) == (False, [510], [2.5])
    with StageFolder(folder) as records:
        records.rewind(100)
        for step in range(110, 4001, 10):  # more bytes than before: the size does not tell
            records.metric(step=step, tokens=step * 8192, loss=1.5)
    again = ask(board, runs={"a/pretrain": grown["at"]})["a/pretrain"]
    assert again["fresh"] and again["x"] == list(range(10, 4001, 10)) and again["y"][-1] == 1.5


HOUR = 3600
START = {"kind": "start", "step": 0, "steps": 500}
SAVE, STOP = {"kind": "save", "step": 20}, {"kind": "stop", "step": 20, "reason": "signal"}
SLOW = [{"step": at, "seconds": 300.0 * at, name: 2.0} for at, name in ((1, "loss"), (2, "loss"), (2, "val_bpb"))]


@pytest.mark.parametrize(
    ("events", "age", "status"),
    [
        ([START, {"kind": "finish", "step": 500}], 9 * HOUR, "finished"),
        ([START, STOP], 9 * HOUR, "stopped"),
        ([START, STOP | {"reason": "11 steps in a row were not finite; …"}], HOUR, "diverged"),
        ([START, STOP, {"kind": "resume", "step": 20, "steps": 500}], 5, "running"),
        ([START, SAVE], 100, "running"),
        ([START, SAVE], 200, "stuck"),
        ([], 5, "running"),
        (SLOW, 2000, "running"),
        (SLOW, 4000, "stuck"),
    ],
)
def test_statuses(tmp_path: Path, events: list[dict[str, Any]], age: float, status: str) -> None:
    folder = write_run(tmp_path, "a", "".join(lines(200)), [START] if events is SLOW else events)
    if events is SLOW:
        write_rows(folder / "metrics.jsonl", SLOW)
    for name in ("metrics.jsonl", "events.jsonl"):
        os.utime(folder / name, (time.time() - age, time.time() - age))
    [run] = Board(tmp_path).listing()["runs"]
    assert run["status"] == status and run["age"] == pytest.approx(age, abs=30)
    assert run["steps"] == (500 if events else 1000)


def test_damage_does_not_hide_the_other_runs(tmp_path: Path) -> None:
    write_run(tmp_path, "good", "".join(lines(100)))
    damaged = '{"step": 10, "loss": NaN}\n{"st\nnull\n{"step": "x", "loss": 1e999}\n{"step": 30, "loss": 2.0}\n'
    bad = write_run(tmp_path, "bad", damaged)
    (bad / "recipe.json").write_text("{")
    (bad / "events.jsonl").write_bytes(b'\xff\n{"kind": "finish"}\n[]\n')
    board = Board(tmp_path)
    listing = board.listing()
    json.dumps(listing, allow_nan=False)
    told = {run["run"]: (run["damaged"], run["status"]) for run in listing["runs"]}
    assert told == {"good": (0, "running"), "bad": (2, "finished")}
    found = ask(board, "bad/pretrain", "good/pretrain", "no/such", "../../etc")
    assert (found["bad/pretrain"]["x"], found["bad/pretrain"]["y"]) == ([30], [2.0])
    assert set(found) == {"bad/pretrain", "good/pretrain"} and len(found["good/pretrain"]["x"]) == 10


def trial(arm: str, seed: int, bpb: float | None) -> dict[str, Any]:
    curve = [{"step": s, "tokens": 10 * s, "flops": 1e3 * s, "seconds": s / 4, "bpb": 1 + 1 / s} for s in (1, 2, 4)]
    line = {"recipe": arm, "steps": 4, "seed": seed, "data_seed": seed, "tokens": 40, "flops": 4e3, "seconds": 1.0}
    return line | {"bpb": bpb, "tokens_per_second": 40.0, "curve": curve}


LINES = {
    "trials": trial("gpt", 0, 1.25),
    "cells": {**trial("gpt", 0, 1.25), "budget": 3e13, "size": "4x96"},
    "sweep": {"trial": 7, "runs": [trial("gpt", 0, 1.25), trial("gpt", 1, 1.5)]},
}
"""A line of the records of each kind of study."""


def write_study(out: Path, name: str, kind: str, **changed: Any) -> None:
    (out / "lab" / name).mkdir(parents=True)
    text = json.dumps(LINES[kind] | changed).replace("Infinity", "1e999") + "\n"
    (out / "lab" / name / f"{kind}.jsonl").write_text(text)


@pytest.mark.parametrize(
    ("kind", "changed"), [("trials", {"steps": [4], "curve": 4}), ("cells", {"seed": math.inf}), ("sweep", {"runs": 7})]
)
def test_a_field_of_another_type_hides_no_other_study(tmp_path: Path, kind: str, changed: dict[str, Any]) -> None:
    write_study(tmp_path, "good", "trials")
    write_study(tmp_path, "bad", kind, **changed)
    (tmp_path / "lab" / "bad" / "study.json").write_text('{"rungs": 3}')
    bad = write_run(tmp_path, "bad", '{"step": 10, "loss": 2.5}\n', [{"kind": ["start"]}])
    (bad / "recipe.json").write_text('{"depth": 1e999}')
    board = Board(tmp_path)
    for study in (None, "good", "bad"):
        assert json.loads(json.dumps(board.listing(study), allow_nan=False))["studies"] == ["bad", "good"]
    assert ask(board, "0", y="val_bpb", study="good")["0"]["y"] == [2.0, 1.5, 1.25]


def test_sweeps_and_isoflop_studies_are_studies(tmp_path: Path) -> None:
    for kind in ("cells", "sweep"):
        write_study(tmp_path, kind, kind, **({"values": {"optim.matrix_lr": 0.02}} if kind == "sweep" else {}))
    board = Board(tmp_path)
    assert [run["run"] for run in board.listing("cells")["runs"]] == ["4x96 at 3e+13 FLOPs"]
    runs = board.listing("sweep")
    assert [run["run"] for run in runs["runs"]] == ["trial 7", "trial 7"]
    assert runs["constant"]["optim.matrix_lr"] == 0.02  # and a field that differs is in the rows


def test_an_empty_folder_and_wrong_requests(tmp_path: Path) -> None:
    board = Board(tmp_path)
    assert board.listing()["runs"] == [] and ask(board, "a/pretrain") == {}
    with pytest.raises(NotFound):
        board.listing("none")
    for wrong in ({"x": "lr"}, {"y": 3}, {"runs": []}, {"points": "many"}):
        with pytest.raises(ValueError, match="send x"):
            board.curves({"x": "steps", "y": "loss", "points": 10, "runs": {}} | wrong)


def test_a_study(tmp_path: Path) -> None:
    folder = tmp_path / "lab" / "night"
    recipes = {"gpt": {"depth": 4, "optim": {"lr": 0.1}}, "idea": {"depth": 4, "optim": {"lr": 0.2}}}
    arms = [{"arm": name, "recipe": recipe, "source": "#" * 9000} for name, recipe in recipes.items()]
    write_rows(folder / "arms.jsonl", arms)
    write_rows(folder / "trials.jsonl", [trial("gpt", 0, 1.25), trial("gpt", 1, 1.75), trial("idea", 0, None)])
    plan = {"base": "gpt", "delta": 0.002, "ladder": False}
    (folder / "study.json").write_text(json.dumps(plan | {"rungs": {"0": {}, "1": {}}, "cells": [{}]}))
    verdicts = [{"idea": "idea", "axis": "steps", "n": 5, "mean": -0.1, "low": -0.2, "verdict": "worse"}, {}]
    verdicts += [{"interval": [-0.2, None]}, {"interval": 3}]
    (folder / "verdicts.json").write_text(json.dumps(verdicts))
    board = Board(tmp_path)
    listing = board.listing("night")
    assert listing["studies"] == ["night"] and listing["registered"] == plan
    assert listing["kinds"] == {"night": "Study"}, "one size has a second rung too"
    assert listing["constant"] == {"depth": 4, "train.steps": 4}
    runs = [(run["run"], run["status"], run["recipe"]["seed"]) for run in listing["runs"]]
    assert runs == [("gpt", "finished", 0), ("gpt", "finished", 1), ("idea", "diverged", 0)]
    assert listing["runs"][2]["recipe"] == {"optim.lr": 0.2, "arm": "idea", "seed": 0, "data_seed": 0}
    verdicts[2] |= {"low": -0.2, "high": None}  # of an earlier version
    assert listing["verdicts"] == verdicts
    found = ask(board, "0", x="seconds", y="val_bpb", study="night")
    assert (found["0"]["x"], found["0"]["y"]) == ([0.25, 0.5, 1.0], [2.0, 1.5, 1.25])
    with (folder / "trials.jsonl").open("a") as file:  # the study goes on
        file.write(json.dumps(trial("idea", 1, 1.5)) + "\n")
        file.write(json.dumps(trial("idea", 2, None) | {"error": "idea.py, line 3: KeyError"}) + "\n")
    *earlier, failed = board.listing("night")["runs"]
    assert len(earlier) == 4 and (failed["status"], failed["reason"]) == ("failed", "idea.py, line 3: KeyError")
    arms.append({"arm": "idea", "recipe": recipes["idea"], "code": "repaired"})
    write_rows(folder / "arms.jsonl", arms)
    assert [(run["id"], run["run"]) for run in board.listing("night")["runs"]] == [("0", "gpt"), ("1", "gpt")]
    with (folder / "trials.jsonl").open("a") as file:
        file.write(json.dumps(trial("idea", 0, 1.5) | {"code": "repaired"}) + "\n")
    assert [run["id"] for run in board.listing("night")["runs"]] == ["0", "1", "5"]
    (folder / "verdicts.json").unlink()
    assert board.listing("night")["verdicts"] == []


def test_a_thousand_long_runs_open_without_reading_them_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 runs × 10,000 points: list and curves take less CPU time than parsing a twentieth of the lines.

    It is 1.8 s where parsing all lines takes about 60 s; a share holds on every machine. The runs are hard links to
    ten files of 2 MB.
    """
    bodies = ["".join(lines(100_000, seed)) for seed in range(10)]
    done = [START, {"kind": "finish", "step": 100_000}]
    for number in range(1000):
        folder = write_run(tmp_path, f"run-{number:04d}", "" if number >= 10 else bodies[number], done)
        if number >= 10:
            (folder / "metrics.jsonl").unlink()
            os.link(tmp_path / f"runs/run-{number % 10:04d}/pretrain/metrics.jsonl", folder / "metrics.jsonl")
    assert (tmp_path / "runs/run-0000/pretrain/metrics.jsonl").stat().st_size > 10_000 * 150
    start = time.thread_time()  # threads that earlier tests left behind take no part
    for body in bodies:
        for line in body.splitlines():
            json.loads(line)
    whole = 100 * (time.thread_time() - start)
    board = Board(tmp_path)
    start = time.thread_time()
    listing = board.listing()
    names = [run["id"] for run in listing["runs"]]
    found = ask(board, *names, y="val_bpb", x="tokens", points=OVERVIEW_POINTS)
    content = json.dumps(listing) + json.dumps(found)
    seconds = time.thread_time() - start
    assert len(names) == len(found) == 1000 and len(content) < 4e6
    assert all(len(curve["x"]) >= 20 for curve in found.values())
    assert seconds < whole / 20, f"{seconds:.2f} s of CPU time, parsing everything {whole:.0f} s"
    read = []
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda *given, **options: read.append(1) or loads(*given, **options))
    board.listing()
    assert not read, "a folder without changes must not be read again"
    (tmp_path / "runs/run-0500/pretrain/events.jsonl").touch()
    board.listing()
    assert read, "a changed file is read again"
