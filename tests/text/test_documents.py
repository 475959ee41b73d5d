"""Documents: every format, damaged input named by file and line, bounded memory."""

import gzip
import json
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quern.text import readers
from quern.text.sources import files
from tests.support.small_text import read_source as read

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


@pytest.mark.parametrize(("separator", "piece"), [("\n\n", 1 << 20), ("<|endoftext|>", 40)])
def test_a_separator_ends_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, separator: str, piece: int
) -> None:
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
