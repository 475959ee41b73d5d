"""The contents of a checkpoint, the choice of the latest, and the refusal of flipped bits."""

import hashlib
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quern.train.checkpoint import load, save
from quern.train.manifest import CheckpointError, latest, steps, verify
from tests.train.checkpoint_oracle import fast_folder, no_report, put, tensors_of

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


@pytest.mark.parametrize("meta", [{"a": float("nan")}, {"a": (1, 2)}, {1: "a"}, {"a": object()}])
def test_meta_that_would_not_read_back_equal_is_refused_before_anything_is_written(
    meta: dict[Any, Any], tmp_path: Path
) -> None:
    with pytest.raises((ValueError, TypeError), match="meta must|JSON"):
        save(tmp_path / "c", 1, {}, meta, keep=1)
    assert not (tmp_path / "c").exists()


# Which one is the latest ------------------------------------------------------------------------------------


def test_foreign_things_are_no_checkpoints_and_steps_sort_by_number(tmp_path: Path) -> None:
    assert latest(tmp_path / "missing", no_report) is None and steps(tmp_path / "missing") == []
    assert latest(tmp_path, no_report) is None
    for name in ("step-5", "best", "step-00000007.tmp", "Step-00000008", "step-00000009-copy"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000099").write_text("a file", encoding="utf-8")
    (tmp_path / "notes.txt").write_text("", encoding="utf-8")
    assert latest(tmp_path, no_report) is None and steps(tmp_path) == []
    put(tmp_path, 2, 5, keep=1)
    assert steps(tmp_path) == [2]
    found = latest(tmp_path, no_report)
    assert found and found[0].name == "step-00000002" and found[1]["meta"] == {"id": 5}
    assert (tmp_path / "best").exists() and (tmp_path / "notes.txt").exists()
    for step in (99_999_999, 100_000_000):
        put(tmp_path, step, step)
    found = latest(tmp_path, no_report)
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
    for read in (verify, load, lambda path: latest(path.parent, no_report)):
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
    """In every file and region, one at a time."""
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
