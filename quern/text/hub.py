"""Downloads public data sets. This is the only file of the project that opens outgoing connections.

`fetch` stores a data set under `<folder>/{train,val}/`. The validation files do not depend on the number of
training shards, so scores stay comparable. A file gets its final name only after these checks: its length is the one
that the server states, its SHA-256 is the published one (if known from data_sets.py, from the listing of a repository
or from Hugging Face's X-Linked-Etag), and its first and last bytes match its format. Until then it is `<name>.part`,
which a Range request continues after a broken connection or in a later call. Sizes are in bytes.

`list_repository` asks the Hugging Face Hub which files a data set has, by the Hub's own library.
"""

import http.client
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypedDict
from urllib.parse import quote, urlsplit

from quern.records import FileFacts, read_json
from quern.temporaries import alone_in, sha256_of, sync_path
from quern.text.data_sets import HUB, HUGGING_FACE, DataSet
from quern.text.repository import HubName, Repository
from quern.waits.waiting import waiting

CHUNK_BYTES = 1 << 18
TIMEOUT_SECONDS = 30.0
LONGEST_PAUSE_SECONDS = 60.0
RETRIED_STATUS = (408, 425, 429, 500, 502, 503, 504)

Progress = Callable[[str, int, int], None]
"""(file name, bytes so far, total bytes), called as bytes arrive."""


class Interrupted(Exception):
    """A transfer failed in a way that another try may fix."""

    def __init__(self, reason: str, pause_seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.pause_seconds = pause_seconds


@dataclass(frozen=True)
class Fetched:
    """The local files of a data set: training files, those for validation, and the vocabulary of tokens."""

    train: tuple[Path, ...]
    val: tuple[Path, ...]
    tokenizer: Path | None


def fetch(
    dataset: DataSet,
    folder: Path,
    progress: Progress = lambda *step: None,
    *,
    shards: int | None = None,
    endpoint: str = HUGGING_FACE,
    headers: Mapping[str, str] | None = None,
    pause_seconds: float = 1.0,
    log: Callable[[str], None] = lambda line: None,
) -> Fetched:
    """Downloads the first `shards` training files of a data set and all its validation files.

    Complete files are not downloaded again. If another process downloads into the folder, this one waits for it.

    Args:
        dataset: The data set.
        folder: Its folder.
        progress: Called as bytes arrive.
        shards: The number of training files; None for all.
        endpoint: The address of the Hugging Face Hub or of a mirror of it.
        headers: Sent with each request, such as a token; not to other hosts that a server redirects to.
        pause_seconds: The pause before the second try; doubled after each failure.
        log: Called with a line when this process waits for another.

    Returns:
        The files, without further ones that an earlier call downloaded.

    Raises:
        OSError: A file cannot be downloaded; the message says what to do.
    """
    folder.mkdir(parents=True, exist_ok=True)
    base = dataset.base.rstrip("/")
    if base.startswith(HUB):
        base = endpoint.rstrip("/") + base.removeprefix(HUGGING_FACE)
    wanted = [(folder / "val" / file, f"{base}/{quote(file)}", dataset.sha256.get(file)) for file in dataset.val]
    train = dataset.train[:shards]
    wanted += [(folder / "train" / file, f"{base}/{quote(file)}", dataset.sha256.get(file)) for file in train]
    tokenizer = None
    if dataset.tokenizer:
        tokenizer = folder / dataset.tokenizer.rpartition("/")[2]
        wanted.insert(0, (tokenizer, dataset.tokenizer, dataset.sha256.get(tokenizer.name)))
    with alone_in(folder, log):
        for path, url, expected in wanted:
            path.parent.mkdir(parents=True, exist_ok=True)
            record = path.with_name(path.name + ".sha256.json")
            if not _is_done(path, record, expected):
                download(url, path, expected, progress, pause_seconds=pause_seconds, headers=headers)
                done = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
                record.write_text(json.dumps(done), encoding="utf-8")
    return Fetched(
        tuple(folder / "train" / file for file in train),
        tuple(folder / "val" / file for file in dataset.val),
        tokenizer,
    )


def list_repository(name: HubName, endpoint: str = HUGGING_FACE) -> Repository:
    """Lists the files of a data set of the Hugging Face Hub, at the commit that its revision names now.

    Raises:
        OSError: There is no such data set or revision, it needs a token, or there is no connection.
    """
    import huggingface_hub  # late: it reads its settings from the environment when it is imported

    try:
        found = huggingface_hub.HfApi(endpoint=endpoint).dataset_info(
            name.repository, revision=name.revision or None, timeout=TIMEOUT_SECONDS, files_metadata=True
        )
    except (OSError, huggingface_hub.errors.HTTPError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise OSError(
            f"cannot list {name} at {endpoint}: {reason}; check the name, the connection and, for a set that asks for "
            "it, the token in the variable HF_TOKEN"
        ) from error
    files = {one.rfilename: (one.size or 0, one.lfs.sha256 if one.lfs else None) for one in found.siblings or ()}
    return Repository(
        f"{HUB}/{name.repository}/resolve/{found.sha}", files, (found.card_data or {}).get("configs") or ()
    )


def hub_headers() -> dict[str, str]:
    """The token of the user's account on the Hub as a header; empty without one."""
    from huggingface_hub import get_token

    token = get_token()
    return {"Authorization": f"Bearer {token}"} if token else {}


def download(
    url: str,
    path: Path,
    sha256: str | None = None,
    progress: Progress = lambda *step: None,
    tries: int = 5,
    pause_seconds: float = 1.0,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Downloads one file and checks it before it appears at `path`. Errors as in `fetch`.

    Args:
        url: The address.
        path: The final path; its folder exists.
        sha256: The expected SHA-256 (hex); None for the one that the server states, if any.
        progress: Called as bytes arrive.
        tries: Consecutive failures without progress after which the file is given up.
        pause_seconds: The pause before the second try; doubled after each failure.
        headers: Sent with each request.
    """
    part = path.with_name(path.name + ".part")
    failures, farthest = 0, 0
    while True:
        try:
            with waiting(f"bytes of {path.name} from {urlsplit(url).netloc}", TIMEOUT_SECONDS) as arrived:

                def advance(file: str, done: int, total: int) -> None:
                    arrived()
                    progress(file, done, total)

                stated = _transfer(url, part, advance, headers or {})
            _check(part, path, sha256 or stated)
            break
        except Interrupted as error:
            size = part.stat().st_size if part.exists() else 0
            failures = 1 if size > farthest else failures + 1
            farthest = max(farthest, size)
            if failures >= tries:
                raise OSError(
                    f"cannot fetch {url}: {error} (tried {tries} times). Run it again to go on from {size:,} bytes"
                ) from error
            pause = min(max(error.pause_seconds, pause_seconds * 2 ** (failures - 1)), LONGEST_PAUSE_SECONDS)
            with waiting(f"{urlsplit(url).netloc} before try {failures + 1} of {tries} ({error})", pause):
                time.sleep(pause)
    os.replace(part, path)
    _state_path(part).unlink(missing_ok=True)
    sync_path(path.parent)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Stores the file's SHA-256, which Hugging Face sends only with the redirect, and keeps the token to its host."""

    linked_etag: str | None = None

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        self.linked_etag = headers.get("X-Linked-Etag", self.linked_etag)
        further = super().redirect_request(req, fp, code, msg, headers, newurl)
        if further is not None and urlsplit(newurl).netloc != urlsplit(req.full_url).netloc:
            further.remove_header("Authorization")
        return further


def _transfer(url: str, part: Path, progress: Progress, headers: Mapping[str, str]) -> str | None:
    """Downloads the missing bytes of `part`. Returns the SHA-256 that the server stated, if any."""
    state = _read_state(part)
    if not state:
        part.unlink(missing_ok=True)  # of unknown origin, so not continued
    have = part.stat().st_size if part.exists() else 0
    if have and have == state["bytes"]:
        return state["sha256"]
    request = urllib.request.Request(url, headers={"User-Agent": "quern", "Accept-Encoding": "identity", **headers})
    if have:
        request.add_header("Range", f"bytes={have}-")
        if state["etag"]:
            request.add_header("If-Range", state["etag"])
    redirects = _Redirects()
    try:
        response = urllib.request.build_opener(redirects).open(request, timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        with error:
            raise _refusal(url, part, error) from error
    except (OSError, http.client.HTTPException) as error:
        raise Interrupted(f"no connection ({error})") from error
    with response:
        start, total = _extent(response, part, have)
        if have and start and total != state["bytes"]:
            _discard(part)
            raise Interrupted(f"the file's length changed from {state['bytes']:,} to {total:,} bytes")
        linked = (redirects.linked_etag or response.headers.get("X-Linked-Etag") or "").strip('"')
        earlier = state["sha256"] if start else None
        stated = linked if re.fullmatch("[0-9a-f]{64}", linked) else earlier
        etag = response.headers.get("ETag", "")
        state = {"bytes": total, "sha256": stated, "etag": etag if etag.startswith('"') else None}
        with open(part, "ab") as file:
            file.truncate(start)
            _state_path(part).write_text(json.dumps(state), encoding="utf-8")
            _copy(response, file, start, total, partial(progress, part.name.removesuffix(".part")))
    return stated


def _refusal(url: str, part: Path, error: urllib.error.HTTPError) -> Exception:
    if error.code == 416:  # the server has no more bytes
        _discard(part)
        return Interrupted("the file changed its length")
    if error.code in RETRIED_STATUS:
        wait = error.headers.get("Retry-After", "")
        return Interrupted(f"the server answers {error.code}", float(wait) if wait.isdigit() else 0.0)
    return OSError(f"cannot fetch {url}: the server answers {error.code} {error.reason}; check the address")


def _extent(response: http.client.HTTPResponse, part: Path, have: int) -> tuple[int, int]:
    """(offset of the body in the file, length of the file)."""
    if response.status == 206:
        if match := re.fullmatch(rf"bytes {have}-\d+/(\d+)", response.headers.get("Content-Range", "")):
            return have, int(match[1])
        _discard(part)
        raise Interrupted("the server sent another part of the file than asked for")
    length = response.headers.get("Content-Length", "")
    if response.status != 200 or not length.isdigit():
        raise Interrupted(f"the server answers {response.status} and states no length")
    return 0, int(length)


def _copy(
    response: http.client.HTTPResponse, file: BinaryIO, size: int, total: int, progress: Callable[[int, int], None]
) -> None:
    """Appends the answer's body to the file, which has `size` bytes."""
    while True:
        try:
            chunk = response.read1(CHUNK_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise Interrupted(f"the connection broke after {size:,} of {total:,} bytes") from error
        if not chunk:
            break
        file.write(chunk)
        size += len(chunk)
        progress(size, total)
    file.flush()
    os.fsync(file.fileno())
    if size != total:
        raise Interrupted(f"the connection ended after {size:,} of {total:,} bytes")


def _check(part: Path, path: Path, sha256: str | None) -> None:
    problem = _wrong_format(part, path.suffix)
    if not problem and sha256 and (found := sha256_of(part)) != sha256:
        problem = f"its SHA-256 is {found}, expected {sha256}"
    if problem:
        _discard(part)
        raise Interrupted(f"what arrived is not the file: {problem}")


def _wrong_format(path: Path, suffix: str) -> str | None:
    """The fault in the first or last bytes of a file, such as a log-in page instead of it; None if there is none."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(12)
        file.seek(max(0, size - 4))
        tail = file.read(4)
    if suffix == ".parquet" and (head[:4] != b"PAR1" or tail != b"PAR1" or size < 12):
        return "not a whole Parquet file"
    if suffix == ".bin":  # token shards: 256 int32 (magic, version, tokens), then uint16 or uint32
        magic, version, tokens = (int.from_bytes(head[i : i + 4], "little") for i in (0, 4, 8))
        if magic != 20240520 or size != 1024 + {1: 2, 2: 4}.get(version, 0) * tokens:
            return "not a whole token shard"
    return None


def _is_done(path: Path, record: Path, sha256: str | None) -> bool:
    """Whether the file exists with its recorded size, or was copied there by hand and passes the checks."""
    if not path.exists():
        return False
    if record.exists():
        done = read_json(record, FileFacts, "remove it and the file that it describes")
        return path.stat().st_size == done["bytes"] and sha256 in (None, done["sha256"])
    return _wrong_format(path, path.suffix) is None and sha256 in (None, sha256_of(path))


def _state_path(part: Path) -> Path:
    return part.with_name(part.name + ".json")


class _State(TypedDict):
    bytes: int | None
    sha256: str | None
    etag: str | None


def _read_state(part: Path) -> dict:
    """The length, SHA-256 and ETag of a partial file; empty if unknown."""
    try:
        return dict(read_json(_state_path(part), _State))
    except (FileNotFoundError, ValueError):
        return {}


def _discard(part: Path) -> None:
    part.unlink(missing_ok=True)
    _state_path(part).unlink(missing_ok=True)
