"""Data sets of a hub: which files are read, by the card's list, by folders, by words in paths; and their download from
a hub on loopback that truncates and lies.

Whatever happens, a file under its final name is byte for byte the listed one, or is not there.
"""

import gzip
import hashlib
import random
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from quern.temporaries import plainly
from quern.text import repositories
from quern.text.downloads import download, list_repository, retrieve
from quern.text.repositories import HubName, Repository, data_set, local_copy
from quern.text.sources import list_source
from tests.support.full_disk import full_disk
from tests.support.hub_server import Hub, hub_server


def chosen(files: str, name: str = "hf:a/b", split: str = "train", configs: list | None = None) -> tuple[str, str]:
    """The training and the validation files, each as one text."""
    listed = {file: (1000, "0" * 64) for file in files.split()}
    found = data_set(Repository("a/b", "c", listed, configs or []), HubName.parse(name), split, "documents")
    return " ".join(found.train), " ".join(found.val)


@pytest.mark.parametrize(
    ("text", "repository", "config", "revision"),
    [
        ("hf:a/b", "a/b", "", ""),
        ("hf:a/b@refs/convert/parquet", "a/b", "", "refs/convert/parquet"),
        ("hf:a/b.c:sample/10BT@v1.0", "a/b.c", "sample/10BT", "v1.0"),
    ],
)
def test_names(text: str, repository: str, config: str, revision: str) -> None:
    name = HubName.parse(text)
    assert (name.repository, name.config, name.revision, str(name)) == (repository, config, revision, text)
    assert "/" not in name.folder and HubName(repository, config, revision + "x").folder != name.folder


@pytest.mark.parametrize("text", ["hf:b", "hf:a/b/c", "hf:a/b:", "hf:a/b@"])
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is named hf:OWNER/NAME\[:CONFIG\]"):
        HubName.parse(text)


WIKI = [
    {"config_name": "en", "data_files": [{"split": "train", "path": "en/train-*"}]},
    {"config_name": "de", "default": True, "data_files": [{"split": "train", "path": ["de/train-*"]}]},
]
PATHS = {"train_sft": "data/train_sft-*", "validation": "data/val-[0-9].parquet", "gone": "data/gone-*"}
SPLITS = [{"config_name": "default", "data_files": [{"split": split, "path": path} for split, path in PATHS.items()]}]


@pytest.mark.parametrize(
    ("files", "name", "split", "configs", "expected"),
    [
        # The card lists configs and their files.
        ("en/train-0.parquet de/train-0.parquet", "hf:a/b:en", "train", WIKI, ("en/train-0.parquet", "")),
        ("en/train-0.parquet de/train-0.parquet", "hf:a/b", "train", WIKI, ("de/train-0.parquet", "")),
        ("data/train_sft-0.parquet data/val-1.parquet data/val-x.parquet", "hf:a/b", "train_sft", SPLITS,
         ("data/train_sft-0.parquet", "data/val-1.parquet")),
        ("x/test.csv y/test.csv", "hf:a/b", "test", [{"config_name": "c", "data_dir": "x/"}], ("x/test.csv", "")),
        ("x.parquet", "hf:a/b", "train", [{"config_name": "default", "drop_labels": True}], ("x.parquet", "")),
        # There is no list: a config is a folder, a split a word.
        ("data/train-0.parquet data/train-1.parquet data/validation-0.parquet data/test-0.parquet", "hf:a/b", "train",
         [], ("data/train-0.parquet data/train-1.parquet", "data/validation-0.parquet")),
        ("one/train/0.parquet one/dev/0.parquet two/train/0.parquet", "hf:a/b:one", "train", [],
         ("one/train/0.parquet", "one/dev/0.parquet")),
        ("books.jsonl.zst more/shard_000.jsonl.gz README.md", "hf:a/b", "train", [],
         ("books.jsonl.zst more/shard_000.jsonl.gz", "")),
        ("train.csv valid.csv notes/constraint.csv", "hf:a/b", "train", [], ("train.csv", "valid.csv")),
        ("data/train_sft.parquet data/test_sft.parquet", "hf:a/b", "train_sft", [], ("data/train_sft.parquet", "")),
        ("a.txt b.csv c/0.jsonl", "hf:a/b", "train", [{"config_name": "c", "data_files": "?.*"}], ("a.txt b.csv", "")),
        ("en/train-0.parquet de/train-0.jsonl de/train-1.txt", "hf:a/b", "train", WIKI, ("de/train-0.jsonl", "")),
        ("en/0.parquet de/train.csv de/dev.csv", "hf:a/b:de", "train", [], ("de/train.csv", "de/dev.csv")),
        # Of these, Parquet before JSON lines before others; descriptions are no data; no path leaves the folder.
        ("a.txt b.jsonl c.parquet dataset_infos.json", "hf:a/b", "train", [], ("c.parquet", "")),
        ("a.txt ../b.txt /c.txt dataset_infos.json", "hf:a/b", "train", [], ("a.txt", "")),
        # What there is not.
        ("x.tar", "hf:a/b:c", "train", [], "has no file that ends in .txt .jsonl .* at hf:a/b:c@refs/convert/parquet"),
        ("train.parquet", "hf:a/b", "exam", [], "hf:a/b has no split 'exam': its splits are train$"),
        ("en/0.parquet", "hf:a/b:fr", "train", [], "there is no config or folder 'fr'; the folders are en$"),
        ("en/train-0.parquet", "hf:a/b:fr", "train", WIKI, "name one of its configs, en, de, as hf:a/b:en"),
        ("data/val-1.parquet", "hf:a/b", "train", SPLITS, "no split 'train': its splits are validation"),
        ("0.parquet", "hf:a/b", "train", [{"config_name": "c", "data_dir": "x"}], "no split 'train': .* are none$"),
        ("0.parquet", "hf:a/b", "train", [{"config_name": "c", "data_files": "x*"}], "no split 'train': .* are none$"),
    ],
)  # fmt: skip
def test_the_files_of_a_split(files: str, name: str, split: str, configs: list, expected: Any) -> None:
    """expected: training and validation files, or why there are none."""
    with pytest.raises(ValueError, match=expected) if isinstance(expected, str) else nullcontext():
        assert chosen(files, name, split, configs) == expected


CARD = "---\nlicense: mit\ndataset_info:\n  features: []\n---\n# Card\n"
CONFIGS = """---
configs:
- config_name: en
  data_files:
  - {split: train, path: en/a*}
  - {split: validation, path: en/b*}
- config_name: de
  data_files: de/*
---
"""

DEFAULT = CONFIGS.replace("name: en", "name: default")


@pytest.mark.parametrize(
    ("files", "card", "expected"),
    [
        ("data/train-0.jsonl data/test-0.jsonl data/validation-0.jsonl", CARD,
         ("data/train-0.jsonl", "data/validation-0.jsonl")),
        ("train/0.txt train/1.txt dev/0.txt LICENSE.txt", None, ("train/0.txt train/1.txt", "dev/0.txt")),
        ("shards/0.jsonl shards/1.jsonl.gz", CARD, ("shards/0.jsonl shards/1.jsonl.gz", "")),
        ("en/a.jsonl en/b.jsonl de/c.jsonl", DEFAULT, ("en/a.jsonl", "en/b.jsonl")),
        # Folders of one's own.
        ("paris.txt london.txt", "# My travels", None),
        ("train-journey.txt paris.txt", "# My travels", None),
        ("trains.txt tests.txt", "# My words", None),
        ("train.md test.md", "---\ntitle: notes\n---\n", None),
        ("notes.md", CARD, None),
    ],
)  # fmt: skip
def test_a_folder_that_is_a_copy(
    tmp_path: Path, files: str, card: str | None, expected: tuple[str, str] | None
) -> None:
    for name in files.split():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x", encoding="utf-8")
    if card is not None:
        (tmp_path / "README.md").write_text(card, encoding="utf-8")
    said: list[str] = []
    for kind in ("documents", "conversations"):  # of which the first are held out
        found = local_copy(tmp_path, list_source(tmp_path), "train", kind, said.append)
        names = found and tuple(" ".join(path.relative_to(tmp_path).as_posix() for path in part) for part in found)
        assert names == (expected and (expected[0], expected[1] if kind == "documents" else ""))
    assert len(said) == 2 * (expected is not None) and all("validation 0" in line for line in said[1:])


def test_a_card_of_a_copy_is_obeyed_or_refused(tmp_path: Path) -> None:
    (tmp_path / "en").mkdir()
    (tmp_path / "en" / "a.jsonl").write_text("x", encoding="utf-8")
    for card, message in [
        (CONFIGS, f"^{tmp_path}: name the files of one of its configs, en, de$"),
        (DEFAULT.replace("a*", "c*").replace("b*", "c*"),
         f"^{tmp_path} has no split 'train': its splits are none$"),
        ("---\nconfigs: [\n---\n", "README.md is damaged .*: correct it, or name the files$"),
        ("---\nconfigs: 3\n---\n", "its card is malformed .Expected `array`, got `int`"),
    ]:  # fmt: skip
        (tmp_path / "README.md").write_text(card, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            local_copy(tmp_path, list_source(tmp_path), "train", "documents", lambda line: None)
    (tmp_path / "en" / "a.jsonl").rename(tmp_path / "dataset_infos.json")
    with pytest.raises(ValueError, match=r"has no file that ends in .* \.parquet$"):
        local_copy(tmp_path, list_source(tmp_path), "train", "documents", lambda line: None)


# Downloads ------------------------------------------------------------------------------------------------------------


BODY = random.Random(0).randbytes(300_000)
SHA256 = hashlib.sha256(BODY).hexdigest()
FILE = "a/b/x.parquet"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with hub_server() as hub:
        hub.sets, hub.others = {"a/b": {"x.parquet": BODY}}, {"v.txt": BODY}
        settings = {"no_proxy": "*", "HF_ENDPOINT": hub.url, "HF_TOKEN_PATH": str(tmp_path / "none")}
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("time.sleep", lambda seconds: None)
        yield hub


@pytest.fixture
def listed(hub: Hub) -> Repository:
    return list_repository(HubName("a/b"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.parquet"


def ranges(hub: Hub) -> list[str | None]:
    return [wanted for path, _, wanted in hub.asked if path.startswith("/cdn/")]


def test_a_later_call_goes_on_where_an_earlier_one_gave_up(hub: Hub, listed: Repository, path: Path) -> None:
    hub.cuts = [100_000, *[0] * 40]
    with pytest.raises(OSError, match=r"run it again to go on from 100,000 of 300,000 bytes"):
        download(listed, "x.parquet", path)
    assert not path.exists()
    hub.cuts, hub.asked, seen = [], [], list[int]()
    download(listed, "x.parquet", path, lambda name, done: seen.append(done))
    assert path.read_bytes() == BODY and ranges(hub) == ["bytes=100000-"]
    assert 100_000 < seen[0] < seen[-1] == len(BODY) and seen == sorted(seen)
    download(listed, "x.parquet", path)
    assert len(ranges(hub)) == 1, "a whole file is not asked for"
    path.write_bytes(BODY[:-1])
    download(listed, "x.parquet", path)
    assert path.read_bytes() == BODY


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (BODY[:999] + bytes([BODY[999] ^ 1]) + BODY[1000:], f"its SHA-256 is .*, expected {SHA256}"),
        (BODY + b"more", "cannot fetch .*: it has 300,004 bytes, expected 300,000; run it again"),
        (b"<html>please log in</html>", "it has 26 bytes, expected 300,000"),
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


@pytest.mark.parametrize(
    ("status", "busy", "expected"),
    [
        (429, {"Retry-After": "280"}, [281, 281]),
        (429, {"RateLimit": '"resolvers";r=0;t=55', "Retry-After": "soon"}, [56, 56]),
        (429, {"RateLimit": '"resolvers";r=7;t=55'}, [4, 16]),
        (408, {"Retry-After": "1"}, [4, 16]),
        (503, {"Retry-After": "86400"}, [600, 600]),
    ],
)
def test_a_busy_server_is_given_the_time_that_it_asks_for(
    hub: Hub, path: Path, monkeypatch: pytest.MonkeyPatch, status: int, busy: dict[str, str], expected: list[float]
) -> None:
    hub.statuses, hub.busy, pauses = [status] * 2, busy, list[float]()
    monkeypatch.setattr("time.sleep", pauses.append)
    retrieve(f"{hub.url}/v.txt", SHA256, path)
    assert path.read_bytes() == BODY and pauses == expected


def test_a_name_that_the_hub_refuses_is_an_error_of_the_listing() -> None:
    with pytest.raises(OSError, match="cannot list hf:own--er/name at .*; check the name"):
        list_repository(HubName("own--er/name"))


def test_a_full_disk_is_reported_at_once(hub: Hub, listed: Repository, path: Path) -> None:
    with full_disk(100_000), pytest.raises(OSError) as refused:
        download(listed, "x.parquet", path)
    assert re.fullmatch(rf"{path}\.\w+\.part: File too large: .*", plainly(refused.value))
    assert not path.exists() and len(ranges(hub)) == 1


def test_a_file_of_another_server_is_checked_and_kept(hub: Hub, tmp_path: Path) -> None:
    url, path, seen = f"{hub.url}/v.txt", tmp_path / "deep" / "v.txt", list[int]()
    retrieve(url, SHA256, path, lambda name, done: seen.append(done))
    assert path.read_bytes() == BODY and seen[-1] == len(BODY) and seen == sorted(seen)
    asked = len(hub.asked)
    retrieve(url, SHA256, path)
    assert len(hub.asked) == asked, "a whole file is not asked for"
    for other, sha256, message in (
        (f"{hub.url}/none.txt", SHA256, "cannot fetch http.*none.txt: the server answers 404: check the address$"),
        ("http://127.0.0.1:9/none.txt", SHA256, "cannot fetch http://127.0.0.1:9/.*refused; run it again$"),
        (url, "0" * 64, f"cannot fetch http://127.*v.txt: its SHA-256 is {SHA256}, expected 0000"),
    ):
        with pytest.raises(OSError, match=message):
            retrieve(other, sha256, tmp_path / "other.txt")
        assert not (tmp_path / "other.txt").exists()
    hub.statuses, hub.busy = [206], {"ETag": '"1"', "Content-Range": "bytes 0-1/2"}
    retrieve(url, None, tmp_path / "whole.txt")
    assert (tmp_path / "whole.txt").read_bytes() == b"{}", "a whole file under status 206"


@pytest.mark.parametrize("sha256", [SHA256, None], ids=["known", "unknown"])
def test_a_later_call_goes_on_with_a_file_of_another_server_if_its_whole_is_checked(
    hub: Hub, path: Path, sha256: str | None
) -> None:
    hub.cuts = [100_000, *[0] * 40]
    with pytest.raises(OSError, match="cannot fetch http://127.*v.txt: .*; run it again$"):
        retrieve(f"{hub.url}/v.txt", sha256, path)
    hub.cuts, hub.asked = [], []
    retrieve(f"{hub.url}/v.txt", sha256, path)
    assert path.read_bytes() == BODY and [wanted for *_, wanted in hub.asked] == ["bytes=100000-" if sha256 else None]


REST, DATE = "bytes=100000-", "Mon, 01 Jan 2024 00:00:00 GMT"


@pytest.mark.parametrize(
    ("before", "after", "asked"),
    [
        # The same version is continued, by a strong validator only.
        ({"ETag": '"1"'}, {"ETag": '"1"'}, [None, REST]),
        ({"Last-Modified": DATE}, {"Last-Modified": DATE}, [None, REST]),
        ({"ETag": 'W/"1"', "Last-Modified": DATE}, {"ETag": 'W/"1"', "Last-Modified": DATE}, [None, None]),
        ({"Last-Modified": DATE, "Date": DATE}, {"Last-Modified": DATE, "Date": DATE}, [None, None]),
        ({}, {}, [None, None]),
        # Another version is not; the servers of the last three ignore If-Range.
        ({"ETag": '"1"'}, {"ETag": '"2"'}, [None, REST]),
        ({"ETag": '"1"'}, {"ETag": '"2"'}, [None, REST, None]),
        ({"ETag": '"1"'}, {}, [None, REST, None]),
        ({"Last-Modified": DATE}, {"Last-Modified": DATE.replace("2024", "2025")}, [None, REST, None]),
    ],
)
@pytest.mark.parametrize("length", [300_000, 60_000])
def test_a_file_that_cannot_be_checked_has_bytes_of_one_version(
    hub: Hub, path: Path, monkeypatch: pytest.MonkeyPatch, before: dict, after: dict, asked: list, length: int
) -> None:
    body = BODY if after == before else BODY[::-1][:length]
    hub.headers, hub.conditions, hub.cuts = before, len(asked) == 2, [100_000]
    monkeypatch.setattr("time.sleep", lambda seconds: vars(hub).update(headers=after, others={"v.txt": body}))
    seen: list[int] = []
    retrieve(f"{hub.url}/v.txt", None, path, lambda name, done: seen.append(done))
    assert path.read_bytes() == body and seen[-1] == len(body) and [wanted for *_, wanted in hub.asked] == asked


@pytest.mark.parametrize(
    ("rest", "starts"),
    [
        (lambda first, last: (0, last, {}), [100_000, 0]),
        (lambda first, last: (first, last, {"Content-Range": f"bytes {first}-{last}/*"}), [100_000]),
        (lambda first, last: (first, last, {"Content-Encoding": "gzip"}), [100_000, 0]),
        (lambda first, last: (first, min(last, first + 79_999), {}), [100_000, 180_000, 260_000]),
        (lambda first, last: (first, min(last, first + 79_999),
         {"Content-Length": "", "Content-Range": f"bytes {first}-{last}/300000"}), [100_000, 180_000, 260_000]),
    ],
    ids=["from the first byte", "of no length", "encoded", "a part of the range", "closed early, without its length"],
)  # fmt: skip
@pytest.mark.parametrize("known", ["size", "SHA-256", "nothing"])
def test_an_answer_with_a_part_of_a_file_continues_it_only_where_it_fits(
    hub: Hub, path: Path, rest: Callable[..., Any], starts: list[int], known: str
) -> None:
    hub.rest, hub.cuts, hub.asked = rest, [100_000], []
    if known == "size":
        hub.digests = False
        download(list_repository(HubName("a/b")), "x.parquet", path)
    else:
        retrieve(f"{hub.url}/v.txt", SHA256 if known == "SHA-256" else None, path)
    wanted = [one for name, _, one in hub.asked if name.startswith(("/cdn/", "/v.txt"))]
    starts = [100_000, 0] if known == "nothing" and len(starts) == 1 else starts  # nobody could check its end
    assert path.read_bytes() == BODY
    assert wanted == [None, *(f"bytes={start}-" if start else None for start in starts)]


def test_a_compressed_answer_is_read_to_its_end(hub: Hub, path: Path) -> None:
    """Its length is that of what was sent, so that only the compressed bytes tell that they are not whole."""
    whole, raw = gzip.compress(BODY), zlib.compress(BODY, wbits=-15)
    for name, sent in (
        ("gzip", whole[:-100]),
        ("GZIP", whole[:-1]),
        ("x-gzip", whole[:500] + b"?" * 100 + whole[600:]),
        ("gzip", whole + whole[:-1]),
        ("deflate", zlib.compress(BODY)[:-1]),
        ("deflate", raw[:-1]),
    ):
        hub.headers, hub.others = {"Content-Encoding": name}, {"v.txt": sent}
        with pytest.raises(OSError, match="cannot fetch http.*v.txt: .*; run it again$"):
            retrieve(f"{hub.url}/v.txt", None, path)
        assert not path.exists()
    for name in ("br", "identity, ZSTD"):
        hub.headers = {"Content-Encoding": name}
        with pytest.raises(OSError, match="cannot fetch http.*v.txt: it is sent as '(br|zstd)': use another program"):
            retrieve(f"{hub.url}/v.txt", None, path)
    for name, sent in (
        ("gzip", gzip.compress(BODY[:1000]) + gzip.compress(BODY[1000:])),
        ("gzip, identity", whole),
        ("deflate,gzip", gzip.compress(raw)),
        ("deflate", zlib.compress(BODY)),
        ("deflate", raw),
        *((name, BODY) for name in ("", "aws-chunked", "none", "utf-8")),
    ):
        hub.headers, hub.others = {"Content-Encoding": name}, {"v.txt": sent}
        path.unlink(missing_ok=True)
        retrieve(f"{hub.url}/v.txt", None, path)
        assert path.read_bytes() == BODY


@pytest.mark.parametrize("more", [b"", b"more"], ids=["whole", "longer"])
def test_a_part_with_nothing_left_to_ask_for(hub: Hub, listed: Repository, path: Path, more: bytes) -> None:
    for fetch, part in (
        (lambda: download(listed, "x.parquet", path), f"{path.name}.{listed.commit[:8]}.part"),
        (lambda: retrieve(f"{hub.url}/v.txt", SHA256, path), f"{path.name}.part"),
    ):
        path.with_name(part).write_bytes(BODY + more)
        fetch()
        assert path.read_bytes() == BODY and [one.name for one in path.parent.iterdir()] == [path.name]
        path.unlink()
    assert len(ranges(hub)) == bool(more), "a whole part is not asked for"


def test_the_catalogue_is_consistent() -> None:
    for name, dataset in repositories.DATASETS.items():
        assert dataset.repository.count("/") == 1 and dataset.folder == dataset.folder.strip("/"), name
        assert dataset.val and not set(dataset.val) & set(dataset.train), name
        assert len(set(dataset.train)) == len(dataset.train), name
        assert (dataset.kind in ("documents", "tokens")) == (dataset.file_tokens > 0), name
        assert (dataset.kind == "tokens") == (dataset.tokenizer is not None), name
