"""Texts as people have them: other encodings, damaged and binary files among good ones, code, papers, several names."""

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
from quern.text.sources import DOCUMENTS, data_paths, list_source, list_talks
from tests.support.hub_server import hub_server
from tests.support.small_text import read_source as read

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


@pytest.mark.parametrize("delimiter", [";", "\t", ","])
def test_the_separator_of_a_table_is_found(tmp_path: Path, delimiter: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text('id,text\n1,"one; two, three"\n2,four\n'.replace('"one; two, three"', '"§"').replace(",", delimiter)
                    .replace("§", "one; two, three"), encoding="utf-8")  # fmt: skip
    assert list(read(path)) == ["one; two, three", "four"]
    path.write_text(f"question{delimiter}answer\nWho?{delimiter}Hugo.\n", encoding="utf-8")
    ((messages, _),) = read_rows(list_talks(path))
    assert [message["content"] for message in messages] == ["Who?", "Hugo."]


def test_a_folder_of_code_is_its_code_and_patterns_choose(tmp_path: Path) -> None:
    for name in ("README.md", "src/a.py", "src/b.rs", "src/node_modules/x.js", "Makefile", "logo.png", "notes.weird"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"\0\1" if name == "logo.png" else name.encode())

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


def test_papers_and_pages_are_read_by_the_extra_or_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = "<html><body><h1>Title</h1><p>Hello <b>world</b>.</p></body></html>"
    (tmp_path / "a.html").write_text(page, encoding="utf-8")
    (tmp_path / "page.txt").write_text(page, encoding="utf-8")
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as file:
        file.write(tmp_path / "a.html", "a.html")
    text = "# Title\n\nHello **world**."
    assert list(read([tmp_path / "a.html", tmp_path / "b.zip"])) == [text, f"## File: a.html\n\n{text}"]
    assert "page.txt is full of HTML tags" in str(warning_of([tmp_path / "page.txt"]))
    (tmp_path / "c.pdf").write_bytes(b"%PDF-1.4 nothing")
    with pytest.raises(ValueError, match=r"c.pdf: markitdown cannot read it \("):
        list(read(tmp_path / "c.pdf"))
    monkeypatch.setattr(sources, "can_convert", lambda: False)
    assert list_source(tmp_path, DOCUMENTS).lines("text")[1].endswith("run .venv/bin/pip install -e '.[documents]'")
    with pytest.raises(
        ValueError, match="cannot read .*a.html: .*; papers, books and pages need the extra `documents`"
    ):
        list_source(tmp_path / "a.html", DOCUMENTS)
    (tmp_path / "c.srt").write_text("1\n00:00:01,000 --> 00:00:02,000\nHello.\n\n2\n", encoding="utf-8")
    assert list(read(tmp_path / "c.srt")) == ["Hello.\n\n"]


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


CHAT = """12/03/24, 18:05 - Messages and calls are end-to-end encrypted.
12/03/24, 18:05 - Anna: Hello Ben
are you there?
[12/03/24, 6:06:10 PM] Ben: Yes: here!
12/03/24, 18:07 - Ben: <Media omitted>
12/03/24, 18:08 - Anna: Fine
13/03/24, 08:08 - Ben: Morning
13/03/24, 08:09 - Anna: Hi
"""


def test_a_chat_that_whatsapp_exported_is_a_conversation_a_day(tmp_path: Path) -> None:
    path = tmp_path / "chat.txt"
    path.write_text(CHAT, encoding="utf-8")
    talks = {
        who: [[m["content"] for m in talk] for talk, _ in read_rows(list_talks(path), column=who)]
        for who in ("Anna", "Ben")
    }
    assert talks == {
        "Anna": [["Yes: here!", "Fine"], ["Morning", "Hi"]],
        "Ben": [["Hello Ben\nare you there?", "Yes: here!"]],
    }
    with pytest.raises(ValueError, match="one of Anna, Ben: name that one, as --conversations FILE,column=Anna"):
        list(read_rows(list_talks(path)))


def test_what_chatgpt_exported_is_the_branch_that_was_shown_last(tmp_path: Path) -> None:
    said = {"a": ("system", "", None), "b": ("user", "Hi", "a"), "old": ("assistant", "No.", "b"),
            "c": ("assistant", "Hello!", "b"), "d": ("tool", "x", "c"), "e": ("assistant", "More.", "d")}  # fmt: skip
    nodes = {
        name: {"message": {"author": {"role": role}, "content": {"parts": [text, {"image": 1}]}}, "parent": parent}
        for name, (role, text, parent) in said.items()
    }
    rows = [{"title": "t", "mapping": nodes, "current_node": "e"}, {"prompt": "What?", "completion": "That."}]
    (tmp_path / "conversations.json").write_text(json.dumps(rows), encoding="utf-8")
    talks = [[m["content"] for m in talk] for talk, _ in read_rows(list_talks(tmp_path / "conversations.json"), print)]
    assert talks == [["Hi", "Hello!\nMore."], ["What?", "That."]]
