"""Records: strict JSON, whole lines after any death, no duplicates after a rewind."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest

from quern.records import StageFolder, changed_files, find_trackers, git_hash, read_events, read_metrics
from tests.support.full_disk import full_disk


def strict(text: str) -> Any:
    """Parse as RFC 8259 does, which knows no NaN and no Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_numbers_that_are_not_finite_become_null_and_an_event(tmp_path: Path) -> None:
    with StageFolder(tmp_path) as folder:
        folder.metric(step=7, loss=math.nan, lr={"head": math.inf, "matrix": 1.0}, parts=[0.5, -math.inf])
        folder.event("note", value=math.nan)
    (line,) = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert strict(line) == {"step": 7, "loss": None, "lr": {"head": None, "matrix": 1.0}, "parts": [0.5, None]}
    first, second = map(strict, (tmp_path / "events.jsonl").read_text(encoding="utf-8").splitlines())
    assert (first["kind"], first["step"]) == ("non_finite", 7)
    assert first["fields"] == ["loss", "lr.head", "parts[1]"]
    assert second["value"] is None


def test_a_value_that_json_cannot_hold_is_refused_by_name_and_leaves_no_line(tmp_path: Path) -> None:
    with StageFolder(tmp_path) as folder:
        with pytest.raises(TypeError, match="loss is a complex"):
            folder.metric(step=1, loss=1j)
        folder.metric(step=2)
    assert read_metrics(tmp_path) == [{"step": 2}]


def test_lines_wait_for_room_on_a_full_disk_which_is_named(tmp_path: Path) -> None:
    said = [{"step": step, "text": "x" * 1000} for step in range(20)]
    with StageFolder(tmp_path) as folder:
        with full_disk(100):
            for line in said[:-1]:
                folder.metric(**line)
            with pytest.raises(OSError) as refused:
                folder.flush()
        assert refused.value.filename == str(tmp_path / "metrics.jsonl")
        folder.metric(**said[-1])
        assert read_metrics(tmp_path) == said
    with full_disk(100), StageFolder(tmp_path / "unread") as folder:
        folder.metric(**said[0])


def test_every_torn_last_line_is_left_out_and_dropped_on_reopening(tmp_path: Path) -> None:
    with StageFolder(tmp_path / "whole") as folder:
        folder.metric(step=1, loss=2.5)
        folder.metric(step=2, text="ä\u2028")
    content = (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    first = content.index(b"\n") + 1
    for length in range(len(content) + 1):
        torn = tmp_path / str(length)
        torn.mkdir()
        (torn / "metrics.jsonl").write_bytes(content[:length])
        whole = [1] * (length >= first) + [2] * (length == len(content))
        assert [line["step"] for line in read_metrics(torn)] == whole
        with StageFolder(torn) as folder:
            folder.metric(step=3)
        assert [line["step"] for line in read_metrics(torn)] == [*whole, 3]


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == [] and read_events(tmp_path / "events.jsonl") == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2, is not a record"):
        read_metrics(tmp_path)


def test_rewind_drops_later_steps_only_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / ".metrics.jsonl.tmp-abcd").write_text("left by a crash", encoding="utf-8")
    with StageFolder(tmp_path) as folder:
        folder.metric(note="no step")
        for step in range(10):
            folder.metric(step=step, loss=float(step))
        folder.event("stop", step=9)
        folder.rewind(4)
        assert [line.get("step") for line in read_metrics(tmp_path)] == [None, 0, 1, 2, 3, 4]
        folder.metric(step=5, loss=-5.0)
    assert read_metrics(tmp_path)[-1] == {"step": 5, "loss": -5.0}
    assert len(read_events(tmp_path)) == 1, "events are history and stay"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["events.jsonl", "metrics.jsonl"]


def test_recipe_and_its_source_are_kept(tmp_path: Path) -> None:
    with StageFolder(tmp_path) as folder:
        folder.write_recipe({"depth": 4, "data": "tinyworld"}, "RECIPE = ...\n")
        folder.write_recipe({"depth": 5}, None)
        with pytest.raises(ValueError, match="not JSON compliant"):
            folder.write_recipe({"depth": math.nan}, None)
    assert strict((tmp_path / "recipe.json").read_text(encoding="utf-8")) == {"depth": 5}
    assert (tmp_path / "recipe_source.py").read_text(encoding="utf-8") == "RECIPE = ...\n"


def test_trackers_get_each_step_without_what_is_not_finite(tmp_path: Path) -> None:
    tracker = Mock()
    with StageFolder(tmp_path, trackers=[tracker]) as folder:
        folder.metric(step=1, loss=2.0)
        folder.metric(step=2, loss=math.nan)
        folder.metric(note="no step, so nowhere to plot it")
    assert tracker.log.mock_calls == [call({"step": 1, "loss": 2.0}, 1), call({"step": 2, "loss": None}, 2)]
    tracker.close.assert_called_once()


def test_a_missing_tracker_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    for name in ("wandb", "tensorboard"):
        with pytest.raises(ImportError, match=f"pip install {name}"):
            find_trackers([name])


def test_git_hash_is_the_commit_and_says_dirty(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", "-C", str(tmp_path), *arguments],
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout.strip()

    assert git_hash(tmp_path) is None
    git("init", "-q")
    assert git_hash(tmp_path) is None, "no commit yet"
    file = tmp_path / "a.py"
    file.write_text("1", encoding="utf-8")
    git("add", "a.py")
    git("commit", "-q", "-m", "one")
    commit = git_hash(tmp_path)
    assert commit and git("rev-parse", "HEAD").startswith(commit)
    file.write_text("2", encoding="utf-8")
    assert git_hash(tmp_path) == commit + "-dirty" and changed_files(tmp_path) == ["a.py"]
    assert git_hash(tmp_path / "nowhere") is None
