"""Public data sets of a run: a name → local files under out/downloads/, downloaded unless they are there.

A name is one of text/data_sets.py's, or hf:OWNER/NAME[:CONFIG][@REVISION] for any data set of the Hugging Face Hub. The
files of the latter are listed once: the list, with its commit, is kept in the folder, so a run that is continued reads
the same text although the repository has changed. HF_ENDPOINT names a mirror of the Hub.

Text whose digests a listing states is downloaded while it is read, file by file: its fingerprint is known before, so
training can begin early. Other sets are downloaded whole first.
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from quern.child import environment, set_child_env
from quern.data.prefetch import prefetch_items
from quern.recipe import ConversationSource, Recipe
from quern.records import read_json
from quern.temporaries import write_whole
from quern.terminal import Meter
from quern.text import data_sets, hub
from quern.text.data_sets import DataSet
from quern.text.repository import PREFIX, HubName, Repository, data_set, pinned, repository_of
from quern.text.sources import Listing, entry_of, list_source

LISTING = "listing.json"
FOR_DATA = ("documents", "tokens")
"""Kinds of sets to pretrain on."""
QUIET_HUB = {"HF_HUB_DISABLE_TELEMETRY": "1"}
"""The Hub's library reads it when it is imported. Without it, the library asks the Hub for a list of programs, of which
it would report this one, and keeps the list in the home folder."""
WAIT_SECONDS = 20.0
"""Between two lines on a file that is waited for."""


@dataclass(frozen=True)
class _Known:
    """A data set, its folder, and what its server is sent."""

    files: DataSet
    folder: Path
    headers: Mapping[str, str]


@dataclass(frozen=True)
class PublicData:
    """The files of a public data set that a run reads.

    Args:
        name: For file names.
        files: The local files; of those for training, the ones with a digest may not be there yet.
        available: The number of training files that the set has.
        digests: The SHA-256 (hex) of each training file that `training_files` downloads; empty if all are there.
        known: The set that `training_files` downloads from; None if all files are there.
        log: Called with a line while `training_files` waits for one.
    """

    name: str
    files: hub.Fetched
    available: int
    digests: Mapping[Path, str] = field(default_factory=dict)
    known: _Known | None = field(default=None, repr=False)
    log: Callable[[str], None] = field(default=lambda line: None, repr=False, compare=False)

    @property
    def shards(self) -> int:
        return len(self.files.train)

    def listing(self) -> Listing:
        """The training files with their sizes in bytes, as `list_source` lists files."""
        if self.known is None:
            return list_source(self.files.train)
        sizes = [self.known.files.sizes[file] for file in self.known.files.train]
        return Listing(tuple(map(entry_of, self.files.train, sizes)), ())

    def training_files(self) -> Generator[Path, None, None]:
        """Downloads the training files in order. After the first one, a thread downloads up to two files ahead.

        Yields:
            Each file, once it is whole.

        Raises:
            OSError: A file cannot be downloaded; the message says what to do.
        """
        if self.known is None:
            yield from self.files.train
            return
        own = replace(self.known, files=replace(self.known.files, val=()))
        dropped, at = threading.Event(), ""

        def progress(file: str, done: int, total: int) -> None:
            nonlocal at
            at = f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB"
            if dropped.is_set():
                raise _Dropped

        def fetched(known: _Known) -> Iterator[Path]:
            for file in known.files.train[1:]:
                yield _download(replace(known, files=replace(known.files, train=(file,))), None, progress).train[0]

        asked = 1
        said = time.monotonic()

        def waiting() -> bool:
            nonlocal said
            if time.monotonic() - said > WAIT_SECONDS:
                said = time.monotonic()
                self.log(f"fetching {self.name}: file {asked + 1:,} of {self.shards:,}, {at}")
            return False

        yield _fetch(self.name, own, 1).train[0]
        later = prefetch_items(fetched(own), ahead=1, give_up=waiting)
        try:
            for path in later:
                yield path
                asked, said = asked + 1, time.monotonic()
        finally:
            dropped.set()
            later.close()


class _Dropped(Exception):
    """Ends a download whose reader has stopped. The part that has arrived is kept."""


def public_data(recipe: Recipe, out: Path, log: Callable[[str], None] = lambda line: None) -> PublicData | None:
    """The files of the recipe's data; None for tinyworld and for a file or a folder.

    Args:
        recipe: Resolved. Its `shards` is the number of training files; None for as many as its tokens need.
        out: The output folder.
        log: Called with a line where a part of the set is enough.

    Raises:
        FileNotFoundError: There is no such file, folder or data set.
        ValueError: The set is for fine-tuning, or has no such config or split.
        OSError: A file cannot be downloaded or listed.
    """
    known = _data(recipe, out)
    if known is None:
        return None
    name, available, shards = recipe.data, len(known.files.train), _shards(recipe, known.files)
    if shards < available:
        log(f"{name}: {shards:,} of {available:,} training files are used; --shards N asks for another number")
    known, file_name = _pinned(name, known, log), re.sub(r"[^\w.]+", "-", name)
    used = known.files.train[:shards]
    if known.files.kind != "documents" or not all(map(known.files.sha256.get, used)):
        return PublicData(file_name, _fetch(name, known, shards), available)
    files = replace(_fetch(name, known, 0), train=tuple(known.folder / "train" / file for file in used))
    digests = {path: known.files.sha256[file] for path, file in zip(files.train, used, strict=True)}
    known = replace(known, files=replace(known.files, train=used))
    return PublicData(file_name, files, available, digests, known, log)


def shards_used(recipe: Recipe, out: Path) -> int | None:
    """The number of training files of a public data set that the recipe's run reads; None for other data. Raises as
    `public_data`; it downloads nothing but the list of a repository's files."""
    known = _data(recipe, out)
    return None if known is None else _shards(recipe, known.files)


def with_shards(recipe: Recipe, public: PublicData | None) -> Recipe:
    """The recipe with the number of files that its run reads, so that a longer run reads the same text."""
    return recipe if public is None else replace(recipe, shards=public.shards)


def _data(recipe: Recipe, out: Path) -> _Known | None:
    name = recipe.data
    if name == "tinyworld" or Path(name).exists() or name.endswith(".bin"):
        return None
    if not name.startswith(PREFIX) and name not in data_sets.DATASETS:
        raise FileNotFoundError(
            f"--data {name}: there is no such file, folder or data set; use tinyworld, a path, one of "
            f"{', '.join(key for key, known in data_sets.DATASETS.items() if known.kind in FOR_DATA)}, or "
            "hf:OWNER/NAME for one of the Hugging Face Hub"
        )
    known = _find(name, out, recipe.text.split, "documents")
    if known.files.kind not in FOR_DATA:
        raise ValueError(
            f"--data {name}: the set holds {known.files.kind} to fine-tune on, no text: give it to --conversations"
        )
    return known if recipe.val is None else replace(known, files=replace(known.files, val=()))


def _shards(recipe: Recipe, files: DataSet) -> int:
    """The number of training files: those asked for, or as many as the run's tokens need by the set's estimate."""
    assert recipe.train.steps and recipe.train.batch_tokens and files.file_tokens
    needed = math.ceil(recipe.train.steps * recipe.train.batch_tokens / files.file_tokens)
    return min(len(files.train), recipe.shards or needed)


def fetch_conversations(asked: ConversationSource, out: Path) -> hub.Fetched:
    """The files of a public set of conversations or questions; of those, as many as `limit` needs.

    Raises:
        ValueError, OSError: As `public_data`.
    """
    known = _find(asked.source, out, asked.split, "conversations")
    shards = None
    if asked.limit is not None and known.files.file_rows:
        shards = math.ceil(asked.limit / known.files.file_rows)
    return _fetch(asked.source, known, shards)


def fetch_tests(names: Iterable[str], out: Path) -> Path:
    """Downloads the test files of question sets by name. Returns the folder that holds them all.

    Raises:
        OSError: A file cannot be downloaded; the message says what to do.
    """
    try:
        for name in names:
            _fetch(name, _find(name, out, "test", "conversations"), 0)
    except OSError as error:
        raise OSError(f"{error}; or name a folder with the files of the tests with --chat-data") from error
    return out / "downloads"


def _fetch(name: str, known: _Known, shards: int | None) -> hub.Fetched:
    with Meter(f"fetching {name}", None, "MB of this file") as meter:
        return _download(known, shards, lambda file, done, total: meter.at(done / 1e6, file), meter.log)


def _download(
    known: _Known, shards: int | None, progress: hub.Progress, log: Callable[[str], None] = lambda line: None
) -> hub.Fetched:
    return hub.fetch(
        known.files,
        known.folder,
        progress,
        shards=shards,
        endpoint=_endpoint(),
        headers=known.headers,
        log=log,
    )


def _find(name: str, out: Path, split: str, kind: Literal["documents", "conversations"]) -> _Known:
    if not name.startswith(PREFIX):
        return _Known(data_sets.DATASETS[name], out / "downloads" / name, {})
    parsed = HubName.parse(name)
    set_child_env(QUIET_HUB)
    folder = out / "downloads" / parsed.folder
    files = data_set(_listed(parsed, folder), parsed, split, kind)
    if kind == "conversations":  # the first of them are held out, as of every other source without a split for it
        files = replace(files, val=())
    return _Known(files, folder, hub.hub_headers())


def _pinned(name: str, known: _Known, log: Callable[[str], None]) -> _Known:
    """A set of text that quern knows by name, at the commit that its repository had when it was first asked for."""
    listing, here = known.folder / LISTING, known.folder / "train"
    if name not in data_sets.DATASETS or known.files.kind != "documents" or here.exists() and not listing.exists():
        return known
    try:
        set_child_env(QUIET_HUB)
        return replace(known, files=pinned(known.files, _listed(repository_of(known.files), known.folder)))
    except OSError as error:
        log(f"{name}: all of its files are downloaded before they are read, since {error}")
        return known


def _listed(name: HubName, folder: Path) -> Repository:
    """The list of a repository's files, asked for once."""
    path = folder / LISTING
    if path.exists():
        return read_json(path, Repository, "remove it, and the files are listed again")
    listed = hub.list_repository(name, _endpoint())
    write_whole(path, json.dumps(asdict(listed), indent=1))
    return listed


def _endpoint() -> str:
    return (environment().get("HF_ENDPOINT") or data_sets.HUGGING_FACE).rstrip("/")
