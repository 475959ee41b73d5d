"""`quern runs` as its user calls it: the table, one run, another name, removal, and what differs between runs. The lock
of a run leaves no empty folder, and its removal lets no second process in."""

import os
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from quern.runs import manage
from quern.runs.run_dir import RunDir
from quern.runs.run_lock import RunInUseError, run_lock
from tests.support.command import Told
from tests.support.rows import write_rows


def write_run(out: Path, name: str, bits: float, age: float = 0.0, **recipe: object) -> RunDir:
    run_dir = RunDir(out, name)
    step = run_dir.checkpoints("pretrain") / "step-00000020"
    step.mkdir(parents=True)
    (step / "weights").write_bytes(b"\0" * 5000)
    lines = [{"step": 10, "val_bpb": 9.0}, {"step": 20, "val_bpb": bits}, {"step": 20, "loss": 1.0}]
    write_rows(run_dir.stage("pretrain") / "metrics.jsonl", lines)
    run_dir.write("run.json", {"data": {"source": "books"}, "model": {"parameters": {"total": 9_400_000}}})
    run_dir.write("pretrain/recipe.json", {"depth": 4, "optim": {"eps": 1.0}} | recipe)
    run_dir.write("pretrain/origin.json", {"tokenizer": "t"})
    for path in (run_dir.folder, *run_dir.folder.rglob("*")):
        os.utime(path, (path.stat().st_mtime - age, path.stat().st_mtime - age))
    return run_dir


@pytest.fixture
def mine(tmp_path: Path) -> RunDir:
    write_run(tmp_path, "older", 3.25, age=7200.5, depth=6)
    return write_run(tmp_path, "mine", 2.5)


@pytest.fixture
def runs(told: Told, mine: RunDir) -> Told:
    return lambda *words, code=0: told("runs", *words, "--out", mine.out, code=code)


def test_the_table_has_a_line_of_facts_for_each_run(mine: RunDir, runs: Told) -> None:
    (mine.out / "runs" / "notes.txt").write_text("no run", encoding="utf-8")
    (mine.folder / "run.json").write_text("damaged", encoding="utf-8")
    with run_lock(mine, "quern pretrain"):
        folder, head, *rows = runs().splitlines()
    assert folder == str(mine.out / "runs")
    assert head.split() == "name stages weights size text bits/byte age".split()
    cells = sorted(re.split(" {2,}", row.strip()) for row in rows)
    assert cells[0][:3] + cells[0][4:] == ["mine", "pretrain", "–", "–", "2.500", "1 s", "running"]
    assert cells[1][:3] + cells[1][4:] == ["older", "pretrain", "9.4 M", "books", "3.250", "2 hours"]
    assert all(re.fullmatch(r"5\.\d kB", row[3]) for row in cells)
    assert "running" not in runs()
    mine.stage("pretrain").rename(mine.stage("grug"))
    assert re.search(r" mine +grug +– .* 2\.500 ", runs()), "trained by the JAX twin"
    RunDir(mine.out, "older").stage("pretrain").rename(RunDir(mine.out, "older").stage("grug"))
    for names in (("mine", "older"), ("mine/grug", "older/grug")):
        assert re.search(r"^  depth: 4 \| 6$", said := runs("compare", *names), re.MULTILINE)
    assert "answers" not in said, "which a stage of JAX has not"


def test_a_run_that_has_just_begun_has_a_line_too(mine: RunDir, runs: Told) -> None:
    RunDir(mine.out, "empty").folder.mkdir()
    metrics = write_rows(mine.stage("pretrain") / "metrics.jsonl", [{"step": 1, "loss": 2.0}])
    lines = {line.split()[0]: line for line in runs().splitlines()}
    assert re.search(r" books  +–  +1 s$", lines["mine"].rstrip())
    assert lines["empty"].split() == ["empty", "–", "–", "0", "B", "–", "–", "1", "s"]
    with metrics.open("a", encoding="utf-8") as file:
        file.write('{"step": 2, "val_bpb": \n{"step": 2, "val_bpb": 1.5}\n')  # the first of them is damaged
        file.write('{"step": 3, "val_bpb": 1.')  # a crash tore the last line
    assert manage.bits_per_byte(mine) == 1.5


def test_one_run_is_shown_with_its_scores(mine: RunDir, runs: Told) -> None:
    mine.append("evaluate.jsonl", [{"stage": "pretrain", "task": "facts", "metric": "accuracy", "value": 0.5}])
    for words in (["mine"], ["show", "mine"]):
        text = runs(*words)
        score = "pretrain facts +accuracy 0.500"
        for line in (f"folder +{mine.folder}", "weights +9.4 M", "stages +pretrain", "in use by +nobody", score):
            assert re.search(rf"^  {line}", text, re.MULTILINE), line


def test_a_run_gets_another_name_unless_it_is_in_use_or_the_name_is(mine: RunDir, runs: Told) -> None:
    with run_lock(mine, "quern sft"):
        assert "run 'mine' is in use by process" in runs("rename", "mine", "new", code=1)
    assert "there is a run 'older' already" in runs("rename", "mine", "older", code=1)
    assert "run 'mine' is now 'new'" in runs("rename", "mine", "new")
    assert not mine.folder.exists() and manage.bits_per_byte(RunDir(mine.out, "new")) == 2.5


def test_a_run_is_removed_after_a_question_and_never_while_it_is_in_use(
    mine: RunDir, runs: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_lock(mine, "quern sft"):
        said = runs("remove", "older", "mine", "--yes", code=1)
        assert "is in use by process" in said and said.endswith("or stop it\n"), "it has no --run"
    assert RunDir(mine.out, "older").folder.exists()
    refused = runs("remove", "mine", code=1)
    assert "no terminal to ask whether to remove run 'mine' (5." in refused and "--yes" in refused
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda prompt: "")
    assert runs("remove", "mine") == "" and mine.folder.exists()
    monkeypatch.setattr("builtins.input", lambda prompt: "y")
    assert runs("remove", "mine").startswith("removed run 'mine' (5.")
    assert [path.name for path in (mine.out / "runs").iterdir()] == ["older"]
    disk, linked = mine.out / "disk", RunDir(mine.out, "older").folder
    disk.mkdir()
    linked.rename(disk / "older")
    linked.symlink_to(disk / "older")
    monkeypatch.setattr("builtins.input", Mock(side_effect=EOFError))  # Ctrl-D
    assert runs("remove", "older") == "" and linked.exists()
    assert runs("remove", "older", "older", "--yes").count("removed run 'older'") == 1
    assert [*(mine.out / "runs").iterdir(), *disk.iterdir()] == []


def test_a_run_is_measured_while_its_checkpoints_are_replaced(mine: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    step, scandir = mine.checkpoints("pretrain") / "step-00000020", os.scandir

    def once_listed(path: str | Path) -> Any:
        if str(path) == str(step):
            step.rename(mine.out / "removed")
        return scandir(path)

    monkeypatch.setattr("os.scandir", once_listed)
    assert 0 < manage._files(mine)[0] < 5000  # pyright: ignore[reportPrivateUsage]
    assert not step.exists()


def test_compared_runs_show_what_differs(mine: RunDir, runs: Told) -> None:
    lines = runs("compare", "mine", "older").splitlines()
    assert [line for line in lines if line.strip().startswith("depth")] == ["  depth: 4 | 6"]
    assert not any("optim.eps" in line for line in lines)
    mine.write("pretrain/recipe.json", {"depth": 4, "data": "texts/a\n" + "b" * 99})
    lines = runs("compare", "mine", "older").splitlines()
    assert f"  data: texts/a\\n{'b' * 99} | –" in lines and "  depth: 4 | 6" in lines
    mine.write("pretrain/recipe.json", {"depth": 4, "optim": {"eps": 1.0}, "train": {"clip_norm": 1.0}})
    for first, second, cells in (("mine", "older", "1.0 | –"), ("older", "mine", "– | 1.0")):
        assert f"  train.clip_norm: {cells}\n" in runs("compare", first, second), "set in one of them"
    assert "that differ" not in runs("compare", "mine/pretrain", "mine/sft"), "there is no such stage"
    lines = runs("compare", "mine", "older").splitlines()
    assert lines[-1].startswith("answers: run 'mine' has no answers yet: `quern evaluate --tasks TASK --run mine")
    for stage, makes in (("pretrain", "evaluate --tasks TASK --stage pretrain"), ("rl", "rl")):
        last = runs("compare", f"mine/{stage}", "older").splitlines()[-1]
        assert f"yet: `quern {makes} --run mine" in last
    for run, share in ((mine, 0.2), (RunDir(mine.out, "older"), 0.1)):
        run.write("sft/recipe.json", {"depth": 4, "sft": {"lr_share": share}})
        run.write("sft/origin.json", {"tokenizer": "t"})
    named = runs("compare", "mine/sft", "older/sft").splitlines()
    assert "  sft.lr_share: 0.2 | 0.1" in named and "  depth: 4 | 6" not in named
    shutil.rmtree(mine.stage("sft"))
    mine.stage("pretrain").rename(mine.stage("sft"))  # of another run's model
    assert runs("compare", "mine", "older").splitlines()[4:] == lines[4:]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("rename mine", "give it the names: quern runs rename RUN NEW"),
        ("remove mine/sft", "'mine/sft' cannot name a run: use letters"),
        ("compare older mine/dpo", "there is no stage 'dpo': use pretrain, grug, sft or rl$"),
        ("his", "there is no run 'his' under .*: name one of (mine, older|older, mine)$"),
    ],
)
def test_words_that_lack_a_run_are_refused(words: str, expected: str, mine: RunDir, runs: Told) -> None:
    assert re.search(expected, runs(*words.split(), code=1).strip())


def test_looking_at_a_lock_does_not_stop_who_takes_it(mine: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that looks holds the lock for an instant; the one that trains then tries again."""
    import fcntl

    looking = (mine.folder / ".lock").open("a")
    fcntl.flock(looking, fcntl.LOCK_SH)
    monkeypatch.setattr("quern.runs.run_lock.time.sleep", lambda seconds: looking.close())
    with run_lock(mine, "quern sft"):
        assert (mine.holder or "").endswith("(`quern sft`)")


# The lock -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path, "r")


def test_a_run_that_was_refused_leaves_no_folder_and_one_that_wrote_stays(run_dir: RunDir) -> None:
    with pytest.raises(ValueError, match="refused"), run_lock(run_dir, "quern pretrain"):
        raise ValueError("refused")
    assert not run_dir.folder.exists()
    with run_lock(run_dir, "quern pretrain"):
        (run_dir.folder / "run.json").write_text("{}", encoding="utf-8")
    assert run_dir.folder.exists()


def test_a_link_to_a_disk_that_is_not_there_is_named(run_dir: RunDir) -> None:
    path = run_dir.folder
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to("/nowhere/at all")
    expected = f"{re.escape(str(path))} links to /nowhere/at all, which is not there: put that back"
    with pytest.raises(FileNotFoundError, match=expected), run_lock(run_dir, "quern pretrain"):
        pytest.fail("the run is locked")


def test_never_two_at_a_time_while_others_remove_the_empty_folder(run_dir: RunDir) -> None:
    """A lock file is removed while others wait to open it: whoever locks the removed one does not hold the run."""
    alone = threading.Lock()

    def work(_: int) -> int:
        try:
            with run_lock(run_dir, "quern pretrain"):
                assert alone.acquire(blocking=False), "two hold the run"
                alone.release()
        except RunInUseError:
            return 0
        return 1

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(work, range(1200))) > 0


def test_a_folder_in_which_nothing_can_be_made_is_refused() -> None:
    with pytest.raises(FileNotFoundError, match="/proc/out"), run_lock(RunDir(Path("/proc/out"), "r"), "quern sft"):
        pytest.fail("the run is locked")
