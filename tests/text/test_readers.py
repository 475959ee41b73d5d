"""Files as text, tables and JSON: every format is read as other readers do, damage is named by file and line, and
memory is bounded."""

import gzip
import json
import random
import re
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv

from quern.text import readers
from quern.text.sources import files
from quern.text.tinyworld import corpus
from tests.support.small_text import read_conversations
from tests.support.small_text import read_source as read

TEXTS = ["Hello there.", "大家好，世界。", "مرحبا بالعالم", "👩‍👩‍👧‍👦 e\u0301", "line one\nline two\r\n", "0"]


def zstd(data: bytes) -> bytes:
    return pa.compress(data, codec="zstd", asbytes=True)


def json_lines(texts: list[str], key: str = "text") -> bytes:
    return "".join(json.dumps({key: text}, ensure_ascii=False) + "\n" for text in texts).encode("utf-8")


def write_parquet(path: Path, texts: list[str | None], rows: int = 4, column: str = "text") -> None:
    pq.write_table(pa.table({"id": list(range(len(texts))), column: texts}), path, row_group_size=rows)


@pytest.mark.parametrize(("separator", "piece"), [("\n\n", 1 << 20), ("<|endoftext|>", 40)])
def test_separators_end_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, separator: str, piece: int) -> None:
    """Wherever it is in a line, and wherever a long document is cut."""
    monkeypatch.setattr(readers, "TEXT_PIECE_CHARACTERS", piece)
    stories = [f"Story {n}.\nIt goes on{' and on' * (n % 7)}\nThe end" for n in range(40)]
    whole = f"\n{separator}\n".join(stories[:20]) + separator + separator.join(stories[20:]) + separator
    (tmp_path / "a.txt").write_text(whole, encoding="utf-8")
    (tmp_path / "b.md.gz").write_bytes(gzip.compress(whole.encode()))
    (tmp_path / "c.txt.zst").write_bytes(zstd(whole.encode()))
    (tmp_path / "d.jsonl").write_bytes(json_lines([whole]))
    texts = list(read(tmp_path, separator=separator))
    assert texts[-1] == whole, "the rows of other files have their own ends"
    if piece > len(whole):
        assert texts[:-1] == stories * 3
    else:
        assert "".join(texts[:-1]).replace("\n", "") == "".join(stories * 3).replace("\n", "")
        assert max(map(len, texts[:-1])) < 3 * piece + 14 * 7


def test_every_format_is_read_in_sorted_order_and_other_files_are_left_alone(tmp_path: Path) -> None:
    root = tmp_path / "data"
    (root / "sub").mkdir(parents=True)
    (root / ".hidden").mkdir()
    (root / "a.txt").write_text(TEXTS[4], encoding="utf-8", newline="")
    (root / "b.txt.gz").write_bytes(gzip.compress(TEXTS[1].encode()))
    (root / "c.txt.zst").write_bytes(zstd(TEXTS[2].encode()))
    (root / "d.jsonl").write_bytes(json_lines(TEXTS[:3]) + b"\n  \n" + json_lines(TEXTS[3:]).rstrip(b"\n"))
    (root / "e.jsonl.gz").write_bytes(gzip.compress(json_lines(TEXTS[:2])) + gzip.compress(json_lines(TEXTS[2:])))
    (root / "f.jsonl.zst").write_bytes(zstd(json_lines(TEXTS)) + zstd(json_lines(["", "last"])))
    write_parquet(root / "sub" / "g.parquet", [*TEXTS, None, "", *TEXTS])
    for unread in (".hidden/x.txt", ".secret.txt", "notes.png", "half.parquet.part"):
        (root / unread).write_text("never", encoding="utf-8")
    found = " ".join(path.relative_to(root).as_posix() for path in files(root))
    assert found == "a.txt b.txt.gz c.txt.zst d.jsonl e.jsonl.gz f.jsonl.zst sub/g.parquet"
    assert list(read(root)) == [TEXTS[4], TEXTS[1], TEXTS[2], *TEXTS, *TEXTS, *TEXTS, "last", *TEXTS, *TEXTS]


def test_a_long_text_is_cut_at_line_ends_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "TEXT_PIECE_CHARACTERS", 1000)
    text = "".join(f"zeile {i} ü\n" for i in range(500))
    path = tmp_path / "long.txt"
    path.write_text(text, encoding="utf-8")
    pieces = list(read(path))
    assert len(pieces) > 3 and "".join(pieces) == text
    assert all(piece.endswith("\n") for piece in pieces)


@pytest.mark.parametrize("kind", ["gz", "zst", "parquet"])
def test_a_file_cut_short_is_an_error_not_a_short_corpus(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ("cut.parquet" if kind == "parquet" else f"cut.jsonl.{kind}")
    texts = [f"{i * 7919 % 104729} and {i}" for i in range(5000)]
    if kind == "parquet":
        write_parquet(path, list(texts))
    else:
        path.write_bytes((gzip.compress if kind == "gz" else zstd)(json_lines(texts)))
    assert list(read(path)) == texts
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError if kind == "parquet" else OSError, match=path.name):
        list(read(path))


def test_parquet_is_streamed_by_row_group(tmp_path: Path) -> None:
    """Python's peak stays near one batch and arrow's near one row group, far below the file's size."""
    texts: list[str | None] = [f"{i:06d}" * 500 for i in range(4000)]  # 12 MB
    write_parquet(tmp_path / "big.parquet", texts, rows=200)
    pool = pa.default_memory_pool()
    before = pool.bytes_allocated()
    peak_arrow = count = 0
    tracemalloc.start()
    for _ in read(tmp_path / "big.parquet"):
        count += 1
        peak_arrow = max(peak_arrow, pool.bytes_allocated() - before)
    peak_python = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == len(texts)
    assert peak_python < 3_000_000 and peak_arrow < 4_000_000


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
    zipped.write_bytes(gzip.compress(b"\xef\xbb\xbf\r\n\n" + path.read_bytes()))  # a mark, and blank lines
    assert texts(zipped) == TRICKY
    if ending == ".csv":
        csv.write_csv(table, path, csv.WriteOptions(delimiter=";"))
        path.write_bytes(b"\n\r\n" + path.read_bytes())
        assert texts(path) == TRICKY


@pytest.mark.parametrize("ending", [".csv", ".tsv"])
def test_quotes_count_at_the_beginning_of_a_field(tmp_path: Path, ending: str) -> None:
    rows = ["text,n", "He is 5' 11\" tall,1", '"To be', 'or, or not to be",2', '"a ""mill""",3']
    path = tmp_path / f"a{ending}"
    path.write_text("\n".join(rows).replace(",", "," if ending == ".csv" else "\t") + "\n", encoding="utf-8")
    joined = "To be\nor, or not to be" if ending == ".csv" else "To be\nor\t or not to be"
    assert texts(path) == ["He is 5' 11\" tall", joined, 'a "mill"']


@pytest.mark.parametrize(
    ("ending", "body", "message"),
    [
        ("csv", b'id,text\n1,"a\nb"\n2,x,y\n', ", line 4: the row has 3 fields, but the first row names 2"),
        ("csv", b'id,text\n1,x\n2,"never ends\n', r", line 3: cannot be read as .csv \(unexpected end of data\)"),
        ("csv", b'id,text\n1,"a" b\n', ", line 2: cannot be read as .csv"),
        ("csv", b"text,text\none,two\n", ", line 1: two columns are named 'text': rename one of them"),
        ("csv", b"id,body\n1,x\n", ", record 1: there is no 'text', only 'id', 'body': name .* --text.column NAME$"),
        ("csv", b'id,text\n1,"a\nb\xff"\n', ", line 3: byte 2 of the line is not UTF-8"),
        ("csv", b"id,text\n1,a\0b\n", ", line 2: NUL bytes, so it is no text"),
        ("json", b'["a",\n"b\0"]', ", line 2: NUL bytes, .* leave it out, or convert it to UTF-8; --text.* in --data$"),
        ("csv", b"\xff\xfeabc", r" is not utf-16.* \(truncated data\): it is damaged: leave it out, or convert it to"),
        ("json", b'{"text": "a"}\n{"text": "b"}\n', ": not JSON .*: line 2.*; if each .* rename it to .jsonl$"),
        ("json", b'[{"text": "a"}, 7]', ", record 2: expected an object"),
        ("json", b'[{"messages": []}]', r", record 1: there is no 'text', only 'messages': .* \(conversations are for"),
        ("json", b'["a", {"body": "b"}]', ", record 2: there is no 'text', only 'body': .*--text.column NAME"),
        ("json", b'["a",\n"\xff"]', ", line 2: byte 2 of the line is not UTF-8"),
        ("json", b"[" * 100_000, ": not JSON"),
        ("json", json.dumps(["x" * 200_000]).encode(), " holds more than 150.* of JSON: make it .jsonl"),
    ],
    ids=range(16),
)
def test_damage_is_named_by_file_and_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, body: bytes, message: str
) -> None:
    monkeypatch.setattr(readers, "JSON_BYTES", 150_000)
    path = tmp_path / f"a.{ending}"
    path.write_bytes(body)
    with pytest.raises(ValueError, match=f"a.{ending}{message}"):
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


def test_a_lone_surrogate_is_refused_and_a_pair_is_a_character(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "\\ud83d\\ude00"}\n{"text": "x\\ud800y", "id": "\\ud800"}\n', encoding="utf-8")
    documents = read(path)
    assert next(documents) == "😀"
    with pytest.raises(ValueError, match=r"a.jsonl, line 2: the text holds \\ud800, half of a surrogate pair"):
        next(documents)


def test_the_size_of_a_text_is_about_right_before_it_is_read(tmp_path: Path) -> None:
    words = [word for sample in corpus.kinds_of_text(0).values() for word in sample.split()]
    rows = [" ".join(random.Random(number).choices(words, k=40)) for number in range(2_000)]
    size = sum(map(len, rows))
    table = pa.table({"text": rows, "other": [row * 3 for row in rows]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=99)
    (tmp_path / "a.txt").write_text("\n".join(rows), encoding="utf-8")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress((tmp_path / "a.txt").read_bytes()))
    text = (tmp_path / "a.txt").stat().st_size

    def megabytes(*names: str, column: str = "text") -> float:
        return readers.text_megabytes([tmp_path / name for name in names], column)

    assert megabytes("a.parquet") == pytest.approx(size / 1e6, rel=0.05)
    assert megabytes("a.parquet", column="other") == pytest.approx(3 * size / 1e6, rel=0.05)
    assert megabytes("a.parquet", column="absent") == (tmp_path / "a.parquet").stat().st_size / 1e6  # refused later
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
        (line,) = said
        assert re.match(rf"skipped {len(odd)} malformed of {records:,} records; the first is {named}", line)
    else:
        with pytest.raises(ValueError, match=named):
            list(read(path))
        count = f"{len(odd)} of ([1-9],)?[0-9]+ records (is|are) malformed, and 1 in 1,000 may be$"
        with pytest.raises(ValueError, match=f"{named}.*; {count}"):
            list(read(path, log=said.append))
        assert said == []


def test_a_row_of_several_lines_counts_with_each_and_an_empty_line_is_no_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('text,n\n\na,1\n\n"b\nc\nd"\n', encoding="utf-8")
    with pytest.raises(ValueError, match="line 7: the row has 1 fields, .*; 3 of 4 records are malformed, and 1 in"):
        list(read(path, log=print))


def test_malformed_conversations_are_counted_over_all_files(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b\u2028"}]
    talk = json.dumps(messages, ensure_ascii=False)
    for name, lines in (("a.jsonl", [talk] * 600), ("b.jsonl", [talk] * 399 + ["[]", talk])):
        (tmp_path / name).write_text("\n".join(lines), encoding="utf-8")
    said: list[str] = []
    assert len(list(read_conversations(tmp_path, said.append))) == 1000
    assert "the first is" in said[1] and "b.jsonl, line 400: not a conversation: the conversation is empty" in said[1]
