"""Downloads files of the Hugging Face Hub, with its own library, and of other servers. Only this file downloads.

A file gets its final name only when it is whole: it has the length of the repository's listing, and the listed or
published SHA-256. Until then it is `<name>.part` or, of the Hub, `<name>.<commit>.part`, which a later call continues.
A file of which neither is known starts afresh in each call; there, only bytes of the same version continue it.
"""

from __future__ import annotations

import os
import re
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote, urlsplit

from quern.process import environment, set_child_env, waiting
from quern.temporaries import naming, sha256_of, sync_path
from quern.text.repositories import HubName, Repository

QUIET_HUB = {"HF_HUB_DISABLE_TELEMETRY": "1"}
"""The Hub's library reads it when it is imported. Without it, the library asks the Hub for a list of programs, of which
it would report this one, and keeps the list in the home folder."""
PAUSES = (4.0, 16.0, 60.0)
"""Seconds before each further try, where the server is busy, the connection broke or what arrived is not the file."""
LONGEST_PAUSE = 600.0  # the most seconds for which a busy server can ask
BUSY = (408, 429, *range(500, 600))  # answers of a server that is tried again after each of the pauses
BROKEN_TRIES = 2  # further tries after a broken connection, unless bytes arrived
LIMIT_SECONDS = 30.0
NEEDS_TOKEN = ": a set that asks for it needs the token in the variable HF_TOKEN"
ADVICE = {401: NEEDS_TOKEN, 403: NEEDS_TOKEN, 404: ": remove listing.json, and the files are listed again"}
"""Advice for the user about an answer of the Hub."""
OTHERS: dict[int, str] = dict.fromkeys((401, 403, 404, 410), ": check the address")
"""Advice about an answer of any other server."""
UNZIPPED, UNREAD = ("gzip", "x-gzip", "deflate"), ("br", "zstd", "compress")
Progress = Callable[[str, int], None]  # (file name, bytes so far), called as bytes arrive


def endpoint() -> str:
    """The address of the Hub, or of its mirror."""
    return (environment().get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def list_repository(name: HubName) -> Repository:
    """Lists the files of a data set of the Hugging Face Hub, at the commit that its revision names now. Raises OSError
    if there is no such data set or revision, it needs a token, or there is no connection."""
    set_child_env(QUIET_HUB)
    import huggingface_hub  # late: it reads its settings from the environment when it is imported

    try:
        found = huggingface_hub.HfApi(endpoint=endpoint()).dataset_info(
            name.repository, revision=name.revision or None, timeout=LIMIT_SECONDS, files_metadata=True
        )
    except (OSError, huggingface_hub.errors.HTTPError, huggingface_hub.errors.HFValidationError) as error:
        raise OSError(
            f"cannot list {name} at {endpoint()}: {_reason(error)}; check the name, the connection and, for a set that "
            "asks for it, the token in the variable HF_TOKEN"
        ) from error
    files = {one.rfilename: (one.size or 0, one.lfs.sha256 if one.lfs else None) for one in found.siblings or ()}
    return Repository(name.repository, found.sha or "", files, (found.card_data or {}).get("configs") or ())


def download(repository: Repository, file: str, path: Path, progress: Progress = lambda *step: None) -> None:
    """Downloads a file of a data set of the Hub, unless it is there, and checks it before it appears at `path`. Raises
    OSError, which says what to do, if it cannot be downloaded."""
    if file not in repository.files:
        raise OSError(f"cannot fetch {file}: the data set {repository.name} has no such file; name it as hf:OWNER/NAME")
    size, sha256 = repository.files[file]
    if path.exists() and path.stat().st_size == size:
        return
    commit = repository.commit
    url = f"{endpoint()}/datasets/{repository.name}/resolve/{commit}/{quote(file)}"
    _fetch(url, path, path.with_name(f"{path.name}.{commit[:8]}.part"), size, sha256, progress)


def retrieve(url: str, sha256: str | None, path: Path, progress: Progress = lambda *step: None) -> None:
    """Downloads a file of another server, unless it is there. Raises OSError as `download`. sha256: None takes any."""
    if not path.exists() or sha256 not in (None, sha256_of(path)):
        _fetch(url, path, path.with_name(f"{path.name}.part"), None, sha256, progress)


def _fetch(url: str, path: Path, part: Path, size: int | None, sha256: str | None, progress: Progress) -> None:
    """Downloads a file to `part`, which becomes `path` when it is whole. size: None for a file of another server than
    the Hub."""
    set_child_env(QUIET_HUB)
    import huggingface_hub
    from huggingface_hub.constants import HF_HUB_DOWNLOAD_TIMEOUT

    host, advice, version = urlsplit(url).netloc, OTHERS if size is None else ADVICE, None if size or sha256 else ""
    path.parent.mkdir(parents=True, exist_ok=True)
    tries, farthest = 0, 0
    while True:
        try:
            # An OSError is of this machine, such as a full disk.
            with naming(part), waiting(f"bytes of {path.name} from {host}", HF_HUB_DOWNLOAD_TIMEOUT) as arrived:
                for have, came in _receive(url, part, size, version):
                    version = came
                    arrived()
                    progress(path.name, have)
            sync_path(part)
            have, found = part.stat().st_size, sha256_of(part)
            if size in (None, have) and sha256 in (None, found):
                break
            part.unlink()
            reason, most, status, busy = f"its SHA-256 is {found}, expected {sha256}", 1, 0, {}
            reason = reason if size in (None, have) else f"it has {have:,} bytes, expected {size:,}"
        except (huggingface_hub.errors.HTTPError, zlib.error) as error:
            answer = getattr(error, "response", None)
            status, busy = getattr(answer, "status_code", 0), getattr(answer, "headers", {})
            reason = f"the server answers {status}{advice.get(status, '')}" if status else _reason(error)
            most = len(PAUSES) if status in BUSY else 0 if status else BROKEN_TRIES
        have = part.stat().st_size if part.exists() else 0
        if have > farthest:
            tries, farthest = 0, have
        if tries >= most:
            again = f"; run it again{f' to go on from {have:,} of {size:,} bytes' if size else ''}"
            raise OSError(f"cannot fetch {url}: {reason}{'' if status in advice else again}")
        asked = re.findall(r"(?:^|;\s*r=0;\s*t=)(\d{1,9})", f"{busy.get('Retry-After')} {busy.get('RateLimit')}")
        pause, tries = max([PAUSES[tries], *(min(int(one) + 1, LONGEST_PAUSE) for one in asked)]), tries + 1
        with waiting(f"{host} before try {tries + 1} of {most + 1} ({reason})", pause):
            time.sleep(pause)
    os.replace(part, path)
    sync_path(path.parent)


def _receive(url: str, part: Path, size: int | None, version: str | None) -> Iterator[tuple[int, str | None]]:
    """Appends to `part` the bytes that it lacks; yields its length and version as they arrive. version: the ETag or the
    date that the rest must have too; "" if there is none, so the part starts afresh; None if the whole will be checked.
    Raises HTTPError for a refusal, an early end, or bytes that do not continue the part, which is then emptied."""
    import huggingface_hub
    from huggingface_hub.constants import HF_HUB_DOWNLOAD_TIMEOUT
    from huggingface_hub.utils import build_hf_headers, get_session

    with open(part, "ab") as target:
        have = target.truncate(0) if version == "" else target.tell()
        if size and have >= size:
            return  # its check tells whether it is the file
        rest = {"Range": f"bytes={have}-"} | ({"If-Range": version} if version else {}) if have else {}
        asked = ({} if size is None else build_hf_headers()) | {"Accept-Encoding": "identity"} | rest
        with get_session().stream("GET", url, headers=asked, timeout=HF_HUB_DOWNLOAD_TIMEOUT) as answer:
            came, span = answer.headers.get("ETag") or answer.headers.get("Last-Modified", ""), None
            weak = came.startswith("W/") or came == answer.headers.get("Date")  # by RFC 9110, 8.8
            came = None if version is None else "" if weak else came
            if answer.status_code in (206, 416):
                end = r"\d+|\*" if version is None else r"\d+"  # unknown ("*") where the whole will be checked
                span = re.fullmatch(rf"bytes {have}-\d+/({end})", answer.headers.get("Content-Range", ""))
                if not span or (have and came != version) or "Content-Encoding" in answer.headers:
                    target.truncate(0)
                    raise huggingface_hub.errors.HTTPError("the server sent other bytes than the rest of the file")
            else:
                answer.raise_for_status()
                have = target.truncate(0)
            chunks = answer.iter_raw()
            for name in reversed(answer.headers.get("Content-Encoding", "").lower().replace(" ", "").split(",")):
                if name in UNREAD:
                    raise OSError(f"cannot fetch {url}: it is sent as {name!r}: use another program, or another server")
                chunks = _unzipped(chunks, name == "deflate") if name in UNZIPPED else chunks
            for chunk in chunks:
                have += target.write(chunk)
                yield have, came
            if span and span[1] not in ("*", str(have)):
                raise huggingface_hub.errors.HTTPError(f"the answer ended at {have:,} of {int(span[1]):,} bytes")


def _unzipped(chunks: Iterator[bytes], deflate: bool) -> Iterator[bytes]:
    """Decompresses gzip, which may have several members, or deflate. The library takes the first member for all, and
    one that ends early for whole. Raises HTTPError for an early end, zlib.error for damaged bytes."""
    import huggingface_hub

    unzip = None
    for chunk in chunks:
        while chunk:
            if unzip is None or unzip.eof:
                raw = deflate and chunk[0] & 15 != 8  # some servers leave the header of zlib out
                unzip = zlib.decompressobj(-15 if raw else 47)
            yield unzip.decompress(chunk)
            chunk = unzip.unused_data
    if unzip is None or not unzip.eof:
        raise huggingface_hub.errors.HTTPError("the compressed answer ended early")


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")
