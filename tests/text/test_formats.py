"""Formats: tables and JSON, read as other readers do, with damage named by file and line."""

import gzip
import json
import random
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv

from quern.text import readers
from quern.text.tinyworld import corpus
from tests.support.small_text import read_conversations
from tests.support.small_text import read_source as read

TRICKY = ['say "hi"', "two\nlines", "two\r\nlines", "a,b", "tab\there", "köln 世界 😀", " padded ", "x" * 200_000]


def texts(path: Path, column: str = "text") -> list[str]:
    return list(read(path, column))


@pytest.mark.parametrize(("ending", "delimiter"), [(".csv", ","), (".tsv", "\t"), (".CSV", ",")])
def test_tables_hold_a_document_a_row(tmp_path: Path, ending: str, delimiter: str) -> None:
    path = tmp_path / f"a{ending}"
    options = csv.WriteOptions(delimiter=delimiter)
    table = pa.table({"id": list(range(len(TRICKY))), "text": TRICKY, "body": TRICKY[::-1]})
    csv.write_csv(table, path, options)
    assert texts(path) == TRICKY and texts(path, "body") == TRICKY[::-1]
    zipped = tmp_path / f"b{ending}.gz"
    zipped.write_bytes(gzip.compress(b"\xef\xbb\xbf" + path.read_bytes()))
    assert texts(zipped) == TRICKY


@pytest.mark.parametrize("ending", [".csv", ".tsv"])
def test_quotes_count_at_the_beginning_of_a_field(tmp_path: Path, ending: str) -> None:
    rows = ["text,n", "He is 5' 11\" tall,1", '"To be', 'or, or not to be",2', '"a ""mill""",3']
    path = tmp_path / f"a{ending}"
    path.write_text("\n".join(rows).replace(",", "," if ending == ".csv" else "\t") + "\n", encoding="utf-8")
    joined = "To be\nor, or not to be" if ending == ".csv" else "To be\nor\t or not to be"
    assert texts(path) == ["He is 5' 11\" tall", joined, 'a "mill"']


def test_damaged_tables_are_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    for body, message in [
        ('id,text\n1,"a\nb"\n2,x,y\n', "a.csv, line 4: the row has 3 fields, but the first row names 2"),
        ('id,text\n1,x\n2,"never ends\n', r"a.csv, line 3: cannot be read as .csv \(unexpected end of data\)"),
        ('id,text\n1,"a" b\n', "a.csv, line 2: cannot be read as .csv"),
        ("text,text\none,two\n", "a.csv, line 1: two columns are named 'text': rename one of them"),
        (
            "id,body\n1,x\n",
            "a.csv, record 1: there is no 'text', only 'id', 'body': name the .* with --text.column NAME$",
        ),
    ]:
        path.write_text(body, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            texts(path)
    path.write_bytes(b'id,text\n1,"a\nb\xff"\n')
    with pytest.raises(ValueError, match="a.csv, line 3: byte 2 of the line is not UTF-8"):
        texts(path)
    path.write_bytes(b"id,text\n1,a\0b\n")
    with pytest.raises(ValueError, match="a.csv, line 2: NUL bytes, so it is no text"):
        texts(path)


def test_json_files_hold_an_array_or_one_object(tmp_path: Path) -> None:
    for value, expected in [
        (["one", {"text": "two"}, "", {"text": None}, {"text": "three", "id": 3}], ["one", "two", "three"]),
        ({"text": "alone"}, ["alone"]),
        ("just text", ["just text"]),
        ([], []),
    ]:
        (tmp_path / "a.json").write_text(json.dumps(value, indent=2), encoding="utf-8")
        (tmp_path / "b.json.zst").write_bytes(pa.compress(json.dumps(value).encode(), codec="zstd", asbytes=True))
        assert texts(tmp_path / "a.json") == texts(tmp_path / "b.json.zst") == expected


def test_damaged_json_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    for body, message in [
        (b'{"text": "a"}\n{"text": "b"}\n', "a.json: not JSON .*: line 2.*; if each line is .* rename it to .jsonl$"),
        (b'[{"text": "a"}, 7]', "a.json, record 2: expected an object"),
        (b'[{"messages": []}]', r"there is no 'text', only 'messages': .* \(conversations are for fine-tuning"),
        (b'[{"text": "a"}, {"body": "b"}]', "a.json, record 2: there is no 'text', only 'body': .*--text.column NAME"),
        (b'["a",\n"\xff"]', "a.json, line 2: byte 2 of the line is not UTF-8"),
        (b"[" * 100_000, "a.json: not JSON"),
    ]:
        path.write_bytes(body)
        with pytest.raises(ValueError, match=message):
            texts(path)
    monkeypatch.setattr(readers, "JSON_BYTES", 100)
    path.write_text(json.dumps(["x" * 200]), encoding="utf-8")
    with pytest.raises(ValueError, match="a.json holds more than 100 B of JSON, .* make it a .jsonl"):
        texts(path)


def test_a_lone_surrogate_is_refused_and_a_pair_is_a_character(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "\\ud83d\\ude00"}\n{"text": "x\\ud800y", "id": "\\ud800"}\n', encoding="utf-8")
    documents = read(path)
    assert next(documents) == "😀"
    with pytest.raises(ValueError, match=r"a.jsonl, line 2: the text holds the lone surrogate \\ud800"):
        next(documents)


def test_the_size_of_a_text_is_about_right_before_it_is_read(tmp_path: Path) -> None:
    words = [word for sample in corpus.kinds_of_text(0).values() for word in sample.split()]
    rows = [" ".join(random.Random(number).choices(words, k=40)) for number in range(2_000)]
    size = sum(map(len, rows))
    pq.write_table(
        pa.table({"text": rows, "other": [row * 3 for row in rows]}), tmp_path / "a.parquet", row_group_size=99
    )
    (tmp_path / "a.txt").write_text("\n".join(rows), encoding="utf-8")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress((tmp_path / "a.txt").read_bytes()))
    text = (tmp_path / "a.txt").stat().st_size

    def megabytes(*names: str, column: str = "text") -> float:
        return readers.text_megabytes([tmp_path / name for name in names], column)

    assert megabytes("a.parquet") == pytest.approx(size / 1e6, rel=0.05)
    assert megabytes("a.parquet", column="other") == pytest.approx(3 * size / 1e6, rel=0.05)
    assert megabytes("a.txt") == text / 1e6
    assert megabytes("a.txt.gz") == pytest.approx(text / 1e6, rel=0.3)
    assert megabytes("a.txt", "a.txt.gz") == megabytes("a.txt") + megabytes("a.txt.gz")


ODD = {
    "jsonl": (b'{"text": "a\xe2\x80\xa8b"}\n', b"{oops\n", b'{"text": "\xff"}\n', b'{"text": 7}\n', b'{"body": "b"}\n'),
    "csv": (b"a,b\n", b"c\n", b"d,e,f\n"),
    "json": (b'{"text": "a"},', b'{"text": 7},', b'{"text": "\\ud800"},'),
}
"""A sound record, and malformed ones."""


def mixed(path: Path, records: int, *odd: int) -> Path:
    """A file of so many records, of which those with the numbers `odd` are malformed, in turn in each way."""
    sound, *malformed = ODD[path.suffix[1:]]
    kinds = {number: malformed[place % len(malformed)] for place, number in enumerate(odd)}
    content = b"".join(kinds.get(number, sound) for number in range(records))
    head, tail = {"json": (b"[", b"]"), "csv": (b"text,b\n", b""), "jsonl": (b"", b"")}[path.suffix[1:]]
    path.write_bytes(head + content.rstrip(b",") + tail)
    return path


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize(
    ("records", "odd", "skipped"),
    [
        (1000, (500,), False),
        (1001, (1000,), True),
        (3000, (0, 4, 2999), True),
        (2999, (0, 4, 2998), False),
        (2500, (0, 1), False),  # nothing but malformed records so far: another form
    ],
)
def test_one_malformed_record_in_a_thousand_is_skipped(
    tmp_path: Path, kind: str, records: int, odd: tuple[int, ...], skipped: bool
) -> None:
    path, said = mixed(tmp_path / f"rows.{kind}", records, *odd), list[str]()
    named = re.escape(str(path)) + rf", (line|record) {odd[0] + (2 if kind == 'csv' else 1)}: "
    if skipped:
        found = list(read(path, log=said.append))
        assert len(found) == records - len(odd) and len(set(found)) == 1
        assert len(said) == 2 and re.search(f"; the first is {named}", said[0])
        assert said[1] == f"skipped {len(odd)} malformed of {records:,} records"
    else:
        with pytest.raises(ValueError, match=named):
            list(read(path))
        count = f"{len(odd)} of ([1-9],)?[0-9]+ records (is|are) malformed, and 1 in 1,000 may be$"
        with pytest.raises(ValueError, match=f"{named}.*; {count}"):
            list(read(path, log=said.append))
        assert all(line.startswith("malformed records are skipped if at most 1 in 1,000 is; ") for line in said)


def test_malformed_conversations_are_counted_over_all_files(tmp_path: Path) -> None:
    talk = json.dumps(
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b\u2028"}], ensure_ascii=False
    )
    for name, lines in (("a.jsonl", [talk] * 600), ("b.jsonl", [talk] * 399 + ["[]", talk])):
        (tmp_path / name).write_text("\n".join(lines), encoding="utf-8")
    said: list[str] = []
    assert len(list(read_conversations(tmp_path, said.append))) == 1000
    assert "the first is" in said[1] and "b.jsonl, line 400: not a conversation: the conversation is empty" in said[1]
