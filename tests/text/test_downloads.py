"""Downloads over a bad line: a hub on loopback that resets, truncates and lies.

Whatever happens, a file under its final name is byte for byte the listed one, or is not there.
"""

import hashlib
import logging
import random
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest

from quern.text import repositories
from quern.text.downloads import download, list_repository, retrieve
from quern.text.repositories import HubName, Repository
from tests.support.full_disk import full_disk
from tests.support.hub_server import Hub, hub_server

BODY = random.Random(0).randbytes(300_000)
SHA256 = hashlib.sha256(BODY).hexdigest()
FILE = "a/b/x.parquet"
CHUNK = 1000
"""Bytes that a broken connection may cost at most."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with hub_server() as hub:
        hub.sets, hub.others = {"a/b": {"x.parquet": BODY}}, {"v.txt": BODY}
        settings = {"no_proxy": "*", "HF_ENDPOINT": hub.url, "HF_TOKEN_PATH": str(tmp_path / "none")}
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("time.sleep", lambda seconds: None)
        monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", CHUNK)
        yield hub


@pytest.fixture
def listed(hub: Hub) -> Repository:
    return list_repository(HubName("a/b"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.parquet"


def ranges(hub: Hub) -> list[str | None]:
    return [wanted for path, _, wanted in hub.asked if path.startswith("/cdn/")]


@pytest.mark.parametrize("reset", [True, False], ids=["reset", "closed"])
def test_broken_connections_cost_no_chunk_twice(hub: Hub, listed: Repository, path: Path, reset: bool) -> None:
    hub.cuts, hub.reset = [1001, 40_000, 77_777, 1001, 40_001], reset
    seen: list[tuple[str, int, int]] = []
    download(listed, "x.parquet", path, lambda *step: seen.append(step))
    assert path.read_bytes() == BODY and [file.name for file in path.parent.iterdir()] == [path.name]
    assert ranges(hub)[0] is None and None not in ranges(hub)[1:], "each goes on where the one before broke off"
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen) and seen[-1][1] == len(BODY)
    assert {(name, total) for name, _, total in seen} == {("x.parquet", len(BODY))}


def test_a_later_call_goes_on_where_an_earlier_one_gave_up(hub: Hub, listed: Repository, path: Path) -> None:
    hub.cuts = [100_000, *[0] * 40]
    with pytest.raises(OSError, match=r"run it again to go on from 100,000 of 300,000 bytes"):
        download(listed, "x.parquet", path)
    assert not path.exists()
    hub.cuts, hub.asked = [], []
    download(listed, "x.parquet", path)
    assert path.read_bytes() == BODY and ranges(hub) == ["bytes=100000-"]
    download(listed, "x.parquet", path)
    assert len(ranges(hub)) == 1, "a whole file is not asked for"
    path.write_bytes(BODY[:-1])
    download(listed, "x.parquet", path)
    assert path.read_bytes() == BODY


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (BODY[:999] + bytes([BODY[999] ^ 1]) + BODY[1000:], f"its SHA-256 is .*, expected {SHA256}"),
        (BODY + b"more", r"should be of size 300000 but has size 300004 \(.*/x.parquet\); run it again"),
        (b"<html>please log in</html>", "should be of size 300000"),
    ],
    ids=["one byte flipped", "longer", "a log-in page"],
)
def test_a_lying_server_leaves_nothing_under_the_final_name(
    hub: Hub, listed: Repository, path: Path, sent: bytes, message: str
) -> None:
    hub.sent = {FILE: sent}
    with pytest.raises(OSError, match=message):
        download(listed, "x.parquet", path)
    assert not path.exists()
    hub.sent = {}
    download(listed, "x.parquet", path)  # and what it left behind does no harm
    assert path.read_bytes() == BODY


def test_busy_servers_are_tried_again_and_refusals_are_not(hub: Hub, listed: Repository, path: Path) -> None:
    hub.statuses = [503, 500, 502]
    download(listed, "x.parquet", path)
    assert path.read_bytes() == BODY and len(ranges(hub)) == 4
    path.unlink()
    for status, advice in ((404, "remove listing.json"), (403, "the variable HF_TOKEN")):
        hub.statuses, hub.asked = [status] * 9, []
        with pytest.raises(OSError, match=rf"cannot fetch http://127.*: the server answers {status}: .*{advice}"):
            download(listed, "x.parquet", path)
        assert len(ranges(hub)) == 1


def test_no_server_at_all_is_a_clear_error(
    hub: Hub, listed: Repository, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(OSError, match="cannot fetch http://127.0.0.1:9/.*refused; run it again"):
        download(listed, "x.parquet", path)
    assert huggingface_hub.logging.get_verbosity() >= logging.ERROR  # its own dozen lines stay out of the output


def test_a_full_disk_is_reported_at_once(hub: Hub, listed: Repository, path: Path) -> None:
    with full_disk(100_000), pytest.raises(OSError, match="File too large"):
        download(listed, "x.parquet", path)
    assert not path.exists() and len(ranges(hub)) == 1


def test_a_file_of_another_server_is_checked_and_kept(hub: Hub, tmp_path: Path) -> None:
    url, path, seen = f"{hub.url}/v.txt", tmp_path / "deep" / "v.txt", list[int]()
    retrieve(url, SHA256, path, lambda name, done, total: seen.append(done))
    assert path.read_bytes() == BODY and seen[-1] == len(BODY) and seen == sorted(seen)
    asked = len(hub.asked)
    retrieve(url, SHA256, path)
    assert len(hub.asked) == asked, "a whole file is not asked for"
    for other, sha256, message in (
        (f"{hub.url}/none.txt", SHA256, "cannot fetch http://127.*none.txt: the server answers 404; run it again"),
        (url, "0" * 64, f"cannot fetch http://127.*v.txt: its SHA-256 is {SHA256}, expected 0000"),
    ):
        with pytest.raises(OSError, match=message):
            retrieve(other, sha256, tmp_path / "other.txt")
        assert not (tmp_path / "other.txt").exists()


def test_the_catalogue_is_consistent() -> None:
    for name, dataset in repositories.DATASETS.items():
        assert dataset.repository.count("/") == 1 and dataset.folder == dataset.folder.strip("/"), name
        assert dataset.val and not set(dataset.val) & set(dataset.train), name
        assert len(set(dataset.train)) == len(dataset.train), name
        assert (dataset.kind in ("documents", "tokens")) == (dataset.file_tokens > 0), name
        assert (dataset.kind == "tokens") == (dataset.tokenizer is not None), name
