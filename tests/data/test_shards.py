"""Shards: the bytes of the public format, damage, re-use, killed writers, foreign and many files, memory."""

import os
import resource
import struct
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quern.data.bin_files import read_bin
from quern.data.loader import Loader
from quern.data.shards import Corpus
from quern.data.token_file import ShardWriter, fingerprint, prepared
from quern.process import resident
from tests.support.full_disk import limited
from tests.support.memory_corpus import ids_of, memory_corpus

BOS = 499


def documents(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [[BOS, *rng.integers(0, BOS, rng.integers(0, 30)).tolist()] for _ in range(count)]


def open_writer(folder: Path, split: str, mark: str, **options: Any) -> ShardWriter:
    return ShardWriter(folder, split, **({"vocab_size": 500, "bos": BOS, "fingerprint": mark} | options))


def write(folder: Path, split: str, docs: list[list[int]], mark: str = "a", **options: Any) -> None:
    with open_writer(folder, split, mark, **options) as writer:
        for document in docs[writer.documents :]:
            writer.add(document)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "data", "train", documents(100), shard_tokens=500)
    write(tmp_path / "data", "val", documents(10, seed=1))
    return tmp_path / "data"


@pytest.mark.parametrize(("shard_tokens", "vocab_size"), [(1, 500), (7, 1 << 16), (500, 70_000), (10**6, 500)])
def test_what_is_written_is_read(tmp_path, shard_tokens, vocab_size):
    docs = documents(50) + [[BOS, vocab_size - 1]]
    write(tmp_path, "train", docs, shard_tokens=shard_tokens, vocab_size=vocab_size)
    corpus = Corpus.open(tmp_path, "train")
    assert ids_of(corpus) == docs
    assert corpus.lengths.tolist() == [len(d) for d in docs]
    assert corpus.num_tokens == sum(map(len, docs)) and corpus.bos == BOS
    assert corpus.gather(3, 1).tolist() == docs[3][1:]


def test_bytes_are_the_public_format(folder):
    docs = documents(10, seed=1)
    raw = (folder / "val-00000.bin").read_bytes()
    assert struct.unpack("<3i", raw[:12]) == (20240520, 1, sum(map(len, docs)))
    assert raw[12:1024] == bytes(1012)
    assert np.frombuffer(raw[1024:], "<u2").tolist() == [t for d in docs for t in d]
    starts = np.load(folder / "val-00000.starts.npy", allow_pickle=False)
    assert starts.tolist() == np.cumsum([0] + [len(d) for d in docs])[:-1].tolist()


DAMAGES = {
    "flip": lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]),
    "truncate": lambda raw: raw[:-2],
    "empty": lambda raw: b"",
}


def damage(path: Path, how: str) -> None:
    raw = path.read_bytes()
    if how == "remove":
        path.unlink()
    elif how == "swap":
        other = max(p for p in path.parent.glob("train*") if p != path and p.suffixes == path.suffixes)
        path.write_bytes(other.read_bytes())
        other.write_bytes(raw)
    else:
        path.write_bytes(DAMAGES[how](raw))


@pytest.mark.parametrize("how", [*DAMAGES, "remove", "swap"])
def test_damage_is_reported_with_the_files_name(folder, how):
    files = sorted(p for p in folder.iterdir() if p.name.startswith("train"))
    assert len(files) >= 4
    assert Corpus.open(folder, "train").num_documents == 100
    originals = {p: p.read_bytes() for p in files}
    for path in files:
        damage(path, how)
        changed = [p.name for p in files if not p.exists() or p.read_bytes() != originals[p]]
        with pytest.raises((ValueError, FileNotFoundError), match="|".join(changed)) as refused:
            Corpus.open(folder, "train")
        assert not prepared(folder, "a") or "remove it" in str(refused.value), "else the same command says so forever"
        assert Corpus.open(folder, "val").num_documents == 10, "the other split stays readable"
        for other, raw in originals.items():
            other.write_bytes(raw)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 2}'])
def test_a_damaged_manifest_is_named(folder, text):
    (folder / "manifest.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="manifest.json"):
        Corpus.open(folder, "train")
    assert not prepared(folder, "a")


def test_reuse_only_when_nothing_changed(folder):
    assert prepared(folder, "a")
    assert not prepared(folder, "b")
    assert not prepared(folder, "a", splits=("train", "val", "test"))
    assert not prepared(folder / "nowhere", "a")
    with pytest.raises(ValueError, match="another tokenizer or source"):
        Corpus.open(folder, "train", fingerprint="b")
    with pytest.raises(ValueError, match="train, val"):
        Corpus.open(folder, "test")
    with pytest.raises(FileNotFoundError, match="prepare"):
        Corpus.open(folder / "nowhere", "train")
    (folder / "train-00001.bin").unlink()
    assert not prepared(folder, "a") and prepared(folder, "a", splits=["val"])


def test_fingerprints_do_not_run_together():
    assert fingerprint("ab", "c") != fingerprint("a", "bc") != fingerprint("a", "bc", "")
    assert fingerprint("größe") == fingerprint("größe")
    assert fingerprint(".\udce9") != fingerprint(".\udcea"), "of file names that are no UTF-8"


def interrupted(folder: Path, docs: list[list[int]], **options: Any) -> int:
    """Writes documents until the reader breaks; how many were there at the beginning."""
    with pytest.raises(RuntimeError), open_writer(folder, "train", "b", **options) as writer:
        kept = writer.documents
        for document in docs[kept:]:
            writer.add(document)
        raise RuntimeError("the reader broke")
    return kept


def test_a_write_that_is_interrupted_in_its_first_shard_changes_nothing(folder):
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    interrupted(folder, documents(20, seed=5))
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("how", "name"),
    [("flip", ".bin"), ("truncate", ".starts.npy"), ("empty", ".bin"), ("remove", ".bin"), ("swap", ".starts.npy")],
)
def test_a_finished_shard_that_was_damaged_is_written_again_with_those_after_it(tmp_path, how, name):
    docs = documents(100)
    write(tmp_path / "whole", "train", docs, mark="b", shard_tokens=150)
    interrupted(folder := tmp_path / "data", docs[:80], shard_tokens=150)
    finished = [len(np.load(path)) for path in sorted(folder.glob("train*.npy"))]
    damage(folder / f"train-00002{name}", how)
    assert interrupted(folder, docs[:80], shard_tokens=150) == sum(finished[:2])
    write(folder, "train", docs, mark="b", shard_tokens=150)
    assert all(p.read_bytes() == (folder / p.name).read_bytes() for p in (tmp_path / "whole").iterdir())


@pytest.mark.parametrize("other", [{"fingerprint": "c"}, {"shard_tokens": 151}, {"vocab_size": 501}])
def test_finished_shards_of_other_tokens_are_not_kept(tmp_path, other):
    interrupted(tmp_path, documents(60), shard_tokens=150)
    assert interrupted(tmp_path, documents(60), **({"shard_tokens": 150} | other)) == 0


@pytest.mark.parametrize("failing", range(8))
def test_a_write_that_dies_while_renaming_never_passes_as_prepared(folder, monkeypatch, failing):
    """The write stops at any rename, with new files of the old sizes: sizes alone would not show it."""
    replace, calls = os.replace, iter(range(100))

    def dying(source, target):
        if next(calls) == failing:
            raise OSError("no space left")
        replace(source, target)

    docs = [[BOS, *(498 - t for t in d[1:])] for d in documents(100)]
    write(folder, "train", documents(100), shard_tokens=800)
    assert len(list(folder.glob("train*.bin"))) == 2, "three manifests, two files and two sidecars are renamed"
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", dying)
        with nullcontext() if failing == 7 else pytest.raises(OSError, match="no space"):
            write(folder, "train", docs, shard_tokens=800)
    assert not list(folder.glob(".*")), "nothing is left behind"
    if failing in (0, 7):
        assert prepared(folder, "a")
        assert ids_of(Corpus.open(folder, "train")) == (docs if failing else documents(100))
    else:
        assert not prepared(folder, "a") and prepared(folder, "a", splits=["val"])
        with pytest.raises(ValueError, match="prepare it again"):
            Corpus.open(folder, "train")
    write(folder, "train", docs, shard_tokens=800)
    assert prepared(folder, "a") and ids_of(Corpus.open(folder, "train")) == docs


def test_another_fingerprint_replaces_every_split(folder):
    write(folder, "train", documents(5, seed=3), mark="b")
    assert not prepared(folder, "b") and not prepared(folder, "a", splits=["val"])
    assert ids_of(Corpus.open(folder, "train", fingerprint="b")) == documents(5, seed=3)
    assert sorted(p.name for p in folder.glob("train*")) == ["train-00000.bin", "train-00000.starts.npy"]
    write(folder, "val", documents(2), mark="b")
    assert prepared(folder, "b")


@pytest.mark.parametrize(
    ("message", "ids"),
    [
        *(("ids outside", [[BOS, 1], [BOS, id_]]) for id_ in (500, -1, 70_000)),
        *(("BOS", [[BOS, 1], ids]) for ids in ([1, 2], [])),
        ("no documents for the split 'train'", []),
    ],
)
def test_wrong_ids_are_refused_when_written(tmp_path, message, ids):
    with pytest.raises(ValueError, match=message):
        write(tmp_path, "train", ids)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_a_memory_map_does_not_fill_the_memory(tmp_path):
    tokens = np.ones(32_000_000, dtype=np.uint16)
    tokens[::1000] = BOS
    tokens.tofile(tmp_path / "big.bin")
    order = np.random.default_rng(0).permutation(32_000)
    grown = {}
    for resident_bytes in (8 << 20, 1 << 40):  # the second shows that the measurement can see growth
        corpus = read_bin(tmp_path / "big.bin", bos=BOS)
        corpus.release()
        corpus.resident_bytes = resident_bytes
        before = highest = resident("RssFile") or 0
        for chosen in np.array_split(order, 500):
            out = corpus.slices(corpus.starts[chosen], corpus.lengths[chosen])
            assert (out.reshape(-1, 1000)[:, 0] == BOS).all()
            highest = max(highest, resident("RssFile") or 0)
        grown[resident_bytes] = highest - before
    assert grown[8 << 20] < 24 << 20 < 48 << 20 < grown[1 << 40]


def test_masks_come_back_from_disk(tmp_path: Path) -> None:
    """Over several files, joined with another corpus, and with documents that are named twice."""
    docs = documents(40)
    masks = [np.arange(len(document)) % 3 == 1 for document in docs]
    with ShardWriter(tmp_path, "train", vocab_size=500, bos=BOS, fingerprint="a", shard_tokens=100) as writer:
        for document, mask in zip(docs, masks, strict=True):
            writer.add(document, mask)
    corpus = Corpus.open(tmp_path, "train")
    assert len(list(tmp_path.glob("*.mask"))) > 2 and corpus.masked
    joined = Corpus.join([memory_corpus(docs[:3], masks[:3]), corpus]).part(np.array([1, 5, 5, 42]))
    chosen = [1, 2, 2, 39]
    assert ids_of(joined) == [docs[number] for number in chosen]
    mask = joined.slices(joined.starts, joined.lengths, mask=True)
    assert mask.tolist() == np.concatenate([masks[number] for number in chosen]).tolist()
    path = sorted(tmp_path.glob("*.mask"))[1]
    path.write_bytes(b"\0" * path.stat().st_size)
    with pytest.raises(ValueError, match=r"train-00001.mask is damaged or was swapped"):
        Corpus.open(tmp_path, "train")


@pytest.mark.parametrize(("shard_tokens", "files"), [(1, 25), (50, 7), (10**6, 1)])
def test_the_index_of_files_is_that_of_arrays(tmp_path: Path, shard_tokens: int, files: int) -> None:
    docs = documents(25)
    write(tmp_path, "train", docs, shard_tokens=shard_tokens)
    plain, corpus = memory_corpus(docs), Corpus.open(tmp_path, "train")
    chosen = corpus.part(np.arange(25))
    assert len(corpus.parts) == files
    for each in (0, 3):
        sizes = [sum(map(len, docs[:number])) + each * number for number in range(26)]
        for size in range(sizes[-1] + 3):
            expected = next((number for number in range(25) if sizes[number] >= size), 25)
            assert [one.at_size(size, each) for one in (plain, corpus, chosen)] == [expected] * 3
    for one in (plain, corpus, chosen):
        assert [one.tokens_before(number) for number in range(26)] == [sum(map(len, docs[:n])) for n in range(26)]
    some = np.random.default_rng(1).integers(0, 25, 100)
    assert np.array_equal(corpus.take(some), plain.take(some)) and np.array_equal(chosen.take(some), plain.take(some))
    with pytest.raises(IndexError, match="numbered 0 to 24"):
        corpus.take(np.array([0, 25]))


def test_more_shards_than_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quern.data.shards.FILES_MAPPED", 16)
    docs = documents(120)
    write(tmp_path, "train", docs, shard_tokens=1)
    open_already = max(map(int, os.listdir("/dev/fd")))  # by other tests of this process
    with limited(resource.RLIMIT_NOFILE, open_already + 100):
        corpus = Corpus.open(tmp_path, "train")
        assert ids_of(corpus) == docs
        for loader in (Loader(corpus, 200, 64), Loader(corpus, 200, 64, packing="stream")):
            seen = {int(token) for step in range(loader.steps_per_epoch) for token in loader.batch(step).targets.flat}
            assert seen >= {token for document in docs for token in document[1:]}


def test_a_large_corpus_is_hashed_when_it_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damage(folder / "train-00002.bin", "flip")
    monkeypatch.setattr("quern.data.shards.VERIFIED_BYTES", 500)
    corpus = Corpus.open(folder, "train")
    assert corpus.gather(0).tolist() == documents(100)[0]
    with pytest.raises(ValueError, match="train-00002.bin is damaged or was swapped"):
        ids_of(corpus)
