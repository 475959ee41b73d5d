"""Sources: what is read and what is ignored is said; links are followed, and nothing is read twice. Fingerprints follow
the bytes and their order alone, and their cache changes nothing but the time."""

import json
import os
from pathlib import Path

import pytest

from quern.text.sources import content_fingerprint, files, list_source
from tests.support.small_text import read_source as read


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_markdown_is_read_and_what_is_not_is_counted(tmp_path: Path) -> None:
    for number in range(50):
        write(tmp_path / f"{number:02d}.md", "x" * 30)
    write(tmp_path / "one.txt", "hello")
    write(tmp_path / "stray.bin", "0" * 2500)
    for name in ("a.PDF", "b.pdf", "Makefile", ".hidden.pdf", "t.tar.gz"):
        write(tmp_path / name, "1234")
    write(tmp_path / "half.parquet.part", "")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    listing = list_source(tmp_path)
    assert len(listing.files) == 51 and len(list(read(tmp_path, log=print))) == 52  # with the Makefile
    assert listing.lines("text") == [
        "text: reading 50 .md (1.5 kB), one.txt (5 B)",
        "text: ignoring stray.bin (2.5 kB), 2 .pdf (8 B), Makefile (4 B), t.tar.gz (4 B), gone.txt (0 B), "
        "half.parquet.part (0 B)",
    ]


def test_an_empty_folder_says_what_it_holds(tmp_path: Path) -> None:
    write(tmp_path / "a.png", "x")
    with pytest.raises(
        FileNotFoundError, match=r"nothing to read in .* \(it holds a.png \(1 B\)\): no file ends in .txt"
    ):
        files(tmp_path)
    write(tmp_path / "b.parquet.gz", "x")  # Parquet compresses inside
    with pytest.raises(FileNotFoundError, match="nothing to read"):
        files(tmp_path)
    with pytest.raises(FileNotFoundError, match="absent"):
        files(tmp_path / "absent")
    (tmp_path / "a.png").write_bytes(b"x\0")
    with pytest.raises(ValueError, match="a.png: its name must end in .txt .*, an ending of code"):
        files(tmp_path / "a.png")


def test_links_are_followed_once(tmp_path: Path) -> None:
    elsewhere, root = tmp_path / "elsewhere", tmp_path / "root"
    write(elsewhere / "far.txt", "far")
    write(elsewhere / "deep" / "farther.txt", "farther")
    write(tmp_path / "outside.txt", "outside")
    write(root / "own.txt", "own")
    write(root / "sub" / "near.txt", "near")
    (root / "1-link").symlink_to(elsewhere)
    (root / "2-link").symlink_to(elsewhere)
    (root / "again").symlink_to(root / "sub")
    (root / "again.txt").symlink_to(root / "own.txt")
    (root / "sub" / "cycle").symlink_to(root)
    (root / "sub" / "above").symlink_to(tmp_path)
    (elsewhere / "back").symlink_to(root)
    (elsewhere / "self").symlink_to(elsewhere)
    os.link(root / "own.txt", root / "zz-hard.txt")
    assert [path.relative_to(root).as_posix() for path in files(root)] == [
        "1-link/deep/farther.txt",
        "1-link/far.txt",
        "own.txt",
        "sub/near.txt",
    ]
    (tmp_path / "root-link").symlink_to(root)
    assert list(read(tmp_path / "root-link")) == ["farther", "far", "own", "near"]


# Fingerprints -------------------------------------------------------------------------------------------------------


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
