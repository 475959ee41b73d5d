"""Formats: tables and JSON, read as other readers do, with damage named by file and line."""

import gzip
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv

from quern.text import formats
from quern.text.documents import read, read_conversations
from quern.text.sources import Listing, entry_of, list_source

TRICKY = ['say "hi"', "two\nlines", "two\r\nlines", "a,b", "tab\there", "köln 世界 😀", " padded ", "x" * 200_000]


def texts(path: Path, column: str = "text") -> list[str]:
    whole = list(read(path, column=column))
    for count, (_, position) in enumerate(whole):
        assert list(read(path, position, column)) == whole[count + 1 :]  # resuming equals continuing
    return [text for text, _ in whole]


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


def test_random_tables_are_read_as_pyarrow_reads_them(tmp_path: Path) -> None:
    rng = random.Random(0)
    rows = ["".join(rng.choices('ab ",\n\r\t世', k=rng.randint(1, 30))) for _ in range(300)]
    path = tmp_path / "a.csv"
    csv.write_csv(pa.table({"text": rows, "n": list(range(300))}), path)
    parsed = csv.read_csv(path, parse_options=csv.ParseOptions(newlines_in_values=True))
    assert texts(path) == parsed["text"].to_pylist() == rows


def test_damaged_tables_are_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    for body, message in [
        ('id,text\n1,"a\nb"\n2,x,y\n', "a.csv, line 4: the row has 3 fields, but the first row names 2"),
        ('id,text\n1,x\n2,"never ends\n', r"a.csv, line 3: cannot be read as .csv \(unexpected end of data\)"),
        ('id,text\n1,"a" b\n', "a.csv, line 2: cannot be read as .csv"),
        ("id,body\n1,x\n", "a.csv: there is no 'text', only 'id', 'body': name the .* with --text.column NAME$"),
        (f"{'long ' * 30},{'x,' * 30}y\n", "…'.* and 20 more: name the one"),
    ]:
        path.write_text(body, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            texts(path)
    path.write_bytes(b'id,text\n1,"a\nb\xff"\n')
    with pytest.raises(ValueError, match="a.csv, line 3: byte 2 of the line is not UTF-8"):
        texts(path)
    path.write_bytes(b"")
    assert texts(path) == []


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
        (b'["a", ', r"a.json: not JSON \(Expecting value"),
        (b'{"text": "a"}\n{"text": "b"}\n', "a.json: not JSON .*: line 2.*; if each line is .* rename it to .jsonl$"),
        (b'[{"text": "a"}, 7]', "a.json, record 2: expected an object"),
        (b'[{"text": "a"}, {"body": "b"}]', "a.json, record 2: there is no 'text', only 'body': .*--text.column NAME"),
        (b'["a",\n"\xff"]', "a.json, line 2: byte 2 of the line is not UTF-8"),
        (b"[" * 100_000, "a.json: not JSON"),
    ]:
        path.write_bytes(body)
        with pytest.raises(ValueError, match=message):
            texts(path)
    monkeypatch.setattr(formats, "JSON_BYTES", 100)
    path.write_text(json.dumps(["x" * 200]), encoding="utf-8")
    with pytest.raises(ValueError, match="a.json holds more than 100 B of JSON, .* make it a .jsonl"):
        texts(path)


def test_a_lone_surrogate_is_refused_and_a_pair_is_a_character(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "\\ud83d\\ude00"}\n{"text": "x\\ud800y", "id": "\\ud800"}\n', encoding="utf-8")
    documents = read(path)
    assert next(documents)[0] == "😀"
    with pytest.raises(ValueError, match=r"a.jsonl, line 2: the text holds the lone surrogate \\ud800"):
        next(documents)
    path.write_text('{"text": "fine", "id": "\\ud800"}\n', encoding="utf-8")
    assert texts(path) == ["fine"]
    path.write_text(
        '[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "\\udfff"}]', encoding="utf-8"
    )
    with pytest.raises(ValueError, match=r"a.jsonl, line 1: the text holds the lone surrogate \\udfff"):
        list(read_conversations(path))


def test_parquet_that_says_its_bytes_are_text_is_checked(tmp_path: Path) -> None:
    wrong = pa.array([b"good", b"\xff\xfe"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": wrong}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="cannot read .*a.parquet"):
        texts(tmp_path / "a.parquet")


def test_the_size_of_a_text_is_about_right_before_it_is_read(tmp_path: Path) -> None:
    rows = [f"{number} stones of the mill, counted again and again; " * 5 for number in range(2_000)]
    size = sum(map(len, rows))
    pq.write_table(
        pa.table({"text": rows, "other": [row * 3 for row in rows]}), tmp_path / "a.parquet", row_group_size=99
    )
    (tmp_path / "a.txt").write_text("\n".join(rows), encoding="utf-8")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress((tmp_path / "a.txt").read_bytes()))
    text = (tmp_path / "a.txt").stat().st_size

    def megabytes(*names: str, column: str = "text") -> float | None:
        return formats.text_megabytes(list_source([tmp_path / name for name in names]), column)

    assert megabytes("a.parquet") == pytest.approx(size / 1e6, rel=0.05)
    assert megabytes("a.parquet", column="other") == pytest.approx(3 * size / 1e6, rel=0.05)
    assert megabytes("a.txt") == text / 1e6
    assert megabytes("a.txt.gz") is None and megabytes("a.txt", "a.txt.gz") is None
    coming = Listing((*list_source(tmp_path / "a.txt").read, entry_of(tmp_path / "b.txt", 3 * text)), ())
    assert formats.text_megabytes(coming, "text") == 4 * text / 1e6
    assert formats.text_megabytes(Listing(coming.read[1:], ()), "text") is None
