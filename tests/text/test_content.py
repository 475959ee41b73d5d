"""Fingerprints: they follow the bytes and their order alone, and the cache changes nothing but the time."""

import json
import os
from pathlib import Path

import pytest

from quern.text.sources import content_fingerprint


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    found = [tmp_path / "in" / name for name in ("a", "b", "c")]
    found[0].parent.mkdir()
    for path in found:
        path.write_text(f"text of {path.name}", encoding="utf-8")
    return found


def hashed(paths: list[Path], cache: Path) -> tuple[str, int]:
    """The fingerprint, and how many bytes were read for it."""
    done = [0]
    return content_fingerprint(paths, cache, done.append), done[-1]


def test_an_edit_that_keeps_size_and_time_is_seen(paths: list[Path], tmp_path: Path) -> None:
    cache, info = tmp_path / "digests.json", paths[1].stat()
    mark, _ = hashed(paths, cache)
    paths[1].write_text("text of B", encoding="utf-8")
    os.utime(paths[1], ns=(info.st_atime_ns, info.st_mtime_ns))
    assert paths[1].stat().st_size == info.st_size and paths[1].stat().st_mtime_ns == info.st_mtime_ns
    assert hashed(paths, cache)[0] != mark != hashed(paths[::-1], cache)[0]


def test_only_what_changed_is_read_again(paths: list[Path], tmp_path: Path) -> None:
    cache = tmp_path / "digests.json"
    mark, read = hashed(paths, cache)
    assert read == 27
    written = cache.stat()
    assert hashed(paths, cache) == (mark, 0) and cache.stat() == written
    paths[2].write_text("more", encoding="utf-8")
    changed, read = hashed(paths, cache)
    assert changed != mark and read == 4
    paths[0].unlink()
    hashed(paths[1:], cache)
    assert sorted(json.loads(cache.read_text(encoding="utf-8"))) == [str(path) for path in paths[1:]]


@pytest.mark.parametrize("damage", ["{", "[1]", "swap"])
def test_a_damaged_cache_is_made_again(paths: list[Path], tmp_path: Path, damage: str) -> None:
    cache = tmp_path / "digests.json"
    mark, _ = hashed(paths, cache)
    entries = json.loads(cache.read_text(encoding="utf-8"))
    broken = {name: [*entry[:3], entry[3][:-1]] for name, entry in entries.items()}
    cache.write_text(json.dumps(broken) if damage == "swap" else damage, encoding="utf-8")
    assert hashed(paths, cache) == (mark, 27)
    assert json.loads(cache.read_text(encoding="utf-8")) == entries
