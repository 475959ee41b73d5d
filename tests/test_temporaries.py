"""Temporaries: a killed writer's are removed, a living one's are kept, and files appear whole or not at all."""

import errno
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quern.temporaries import alone_in, plainly, remove_abandoned, scratch_folder, whole_file, write_whole
from tests.support.full_disk import full_disk


@contextmanager
def child(code: str, says: str, *arguments: Path | bytes) -> Iterator[subprocess.Popen[str]]:
    """A Python process that has printed this line; it is killed at the end."""
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout and process.stdout.readline() == f"{says}\n"
            yield process
        finally:
            process.kill()


WRITE_AND_WAIT = """
import os, sys, time
from pathlib import Path
from quern.temporaries import write_whole
os.fsync = lambda file: (print("writing", flush=True), time.sleep(60))
write_whole(Path(sys.argv[1]), "new")
"""


def test_a_file_that_is_being_written_is_left_alone_until_its_writer_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "[a]**.json"  # no pattern
    write_whole(path, "old")
    with child(WRITE_AND_WAIT, "writing", path):
        remove_abandoned(tmp_path)
        assert len(list(tmp_path.iterdir())) == 2
    assert path.read_text(encoding="utf-8") == "old" and len(list(tmp_path.iterdir())) == 2
    remove_abandoned(tmp_path, "b.json")
    assert len(list(tmp_path.iterdir())) == 2
    write_whole(path, "newer")
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert path.read_text(encoding="utf-8") == "newer"


def test_a_folder_that_goes_or_makes_no_files_is_an_error(tmp_path: Path) -> None:
    """It was tried forever."""
    code = "import sys, pathlib, quern.temporaries as own; own._temporary(pathlib.Path(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "gone" / "file"], capture_output=True, timeout=30)
    assert b"FileNotFoundError" in done.stderr


def test_what_cannot_be_written_leaves_the_previous_file(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "a.json"
    write_whole(path, "old")
    with pytest.raises(ValueError, match="planted"), whole_file(path) as temporary:
        temporary.write_text("new", encoding="utf-8")
        raise ValueError("planted")
    with full_disk(100), pytest.raises(OSError) as refused, whole_file(path) as temporary:
        temporary.write_bytes(b"new" * 1000)
    assert plainly(refused.value).startswith(f"{path}: File too large: ")
    assert path.read_text(encoding="utf-8") == "old" and len(list(path.parent.iterdir())) == 1
    remove_abandoned(tmp_path / "nowhere")


HOLD = """
import sys, time
from pathlib import Path
from quern.temporaries import alone_in
with alone_in(Path(sys.argv[1]), print):
    print("inside", flush=True)
    time.sleep(60)
"""


def test_one_process_at_a_time_is_in_the_body_and_a_killed_one_lets_the_next_in(tmp_path: Path) -> None:
    folder, waited = tmp_path / "new", list[str]()
    with child(HOLD, "inside", folder, b"caf\xe9.txt") as process:  # a holder writes its command into the lock

        def end(line: str) -> None:
            waited.append(line)
            process.kill()

        with alone_in(folder, end):
            assert waited[0].startswith("waiting for ") and r"caf\udce9.txt" in waited[0]
            assert process.wait(timeout=10) < 0
    with alone_in(folder, waited.append):
        assert len(waited) == 1


SCRATCH_AND_WAIT = """
import time
from quern.temporaries import scratch_folder
with scratch_folder() as folder:
    (folder / "model.sock").touch()
    print("ready", flush=True)
    time.sleep(60)
"""


def test_a_killed_process_leaves_no_scratch_folder_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with child(SCRATCH_AND_WAIT, "ready"), scratch_folder() as own:
        assert len(list(tmp_path.iterdir())) == 2 and own.stat().st_mode & 0o777 == 0o700
    assert len(list(tmp_path.iterdir())) == 1
    with scratch_folder() as own:
        assert list(tmp_path.iterdir()) == [own]
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_named_by_the_folder_that_is_written(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space") as refused, alone_in(tmp_path, print):
        raise OSError(errno.ENOSPC, "No space left on device")  # as a write does, which names no file
    assert plainly(refused.value) == f"{tmp_path}: No space left on device: make room there, or choose another place"


def test_an_error_names_the_file_that_was_asked_for_not_its_temporary(tmp_path: Path) -> None:
    (tmp_path / "plan").mkdir()
    with pytest.raises(OSError, match="Is a directory") as error:
        write_whole(tmp_path / "plan", "x")
    assert plainly(error.value).startswith(f"{tmp_path / 'plan'}: ")
