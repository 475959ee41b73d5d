"""Token files of modded-nanogpt and nanoGPT: both conventions are read, and what is written is read back."""

import os
from pathlib import Path

import numpy as np
import pytest

from quern.data.bin_files import MODDED_NANOGPT, NANOGPT, BinFormat, read_bin, write_bin
from quern.data.shards import Corpus
from tests.support.memory_corpus import ids_of, memory_corpus

EOT = 50256
SMALL = BinFormat(MODDED_NANOGPT.train, MODDED_NANOGPT.val, file_tokens=50)


def documents(count: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, EOT, rng.integers(1, 30)).tolist() for _ in range(count)]


def corpus_of(texts: list[list[int]]) -> Corpus:
    return memory_corpus([[EOT, *text] for text in texts])


def contents(corpus: Corpus) -> list[list[int]]:
    texts = [corpus.gather(i, 1).tolist() for i in range(corpus.num_documents)]
    assert ids_of(corpus) == [[EOT, *ids] for ids in texts]
    return texts


def bare(path: Path, *ids: int) -> Path:
    np.array(ids, dtype="<u2").tofile(path)
    return path


def test_files_are_written_as_the_other_programs_write_them(tmp_path: Path) -> None:
    """The oracle is what their scripts do: data/fineweb.py and data/openwebtext/prepare.py, each by hand."""
    train, val = documents(40, 0), documents(5, 1)
    splits = {"train": corpus_of(train), "val": corpus_of(val)}
    (path, other) = write_bin(splits, tmp_path / "modded", "mine", MODDED_NANOGPT, print)
    assert (path.name, other.name) == ("mine_train_000001.bin", "mine_val_000000.bin")
    header = np.fromfile(path, dtype="<i4", count=256)
    tokens = [token for text in train for token in (EOT, *text)]
    assert header[:3].tolist() == [20240520, 1, len(tokens)] and not header[3:].any()
    assert np.fromfile(path, dtype="<u2", offset=1024).tolist() == tokens
    (path, other) = write_bin(splits, tmp_path / "nano", "mine", NANOGPT, print)
    assert (path.name, other.name) == ("train.bin", "val.bin")
    assert np.fromfile(path, dtype="<u2").tolist() == [token for text in train for token in (*text, EOT)]


@pytest.mark.parametrize("form", [MODDED_NANOGPT, NANOGPT, SMALL], ids=["one file", "nanoGPT", "many files"])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_written_is_read_back(tmp_path: Path, form: BinFormat, seed: int) -> None:
    splits = {"train": [*documents(60, seed), []], "val": documents(7, seed + 10)}
    done: list[int] = []
    files = write_bin({name: corpus_of(texts) for name, texts in splits.items()}, tmp_path, "x", form, done.append)
    assert done == sorted(done) and done[-1] == sum(len(text) + 1 for texts in splits.values() for text in texts)
    for name, texts in splits.items():
        corpus = read_bin(*(file for file in files if name in file.name))
        assert contents(corpus) == texts and corpus.skipped_tokens == 0
        assert corpus.num_tokens == sum(len(text) + 1 for text in texts)
    assert sorted(tmp_path.iterdir()) == sorted(files)


@pytest.mark.parametrize(
    ("files", "expected", "skipped"),
    [
        ([[7, 8, EOT, 9, 10, EOT]], [[7, 8], [9, 10]], 0),
        ([[7, EOT]], [[7]], 0),
        ([[7, EOT], [8, 9, EOT, 10, EOT]], [[7], [8, 9], [10]], 0),
        # A file that ends in the middle of a document: its part is kept, and the part in the next file is skipped.
        ([[7, EOT, 8], [9, EOT, 10, EOT]], [[7], [8], [10]], 1),
        ([[7, EOT, 8], [9, EOT], [5, EOT]], [[7], [8], [5]], 1),
        # Documents that begin with the delimiter, also where a file begins in the middle of one.
        ([[EOT, 7, 8, EOT, 9]], [[7, 8], [9]], 0),
        ([[1, 2, EOT, 7, EOT, 9]], [[7], [9]], 2),
        ([[EOT, 7], [8, EOT, 9]], [[7], [9]], 1),
        ([[EOT, 7, EOT]], [[7], []], 0),
    ],
)
def test_both_conventions_are_read(
    tmp_path: Path, files: list[list[int]], expected: list[list[int]], skipped: int
) -> None:
    paths = [bare(tmp_path / f"{number}.bin", *ids) for number, ids in enumerate(files)]
    corpus = read_bin(*paths)
    assert contents(corpus) == expected and corpus.skipped_tokens == skipped
    part = corpus.part(np.arange(corpus.num_documents)[::-1])
    assert contents(part) == expected[::-1]


def test_files_that_are_no_tokens_are_named(tmp_path: Path) -> None:
    good = bare(tmp_path / "train.bin", 7, 8, EOT)
    (cut,) = write_bin({"train": corpus_of([[1, 2]])}, tmp_path / "modded", "cut", MODDED_NANOGPT, print)
    cut.write_bytes(cut.read_bytes()[:-2])
    (tmp_path / "odd").write_bytes(b"abc")
    for path, bos, size, message in (
        (good, 50000, 1 << 32, "never has id 50,000, which begins documents: name the tokenizer that made it"),
        (cut, EOT, 1 << 32, "cut_train_000001.bin is damaged"),
        (tmp_path / "odd", EOT, 1 << 32, "odd"),
        (good, 7, EOT, r"train.bin holds id 50,256, outside the vocabulary of 50,256: name the"),
    ):
        with pytest.raises(ValueError, match=message):
            read_bin(path, bos=bos, vocab_size=size)


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    large = memory_corpus([[EOT, 1], [EOT, 70_000]])
    with pytest.raises(ValueError, match="the text has id 70,000, and these files hold ids below 65,536"):
        write_bin({"train": corpus_of([[1]]), "val": large}, tmp_path, "x", MODDED_NANOGPT, print)
    assert list(tmp_path.iterdir()) == []
    write_bin({"train": corpus_of([[1]])}, tmp_path, "x", NANOGPT, print)
    with pytest.raises(ValueError, match="train.bin is there already: name a new folder"):
        write_bin({"train": corpus_of([[1]])}, tmp_path, "x", MODDED_NANOGPT, print)
    assert os.listdir(tmp_path) == ["train.bin"]
