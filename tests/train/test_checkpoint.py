"""The contents of a checkpoint, the choice of the latest, flipped bits, and saves that are killed or fail anywhere."""

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quern.mesh import ProcessGroup, alone
from quern.train.checkpoint import load, save
from quern.train.manifest import CheckpointError, latest, steps, verify
from tests.support.full_disk import full_disk
from tests.support.line_server import ENVIRONMENT
from tests.train.checkpoint_oracle import fast_folder, identity_of, on_disk, put, temporaries, tensors_of, watched

__all__ = ["fast_folder"]  # a fixture


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().flatten().view(torch.uint8).tolist())


# Content ----------------------------------------------------------------------------------------------------


def test_every_kind_of_tensor_comes_back_bit_for_bit(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(6, 4, generator=generator)
    odd = torch.tensor([0x7FC01234, -1, 0x7F800000, 1], dtype=torch.int32).view(torch.float32)
    tensors: dict[str, torch.Tensor] = {
        "fp32": base,
        "tied to fp32": base,
        "a row of fp32": base[1],
        "not contiguous": base.t(),
        "nan with payload, -nan, inf, subnormal": odd,
        "bf16": torch.randn(5, 3, generator=generator).bfloat16(),
        "int64": torch.tensor([-(2**63), 2**63 - 1]),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "bool": torch.tensor([True, False]),
        "random state": torch.get_rng_state(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "blocks.0/ä": torch.arange(3, dtype=torch.uint8),
    }
    meta = {"step": 3, "loss": 1 / 3, "names": ["ä", None, True], "nested": {"a": [1, 2**60]}}
    path = save(tmp_path / "new" / "checkpoints", 3, tensors, meta, keep=1)
    assert path == tmp_path / "new" / "checkpoints" / "step-00000003"
    loaded, loaded_meta = load(path)
    independent = load_file(next(path.glob("*.safetensors")))
    assert loaded_meta == meta
    assert set(loaded) == set(independent) == set(tensors)
    for name, tensor in tensors.items():
        for other in (loaded[name], independent[name]):
            assert other.dtype == tensor.dtype and other.shape == tensor.shape, name
            assert raw(other) == raw(tensor), name
    assert load(save(tmp_path, 0, {}, {"a": 1}, keep=1)) == ({}, {"a": 1}), "a state without tensors"


def test_only_safetensors_and_json_reach_the_disk_and_no_randomness_is_drawn(tmp_path: Path) -> None:
    state, python_state = torch.get_rng_state(), random.getstate()
    path = put(tmp_path, 1, 5)
    load(path)
    assert torch.equal(torch.get_rng_state(), state) and random.getstate() == python_state
    assert sorted(file.suffix for file in path.rglob("*")) == [".json", ".safetensors"]


def test_the_same_state_has_the_same_bytes(tmp_path: Path) -> None:
    """By themselves, files of safetensors have one of six orders of their metadata."""
    files = [next(put(tmp_path / f"{again}", 1, 5).glob("*.safetensors")).read_bytes() for again in range(8)]
    assert len(set(files)) == 1


@pytest.mark.parametrize("meta", [{"a": float("nan")}, {"a": (1, 2)}, {1: "a"}, {"a": object()}])
def test_meta_that_would_not_read_back_equal_is_refused_before_a_write(meta: dict[Any, Any], tmp_path: Path) -> None:
    with pytest.raises((ValueError, TypeError), match="meta must|JSON"):
        save(tmp_path / "c", 1, {}, meta, keep=1)
    assert not (tmp_path / "c").exists()


# Which one is the latest ------------------------------------------------------------------------------------


def test_foreign_things_are_no_checkpoints_and_steps_sort_by_number(tmp_path: Path) -> None:
    assert latest(tmp_path / "missing", pytest.fail) is None and steps(tmp_path / "missing") == []
    assert latest(tmp_path, pytest.fail) is None
    for name in ("step-5", "best", "step-00000007.tmp", "Step-00000008", "step-00000009-copy"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000099").write_text("a file", encoding="utf-8")
    (tmp_path / "notes.txt").write_text("", encoding="utf-8")
    assert latest(tmp_path, pytest.fail) is None and steps(tmp_path) == []
    put(tmp_path, 2, 5, keep=1)
    assert steps(tmp_path) == [2]
    found = latest(tmp_path, pytest.fail)
    assert found and found[0].name == "step-00000002" and found[1]["meta"] == {"id": 5}
    assert (tmp_path / "best").exists() and (tmp_path / "notes.txt").exists()
    for step in (99_999_999, 100_000_000):
        put(tmp_path, step, step)
    found = latest(tmp_path, pytest.fail)
    assert steps(tmp_path) == [2, 99_999_999, 100_000_000] and found and found[1]["step"] == 100_000_000


@pytest.mark.parametrize("damage", ["file gone", "manifest gone", "truncated", "renamed"])
def test_a_damaged_step_is_named_and_the_one_before_is_used(damage: str, tmp_path: Path) -> None:
    put(tmp_path, 1, 1)
    path = put(tmp_path, 2, 2)
    (file,) = path.glob("*.safetensors")
    culprit = file.name
    if damage == "file gone":
        file.unlink()
    elif damage == "manifest gone":
        (path / "manifest.json").unlink()
        culprit = "manifest.json"
    elif damage == "truncated":
        os.truncate(file, file.stat().st_size - 1)
    else:
        path = path.rename(tmp_path / "step-00000003")
        culprit = "not the step it is named after"
    reports: list[str] = []
    found = latest(tmp_path, reports.append)
    assert found and found[1]["meta"] == {"id": 1}
    assert len(reports) == 1 and culprit in reports[0]
    assert f"step {int(path.name[5:])} is damaged" in reports[0]
    with pytest.raises(CheckpointError, match=culprit):
        load(path)


def rewrite_manifest(path: Path, changes: dict[str, Any]) -> None:
    """Changes a manifest and updates its hash, as if another version of quern had written it."""
    manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8")) | changes
    del manifest["sha256"]
    canonical = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
    manifest["sha256"] = hashlib.sha256(canonical).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def test_a_newer_schema_says_to_update_and_is_not_passed_over(tmp_path: Path) -> None:
    put(tmp_path, 1, 1)
    path = put(tmp_path, 2, 2)
    rewrite_manifest(path, {})
    verify(path)  # the rewriting itself is sound
    rewrite_manifest(path, {"schema": 2})
    for read in (verify, load, lambda path: latest(path.parent, pytest.fail)):
        with pytest.raises(ValueError, match="schema 2, this version reads up to 1: update quern"):
            read(path)


def flip(file: Path, offset: int, bit: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(offset)
        (byte,) = stream.read(1)
        stream.seek(offset)
        stream.write(bytes([byte ^ (1 << bit)]))


@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.campaign)])
def test_a_flipped_bit_is_detected_or_the_same_content_is_loaded(count: int, fast_folder: Path) -> None:
    folder, rng = fast_folder, random.Random(count)
    put(folder, 1, 1)
    path = put(folder, 2, 2)
    (data,) = path.glob("*.safetensors")
    header_bytes = 8 + int.from_bytes(data.read_bytes()[:8], "little")
    manifest = path / "manifest.json"
    regions = [
        (data, 0, 8),
        (data, 8, header_bytes),
        (data, header_bytes, data.stat().st_size),
        (manifest, 0, manifest.stat().st_size),
    ]
    detected = {file.name: 0 for file, _, _ in regions}
    for trial in range(count):
        file, start, stop = regions[trial % len(regions)]
        offset, bit = rng.randrange(start, stop), rng.randrange(8)
        flip(file, offset, bit)
        reports: list[str] = []
        found = latest(folder, reports.append)
        assert found is not None
        if found[0] == path:
            assert file == manifest, "a flip in the tensors' file was not detected"
            tensors, meta = load(path)
            assert meta == {"id": 2} and torch.equal(tensors["x"], tensors_of(2)["x"]), (offset, bit)
        else:
            detected[file.name] += 1
            assert found[1]["meta"] == {"id": 1}
            assert len(reports) == 1 and "step 2 is damaged" in reports[0] and file.name in reports[0]
        flip(file, offset, bit)
    verify(path)
    assert detected[data.name] == count // 4 * 3 and detected[manifest.name] > count // 4 * 0.9


# Saves that are killed or fail at any point -----------------------------------------------------------------

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
        found = latest(folder / str(k), pytest.fail)
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
    order, fsync, rename = list[int | str](), os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda file: order.append(os.fstat(file).st_ino) or fsync(file))
    monkeypatch.setattr(os, "rename", lambda source, target: order.append(Path(target).name) or rename(source, target))
    path = put(tmp_path, 1, 1)
    renamed = order.index("step-00000001")
    (data,) = path.glob("*.safetensors")
    first_synced = [order.index(file.stat().st_ino) for file in (data, path / "manifest.json", path)]
    assert first_synced == sorted(first_synced) and first_synced[-1] < renamed
    assert order[renamed + 1 :] == [tmp_path.stat().st_ino]


def test_without_room_for_the_first_checkpoint_none_before_it_is_said_to_be_intact(tmp_path: Path) -> None:
    with full_disk(1000), pytest.raises(CheckpointError, match=r"are free there\. Make room, then resume\.") as failure:
        put(tmp_path, 1, 1)
    assert "intact" not in str(failure.value) and on_disk(tmp_path) == {}


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
                assert "Those before it are intact: make room" in str(failure)
                assert on_disk(folder).items() >= {1: 1, 2: 2}.items()
        else:
            break
        whole = on_disk(folder)
        found = latest(folder, pytest.fail)
        assert found and found[1]["meta"]["id"] == max(whole) and len(whole) >= 2
        assert [name for name in temporaries(folder) if name.startswith("step-00000003")] == []
        put(folder, 4, 4, keep=2)
        assert max(on_disk(folder)) == 4 and len(on_disk(folder)) == 2
    else:
        raise AssertionError("the save never went through")
    assert k >= 9


class Alike(ProcessGroup):
    """The group of ranks that all hold what this one holds."""

    def gather_objects(self, value: Any) -> list[Any]:
        return [value] * self.size

    def broadcast_object(self, value: Any) -> Any:
        return value


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_file_size_limit_is_a_clear_error(ranks: int, fast_folder: Path) -> None:
    """A real error: the kernel refuses the write (EFBIG; Python ignores SIGXFSZ). It names the bytes of all ranks."""
    put(fast_folder, 1, 1)
    mesh = replace(alone(), world=Alike("world", ranks, 0))
    with full_disk(100_000), pytest.raises(CheckpointError, match=f"about {ranks * 400_000:,} bytes") as refused:
        save(fast_folder, 2, {"x": torch.zeros(100_000)}, {}, keep=1, mesh=mesh)
    assert f"cannot write the checkpoint of step 2 to {fast_folder}: File too large" in str(refused.value)
    assert on_disk(fast_folder) == {1: 1} and temporaries(fast_folder) == []
