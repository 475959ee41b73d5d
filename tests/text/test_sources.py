"""Sources as people have them: what is read and what is ignored is said, links are followed once, texts of other
encodings, damaged files among good ones, code, papers, several names. Fingerprints follow the bytes and their order
alone, and their cache changes nothing but the time."""

import hashlib
import json
import os
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quern.mixture.sources import read_rows
from quern.recipes.gpt import RECIPE
from quern.runs.public_data import with_local_data
from quern.text import sources
from quern.text.documents import warning_of
from quern.text.readers import recognized
from quern.text.sources import DOCUMENTS, Entry, content_fingerprint, files, list_source, list_talks
from quern.validate import data_paths
from tests.support.hub_server import hub_server
from tests.support.rows import write_rows
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
        "text: ignoring stray.bin (2.5 kB), 2 .pdf (8 B), Makefile (4 B), t.tar.gz (4 B), gone.txt (broken link), "
        "half.parquet.part (0 B)",
    ]


def test_a_folder_without_permission_is_ignored_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "one.txt", "hello")
    write(tmp_path / "lost+found" / "two.txt", "hello")
    scandir = os.scandir

    def refused(path: str | Path) -> Any:
        if closed in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr("os.scandir", refused)
    closed = "lost+found"
    told = ["text: reading one.txt (5 B)", "text: ignoring lost+found (without permission)"]
    assert list_source(tmp_path).lines("text") == told
    closed = str(tmp_path)
    with pytest.raises(PermissionError):
        list_source(tmp_path)


def test_an_empty_folder_says_what_it_holds(tmp_path: Path) -> None:
    write(tmp_path / "a.png", "x")
    held = r"nothing to read in .* \(it holds a.png \(1 B\)\): no file ends in .txt"
    with pytest.raises(FileNotFoundError, match=held):
        files(tmp_path)
    write(tmp_path / "a.txt", "x")
    with pytest.raises(FileNotFoundError, match=r"or of plain text and does not match --data.exclude a\.\*$"):
        list_source(tmp_path, DOCUMENTS, exclude="a.*")
    (tmp_path / "a.txt").unlink()
    write(tmp_path / "b.parquet.gz", "x")  # Parquet compresses inside
    with pytest.raises(FileNotFoundError, match="nothing to read"):
        files(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileNotFoundError, match="pipe, but a pipe or a device: copy it to a file, or give --data -$"):
        files(tmp_path / "pipe")
    with pytest.raises(FileNotFoundError, match="pipe or a device: copy it to a file$"):
        list_talks(tmp_path / "pipe")
    (tmp_path / "pipe").unlink()
    with pytest.raises(FileNotFoundError, match="absent"):
        files(tmp_path / "absent")
    with pytest.raises(ValueError, match="^/ holds the whole system: name the folder of the texts in it$"):
        files("/")
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
    found = [path.relative_to(root).as_posix() for path in files(root)]
    assert found == ["1-link/deep/farther.txt", "1-link/far.txt", "own.txt", "sub/near.txt"]
    (tmp_path / "root-link").symlink_to(root)
    assert list(read(tmp_path / "root-link")) == ["farther", "far", "own", "near"]


SAYINGS = {
    "cp1252": "Der Fluß fließt, “schön” und groß – un café crème.\n",
    "cp1250": "Příliš žluťoučký kůň úpěl ďábelské ódy\n",
    "cp1251": "Привет мир, как дела сегодня\n",
    "shift_jis": "これは日本語の文章です。今日はいい天気\n",
}


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_a_byte_order_mark_names_the_encoding(tmp_path: Path, encoding: str) -> None:
    text = "köln 世界 😀\n" * 9000  # several pieces of the decoder's
    (tmp_path / "a.txt").write_text(text, encoding=encoding)
    (tmp_path / "b.csv").write_text('text,n\n"a, ö",1\n', encoding=encoding)
    assert list(read(tmp_path)) == [text, "a, ö"]


@pytest.mark.parametrize("encoding", SAYINGS)
def test_another_encoding_is_named_and_read_where_it_is_asked_for(tmp_path: Path, encoding: str) -> None:
    text, path = SAYINGS[encoding] * 30, tmp_path / "a.txt"
    path.write_text(text, encoding=encoding)
    with pytest.raises(ValueError, match=f"a.txt, line 1: .*looks like {recognized(path)}, which --text.encoding auto"):
        list(read(path))
    assert list(read(path, encoding="auto")) == list(read(path, encoding=encoding)) == [text]


def test_the_odd_bad_file_is_skipped_and_counted_and_a_bad_half_is_refused(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("good " * 300, encoding="utf-8")
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)))
    (tmp_path / "other.json").write_text('{"name": "no text"}', encoding="utf-8")
    (tmp_path / "cut.parquet").write_bytes(b"PAR1")
    said: list[str] = []
    assert list(read(tmp_path, log=said.append)) == ["good " * 300]
    (line,) = said
    assert line.startswith("skipped 3 of 4 files that cannot be read; the first: ") and "binary.txt, line 1: N" in line
    for name in ("binary.txt", "cut.parquet"):
        with pytest.raises(ValueError, match=name):
            list(read(tmp_path / name, log=said.append))
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)) * 9)
    with pytest.raises(ValueError, match="3 of 4 files cannot be read, with more than half of the bytes: leave"):
        list(read(tmp_path, log=said.append))
    assert said == [line], "a refusal is no note beside a success"


def test_what_was_read_of_a_file_before_its_fault_is_counted(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("good " * 999, encoding="utf-8")
    (tmp_path / "odd.csv").write_text("text\n" + "row\n" * 100 + '"x" y\n' + "row\n" * 100, encoding="utf-8")
    said: list[str] = []
    found = list(read(tmp_path, log=said.append))
    assert len(found) == 101 and len(said) == 1
    assert said[0].startswith("skipped 1 of 2 files that cannot be read, except 100 records before a fault; the first")


@pytest.mark.parametrize("delimiter", [";", "\t", ","])
def test_the_separator_of_a_table_is_found(tmp_path: Path, delimiter: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f'id{delimiter}text\n1{delimiter}"one; two, three"\n2{delimiter}four\n', encoding="utf-8")
    assert list(read(path)) == ["one; two, three", "four"]
    path.write_text(f"question{delimiter}answer\nWho?{delimiter}Hugo.\n", encoding="utf-8")
    ((messages, _),) = read_rows(list_talks(path))
    assert [message["content"] for message in messages] == ["Who?", "Hugo."]


def test_a_folder_of_code_is_its_code_and_patterns_choose(tmp_path: Path) -> None:
    for name in ("README.md", "src/a.py", "src/b.rs", "src/node_modules/x.js", "Makefile", "logo.png", "notes.weird"):
        write(tmp_path / name, "\0\1" if name == "logo.png" else name)
    (tmp_path / "damaged").write_bytes(b"\xff\xfeabc")

    def names(**chosen: Any) -> list[str]:
        return [path.relative_to(tmp_path).as_posix() for path in list_source(tmp_path, DOCUMENTS, **chosen).files]

    assert names() == ["Makefile", "README.md", "src/a.py", "src/b.rs"]
    assert names(include="*.py *.js", exclude="src/node_modules/*") == ["src/a.py"]
    os.mkfifo(tmp_path / "pipe.weird")  # which nobody writes: it must not be opened
    assert names(include="*.weird") == ["notes.weird"]
    with pytest.raises(FileNotFoundError, match="no file ends in .* and matches"):
        names(include="*.png")
    several = data_paths(f"{tmp_path}/src/*.py\n{tmp_path}/README.md")
    assert several == [tmp_path / "src/a.py", tmp_path / "README.md"] and data_paths(f"{tmp_path}\nnowhere") is None
    assert list(read([tmp_path / "src/a.py", tmp_path / "src"])) == ["src/a.py", "src/b.rs"]
    (tmp_path / "link").symlink_to(tmp_path / "src")
    names_of_one = (tmp_path / "notes.weird", tmp_path / "link", tmp_path / "src/../src/a.py", tmp_path, tmp_path)
    listing = list_source(names_of_one, DOCUMENTS)
    ignored = sorted(entry.path.name for entry in listing.ignored)
    assert len(listing.read) == 5 and ignored == ["damaged", "logo.png", "pipe.weird", "x.js"]


def test_papers_and_pages_are_read_by_the_extra_or_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = "<html><body><h1>Title</h1><p>Hello <b>world</b>.</p></body></html>"
    (tmp_path / "a.html").write_text(page, encoding="utf-8")
    (tmp_path / "page.txt").write_text(page, encoding="utf-8")
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as file, zipfile.ZipFile(tmp_path / "empty.zip", "w"):
        file.write(tmp_path / "a.html", "a.html")
    (tmp_path / "scan.html").write_text("<html><body></body></html>", encoding="utf-8")
    text = "# Title\n\nHello **world**."
    assert list(read([tmp_path / "a.html", tmp_path / "b.zip"])) == [text, f"## File: a.html\n\n{text}"]
    assert "page.txt is full of HTML tags" in str(warning_of([tmp_path / "page.txt"]))
    write_rows(tmp_path / "rows.txt", [{"text": text}] * 2)
    assert "rows.txt holds lines of JSON" in str(warning_of([tmp_path / "rows.txt"]))
    (tmp_path / "c.pdf").write_bytes(b"%PDF-1.4 nothing")
    wrong = {"c.pdf": r"c.pdf: markitdown cannot read it \(", "empty.zip": "has no text", "scan.html": "has no text"}
    for name, why in wrong.items():
        with pytest.raises(ValueError, match=why):
            list(read(tmp_path / name))
    monkeypatch.setattr(sources, "can_convert", lambda: False)
    assert list_source(tmp_path, DOCUMENTS).lines("text")[1].endswith("run .venv/bin/pip install -e '.[documents]'")
    extra = "cannot read .*a.html: .*; papers, books and pages need the extra `documents`"
    with pytest.raises(ValueError, match=extra):
        list_source(tmp_path / "a.html", DOCUMENTS)
    for end in ("\n", "\r\n"):  # "1984" is spoken
        cues = ("1", "00:00:01,000 --> 00:00:02,000", "Hello.", "", "2", "00:00:03,000 --> 00:00:04,000", "1984")
        (tmp_path / "c.srt").write_text("".join(f"{line}{end}" for line in cues), encoding="utf-8", newline="")
        assert list(read(tmp_path / "c.srt")) == [f"Hello.{end}{end}1984{end}"]


def test_an_address_is_fetched_once_and_its_sha256_is_told(tmp_path: Path) -> None:
    said: list[str] = []
    with hub_server() as hub:
        hub.others = {"a b.txt": b"Hello."}
        recipe = replace(RECIPE, data=f"tinyworld\n{hub.url}/a%20b.txt")
        (names,) = {with_local_data(recipe, tmp_path / "out", [], said.append).data for _ in range(2)}
    name, path = names.split("\n")
    assert name == "tinyworld" and Path(path).read_text(encoding="utf-8") == "Hello."
    assert Path(path).is_relative_to(tmp_path / "out" / "downloads")
    assert ["saved in" in said[0], "kept in" in said[1]] == [True, True]
    assert all(line.endswith(hashlib.sha256(b"Hello.").hexdigest()) for line in said)


# Fingerprints -------------------------------------------------------------------------------------------------------


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    return [write(tmp_path / "in" / name, f"text of {name}") for name in ("a", "b", "c")]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "data" / "digests.json"


def hashed(paths: list[Path], cache: Path) -> tuple[str, int]:
    """The fingerprint, and how many bytes were read for it."""
    read = [0]

    def opened(path: Path, mode: str) -> Any:
        read.append(path.stat().st_size if path.is_file() else 0)
        return open(path, mode)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "open", opened, raising=False)
        return content_fingerprint([Entry(path, 0, "") for path in paths], cache.parents[1], "text"), sum(read)


def test_an_edit_that_keeps_size_and_time_is_seen(paths: list[Path], cache: Path) -> None:
    info, (mark, _) = paths[1].stat(), hashed(paths, cache)
    paths[1].write_text("text of B", encoding="utf-8")
    os.utime(paths[1], ns=(info.st_atime_ns, info.st_mtime_ns))
    assert paths[1].stat().st_size == info.st_size and paths[1].stat().st_mtime_ns == info.st_mtime_ns
    assert hashed(paths, cache)[0] != mark != hashed(paths[::-1], cache)[0]


def test_only_what_changed_is_read_again(paths: list[Path], cache: Path) -> None:
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


def test_what_cannot_be_read_is_another_content_and_is_tried_again(paths: list[Path], cache: Path) -> None:
    mark, _ = hashed(paths, cache)
    entries = json.loads(cache.read_text(encoding="utf-8"))
    cache.write_text(json.dumps(entries | {"/" + "x" * 300: entries[str(paths[0])]}), encoding="utf-8")
    text = paths[1].read_bytes()
    paths[1].unlink()
    paths[1].mkdir()  # which opens as little as a file without permission
    assert hashed(paths, cache)[0] != mark
    paths[1].rmdir()
    paths[1].write_bytes(text)
    assert hashed(paths, cache) == (mark, len(text))
    assert sorted(json.loads(cache.read_text(encoding="utf-8"))) == sorted(map(str, paths))


@pytest.mark.parametrize("damage", ["{", "[1]", "swap"])
def test_a_damaged_cache_is_made_again(paths: list[Path], cache: Path, damage: str) -> None:
    mark, _ = hashed(paths, cache)
    entries = json.loads(cache.read_text(encoding="utf-8"))
    broken = {name: [*entry[:3], entry[3][:-1]] for name, entry in entries.items()}
    cache.write_text(json.dumps(broken) if damage == "swap" else damage, encoding="utf-8")
    assert hashed(paths, cache) == (mark, 27)
    assert json.loads(cache.read_text(encoding="utf-8")) == entries
