"""Saves that are killed or fail at any point."""

import json
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import torch

from quern.train.checkpoint import load, save
from quern.train.manifest import CheckpointError, latest
from tests.support.full_disk import full_disk
from tests.support.line_server import ENVIRONMENT
from tests.train.checkpoint_oracle import fast_folder, identity_of, no_report, on_disk, put, temporaries, watched

__all__ = ["fast_folder"]  # a fixture


# For each folder in argv[2:], named <kind>-<step>: saves that step into copies of the folder argv[1], one
# process per k, which dies before the k-th change of the disk (kind "point") or in the middle of writing the k-th KiB
# (kind "byte"), until one survives. Prints how many died, and the points that the survivor passed.
KILLER = """
import json, os, resource, shutil, signal, sys
from pathlib import Path
import torch
from quern.train.checkpoint import save
from tests.train.checkpoint_oracle import watched

def child(folder, kind, step, k):
    points = []
    def at(point):
        if kind == "point" and len(points) == k:
            os.kill(os.getpid(), signal.SIGKILL)
        points.append(point)
    if kind == "byte":
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (k * 1024, k * 1024))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the kernel kills in the middle of write()
    with watched(at):
        save(folder, step, {"x": torch.full((2000,), 77)}, {"id": 77}, keep=2)
    print(json.dumps([k, points]), flush=True)
    os._exit(0)

for out in map(Path, sys.argv[2:]):
    kind, step = out.name.split("-")
    for k in range(100):
        shutil.copytree(sys.argv[1], out / str(k))
        pid = os.fork()
        if pid == 0:
            child(out / str(k), kind, int(step), k)
        status = os.waitpid(pid, 0)[1]
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        assert os.WTERMSIG(status) == (signal.SIGKILL if kind == "point" else signal.SIGXFSZ), status
"""


def test_killed_anywhere_in_a_save_leaves_the_old_or_the_new(fast_folder: Path) -> None:
    """Saving step 3 prunes step 1, and saving step 2 replaces a step. The folder holds remains of crashed saves."""
    base = fast_folder / "base"
    for step in (1, 2):
        put(base, step, step)
    shutil.copytree(base / "step-00000001", base / f"step-00000009.tmp-{uuid.uuid4().hex}")
    shutil.copytree(base / "step-00000001", base / f"step-00000001.old-{uuid.uuid4().hex}")
    cases = [f"{kind}-{step}" for kind in ("point", "byte") for step in (3, 2)]
    done = subprocess.run(
        [sys.executable, "-c", KILLER, str(base), *(str(fast_folder / case) for case in cases)],
        capture_output=True,
        text=True,
        timeout=120,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr
    for case, line in zip(cases, done.stdout.splitlines(), strict=True):
        deaths, points = json.loads(line)
        assert set(points) == {"mkdir", "rmtree", "write_bytes", "write_text", "fsync", "rename"}
        assert deaths >= 12
        if case.startswith("point"):
            assert deaths == len(points)
        check_deaths(fast_folder / case, deaths)


def check_deaths(folder: Path, deaths: int) -> None:
    before = {1: 1, 2: 2}
    after = {2: 2, 3: 77} if folder.name.endswith("3") else {1: 1, 2: 77}
    seen = set()
    for k in range(deaths):
        state = on_disk(folder / str(k))
        assert state in (before, after, before | after), (folder.name, k)
        seen.add(max(state.items()))
        found = latest(folder / str(k), no_report)
        assert found is not None
        assert found[1]["meta"]["id"] == state[max(state)] == identity_of(found[0])
        assert load(found[0])[0]["x"].tolist() == [state[max(state)]] * 2000
        put(folder / str(k), 4, 4, keep=3)
        assert on_disk(folder / str(k)) == dict(sorted((state | {4: 4}).items())[-3:])
        assert temporaries(folder / str(k)) == []
    old_and_new = {max(before.items()), max(after.items())}
    assert seen == (old_and_new if folder.name.startswith("point") else {max(before.items())})


def test_files_are_synced_before_the_rename_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulates a power cut: every name and byte is on the disk before a later operation depends on it."""
    order: list[int | str] = []
    fsync, rename = os.fsync, os.rename

    def record_fsync(descriptor: int) -> None:
        order.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def record_rename(source: Path, target: Path) -> None:
        order.append(Path(target).name)
        rename(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    path = put(tmp_path, 1, 1)
    renamed = order.index("step-00000001")
    (data,) = path.glob("*.safetensors")
    first_synced = [order.index(file.stat().st_ino) for file in (data, path / "manifest.json", path)]
    assert first_synced == sorted(first_synced) and first_synced[-1] < renamed
    assert order[renamed + 1 :] == [tmp_path.stat().st_ino]


def test_an_error_at_any_point_is_clear_and_harms_nothing(fast_folder: Path) -> None:
    error = OSError(28, "No space left on device")
    for k in range(100):
        folder = fast_folder / str(k)
        put(folder, 1, 1)
        put(folder, 2, 2)
        points: list[str] = []

        def at(point: str, points: list[str] = points, k: int = k) -> None:
            points.append(point)
            if len(points) > k and point != "rmtree":
                raise error

        try:
            with watched(at):
                put(folder, 3, 3, keep=2)
        except CheckpointError as failure:
            assert str(error.strerror) in str(failure) and str(folder) in str(failure)
            if "cannot write" in str(failure):
                assert "about 16,000 bytes" in str(failure) and "step 3" in str(failure)
                assert on_disk(folder).items() >= {1: 1, 2: 2}.items()
        else:
            break
        whole = on_disk(folder)
        found = latest(folder, no_report)
        assert found and found[1]["meta"]["id"] == max(whole) and len(whole) >= 2
        assert [name for name in temporaries(folder) if name.startswith("step-00000003")] == []
        put(folder, 4, 4, keep=2)
        assert max(on_disk(folder)) == 4 and len(on_disk(folder)) == 2
    else:
        raise AssertionError("the save never went through")
    assert k >= 9


def test_a_file_size_limit_is_a_clear_error(fast_folder: Path) -> None:
    """A real error: the kernel refuses the write (EFBIG; Python ignores SIGXFSZ)."""
    put(fast_folder, 1, 1)
    with full_disk(100_000), pytest.raises(CheckpointError, match="about 400,000 bytes") as refused:
        save(fast_folder, 2, {"x": torch.zeros(100_000)}, {}, keep=1)
    assert f"cannot write the checkpoint of step 2 to {fast_folder}: File too large" in str(refused.value)
    assert on_disk(fast_folder) == {1: 1} and temporaries(fast_folder) == []
