"""The lock of a run: one process trains, another is told who does, and no death leaves a lock behind."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from quern.runs.run_dir import RunDir
from quern.runs.run_lock import RunInUseError, run_lock

HOLDER = """
import sys, time
from pathlib import Path
from quern.runs.run_dir import RunDir
from quern.runs.run_lock import run_lock

with run_lock(RunDir(Path(sys.argv[1]), "r"), "quern pretrain --run r"):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path, "r")


def test_the_second_process_is_told_who_holds_it_until_that_is_killed(run_dir: RunDir) -> None:
    root = str(Path(__file__).parents[2])
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run_dir.out)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
    )
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    said = rf"run 'r' is in use by process {holder.pid} on .* since .* UTC"
    with pytest.raises(RunInUseError, match=said) as error, run_lock(run_dir, "quern sft"):
        pytest.fail("both hold it")
    assert "(`quern pretrain --run r`): wait until it ends, stop it, or name another run with --run" in str(error.value)
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    with run_lock(run_dir, "quern sft"):
        assert (run_dir.folder / ".lock").exists()


def test_a_run_that_was_refused_leaves_no_folder_and_one_that_wrote_stays(run_dir: RunDir) -> None:
    with pytest.raises(ValueError, match="refused"), run_lock(run_dir, "quern pretrain"):
        raise ValueError("refused")
    assert not run_dir.folder.exists()
    with run_lock(run_dir, "quern pretrain"):
        (run_dir.folder / "run.json").write_text("{}", encoding="utf-8")
    assert run_dir.folder.exists()


@pytest.mark.parametrize("link", ["runs/r", "runs", "runs/r/.lock"])
def test_a_link_to_a_disk_that_is_not_there_is_named(run_dir: RunDir, link: str) -> None:
    path = run_dir.out / link
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to("/nowhere/at all")
    expected = f"{re.escape(str(path))} links to /nowhere/at all, which is not there: put that back"
    with pytest.raises(FileNotFoundError, match=expected), run_lock(run_dir, "quern pretrain"):
        pytest.fail("the run is locked")


def test_never_two_at_a_time_while_others_remove_the_empty_folder(run_dir: RunDir) -> None:
    """A lock file is removed while others wait to open it: whoever locks the removed one does not hold the run."""
    inside, most, refused, done = [0], [0], [0], [0]
    guard = threading.Lock()

    def work() -> None:
        for _ in range(300):
            try:
                with run_lock(run_dir, "quern pretrain"):
                    with guard:
                        inside[0] += 1
                        most[0] = max(most[0], inside[0])
                        done[0] += 1
                    with guard:
                        inside[0] -= 1
            except RunInUseError:
                refused[0] += 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] and done[0] + refused[0] == 1200 and done[0] > 0
