"""The lock of a run: it leaves no empty folder, and its removal lets no second process in."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quern.runs.run_dir import RunDir
from quern.runs.run_lock import RunInUseError, run_lock


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
