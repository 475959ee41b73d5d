"""Downloads files of the Hugging Face Hub, with its own library, and of other servers. Only this file downloads.

A file gets its final name only when it is whole: its length is that of the repository's listing, and its SHA-256 is the
listed or the published one. Until then a file of the Hub is `<name>.<commit>.part`, which a later call continues.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from quern.process import environment, set_child_env, waiting
from quern.temporaries import sha256_of, sync_path
from quern.text.repositories import HubName, Repository

QUIET_HUB = {"HF_HUB_DISABLE_TELEMETRY": "1"}
"""The Hub's library reads it when it is imported. Without it, the library asks the Hub for a list of programs, of which
it would report this one, and keeps the list in the home folder."""
PAUSES = (4.0, 16.0, 60.0)
"""Seconds before each further try, where the server is busy or what arrived is not the file."""
LIMIT_SECONDS = 30.0
NEEDS_TOKEN = ": a set that asks for it needs the token in the variable HF_TOKEN"
ADVICE = {401: NEEDS_TOKEN, 403: NEEDS_TOKEN, 404: ": remove listing.json, and the files are listed again"}
"""Advice for the user about an answer of the Hub."""
OTHERS: dict[int, str] = dict.fromkeys((401, 403, 404, 410), ": check the address")
"""Advice about an answer of any other server."""
Progress = Callable[[str, int, int], None]
"""(file name, bytes so far, total bytes), called as bytes arrive."""


class _Bar(AbstractContextManager["_Bar"]):
    """A progress bar as the library drives it, for the bytes of one file: it calls `said(done, total)`."""

    def __init__(self, said: Callable[..., None], total: int | None = None, initial: int = 0, **_: object) -> None:
        self.said, self.total, self.done = said, total, initial

    def update(self, size: float) -> None:
        self.done += int(size)
        self.said(self.done, self.total)

    def __exit__(self, *error: object) -> None:
        pass


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
    part = path.with_name(f"{path.name}.{commit[:8]}.part")
    _fetch(url, path, part, size, sha256, progress)


def retrieve(url: str, sha256: str | None, path: Path, progress: Progress = lambda *step: None) -> None:
    """Downloads a file of another server, unless it is there. Each call starts from its first byte. Raises OSError as
    `download`. sha256: None takes what comes."""
    if not path.exists() or sha256 not in (None, sha256_of(path)):
        _fetch(url, path, path.with_name(f"{path.name}.part"), None, sha256, progress)


def _fetch(url: str, path: Path, part: Path, size: int | None, sha256: str | None, progress: Progress) -> None:
    """Downloads a file to `part`, which becomes `path` when it is whole. size: None for a file of another server than
    the Hub, whose part is not continued."""
    set_child_env(QUIET_HUB)
    import huggingface_hub
    from huggingface_hub.constants import HF_HUB_DOWNLOAD_TIMEOUT
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    huggingface_hub.logging.set_verbosity_error()  # what breaks is told in one line, below
    headers, advice = (build_hf_headers(), ADVICE) if size is not None else ({"Accept-Encoding": "identity"}, OTHERS)
    path.parent.mkdir(parents=True, exist_ok=True)
    host, tries, farthest = urlsplit(url).netloc, 0, 0
    while True:
        try:
            with waiting(f"bytes of {path.name} from {host}", HF_HUB_DOWNLOAD_TIMEOUT) as arrived:

                def advance(done: int, total: int | None) -> None:
                    arrived()
                    progress(path.name, done, size or total or done)

                with open(part, "ab") as target:
                    have = target.tell() if target.tell() <= (size or 0) else target.truncate(0)
                    bar: Any = partial(_Bar, advance)  # the library goes on by itself where a connection breaks
                    how: Any = {"headers": headers, "expected_size": size, "tqdm_class": bar}
                    http_get(url, target, resume_size=have, **how)
                    os.fsync(target.fileno())
            found = sha256_of(part)
            if sha256 in (None, found):
                break
            part.unlink()
            reason, most, status = f"its SHA-256 is {found}, expected {sha256}", 1, 0
        except (OSError, huggingface_hub.errors.HTTPError) as error:
            status = getattr(getattr(error, "response", None), "status_code", 0)
            reason = f"the server answers {status}{advice.get(status, '')}" if status else _reason(error)
            # A full disk and a missing file do not change. The library has tried again where connections break.
            most = len(PAUSES) if status >= 500 else int(not isinstance(error, OSError))
        have = part.stat().st_size if part.exists() and size else 0
        if have > farthest:
            tries, farthest = 0, have
        if tries >= most:
            again = f"; run it again{f' to go on from {have:,} of {size:,} bytes' if size else ''}"
            raise OSError(f"cannot fetch {url}: {reason}{'' if status in advice else again}")
        tries += 1
        with waiting(f"{host} before try {tries + 1} of {most + 1} ({reason})", PAUSES[tries - 1]):
            time.sleep(PAUSES[tries - 1])
    os.replace(part, path)
    sync_path(path.parent)


def _reason(error: Exception) -> str:
    text = str(error).partition("\nThis is usually")[0]  # then the Hub's library advises what only its callers can do
    return " ".join(text.split()).rstrip(".")
