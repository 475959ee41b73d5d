"""Documents: every format, damaged input named by file and line, bounded memory."""

import gzip
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quern.text import formats
from quern.text.documents import read
from quern.text.sources import files
from tests.support.small_text import read_conversations

TEXTS = ["Hello there.", "大家好，世界。", "مرحبا بالعالم", "👩‍👩‍👧‍👦 e\u0301", "line one\nline two\r\n", "0"]


def zstd(data: bytes) -> bytes:
    return pa.compress(data, codec="zstd", asbytes=True)


def json_lines(texts: list[str], key: str = "text") -> bytes:
    return "".join(json.dumps({key: text}, ensure_ascii=False) + "\n" for text in texts).encode("utf-8")


def write_parquet(path: Path, texts: list[str | None], rows: int = 4, column: str = "text") -> None:
    pq.write_table(pa.table({"id": list(range(len(texts))), column: texts}), path, row_group_size=rows)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Every format once, nested, beside things to leave alone; `expected` of it is below."""
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
    return root


EXPECTED = [TEXTS[4], TEXTS[1], TEXTS[2], *TEXTS, *TEXTS, *TEXTS, "last", *TEXTS, *TEXTS]


@pytest.mark.parametrize("separator", ["<|endoftext|>", "\n\n", "\n---\n", "</s>"])
@pytest.mark.parametrize("piece", [1 << 20, 40])
def test_a_separator_ends_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, separator: str, piece: int
) -> None:
    """Wherever it is in a line, and wherever a long document is cut."""
    monkeypatch.setattr(formats, "TEXT_PIECE_CHARACTERS", piece)
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


def test_every_format_is_read_in_sorted_order(folder: Path) -> None:
    assert [path.relative_to(folder).as_posix() for path in files(folder)] == [
        "a.txt",
        "b.txt.gz",
        "c.txt.zst",
        "d.jsonl",
        "e.jsonl.gz",
        "f.jsonl.zst",
        "sub/g.parquet",
    ]
    assert list(read(folder)) == EXPECTED


def test_a_long_text_file_is_cut_at_line_ends_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "TEXT_PIECE_CHARACTERS", 1000)
    text = "".join(f"zeile {i} ü\n" for i in range(500))
    path = tmp_path / "long.txt"
    path.write_text(text, encoding="utf-8")
    pieces = list(read(path))
    assert len(pieces) > 3 and "".join(pieces) == text
    assert all(piece.endswith("\n") for piece in pieces)


def test_a_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffhello".encode())
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + json_lines(["world"]))
    assert list(read(tmp_path)) == ["hello", "world"]


def test_the_last_ending_decides_in_any_case(tmp_path: Path) -> None:
    (tmp_path / "v1.txt.JSONL").write_bytes(json_lines(["one"]))
    (tmp_path / "v2.jsonl.Txt").write_text("two", encoding="utf-8")
    assert list(read(tmp_path)) == ["one", "two"]


def refuse(call: Callable[[], object], *words: str, error: type[Exception] = ValueError) -> None:
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_bytes_that_are_not_utf8_are_named_by_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("gut\nf\u00fcr\n".encode("latin-1"))
    refuse(lambda: list(read(tmp_path / "latin.txt")), "latin.txt, line 2", "byte 2", "iconv")
    (tmp_path / "bad.jsonl").write_bytes(json_lines(["fine"]) + b'{"text": "\xff"}\n')
    refuse(lambda: list(read(tmp_path / "bad.jsonl")), "bad.jsonl, line 2", "UTF-8")


def test_damaged_records_are_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(json_lines(["fine"]) + b"\n{oops\n")
    refuse(lambda: list(read(path)), "bad.jsonl, line 3", "JSON")
    path.write_text("[1]\n", encoding="utf-8")
    refuse(lambda: list(read(path)), "line 1", "object")
    path.write_text('{"text": 7}\n', encoding="utf-8")
    refuse(lambda: list(read(path)), "line 1", "int")


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
    refuse(lambda: list(read(path)), path.name, error=ValueError if kind == "parquet" else OSError)


def test_an_unknown_column_is_answered_with_the_columns_there_are(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", ["x"], column="body")
    refuse(lambda: list(read(tmp_path / "a.parquet")), "'text'", "'body'", "'id'", "--text.column NAME")
    assert list(read(tmp_path / "a.parquet", column="body")) == ["x"]
    (tmp_path / "b.jsonl").write_text('{"messages": []}\n', encoding="utf-8")
    refuse(lambda: list(read(tmp_path / "b.jsonl")), "'text'", "'messages'", "fine-tuning")


def test_a_source_without_anything_to_read_says_what_would_fit(tmp_path: Path) -> None:
    refuse(lambda: files(tmp_path), str(tmp_path), ".parquet", ".jsonl", ".txt.gz", error=FileNotFoundError)
    refuse(lambda: files(tmp_path / "absent"), "absent", error=FileNotFoundError)
    (tmp_path / "book.png").write_bytes(b"x\0")
    refuse(lambda: files(tmp_path / "book.png"), "book.png", ".txt", "an ending of code")


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


CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": [{"type": "tool", "text": "2+2"}, {"type": "output", "text": "4"}]},
]


def test_conversations_come_from_json_lines_and_parquet(tmp_path: Path) -> None:
    plain = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    lines = [
        json.dumps({"messages": CONVERSATION, "source": "mine"}),
        json.dumps(CONVERSATION),
        json.dumps({"messages": [{**message, "id": 1} for message in plain]}),
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    pq.write_table(pa.table({"messages": [plain, plain], "id": [1, 2]}), tmp_path / "b.parquet")
    assert list(read_conversations(tmp_path)) == [CONVERSATION, CONVERSATION, plain, plain, plain]


def test_a_wrong_conversation_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    wrong = {"messages": [{"role": "assistant", "content": "hi"}]}
    path.write_text(json.dumps({"messages": CONVERSATION}) + "\n" + json.dumps(wrong), encoding="utf-8")
    refuse(lambda: list(read_conversations(path)), "a.jsonl, line 2", "user first")
    for value in ("text", None, [1], [{"role": "user"}], [{"role": "tool", "content": "x"}]):
        path.write_text(json.dumps({"messages": value}), encoding="utf-8")
        refuse(lambda: list(read_conversations(path)), "line 1", "not a conversation")
    (tmp_path / "b.txt").write_text("x", encoding="utf-8")
    refuse(lambda: list(read_conversations(tmp_path / "b.txt")), "b.txt", ".jsonl")
