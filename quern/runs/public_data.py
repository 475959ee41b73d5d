"""Public data sets of a run: a name → local files in out/downloads/NAME/{train,val}, downloaded unless they are there.

A name is one of text/data_sets.toml, or hf:OWNER/NAME[:CONFIG][@REVISION] for any data set of the Hugging Face Hub. The
files of its repository are listed once: the list, with its commit, is kept in the folder, so a run that is continued
reads the same text although the repository has changed. The validation files do not depend on the number of training
files, so scores stay comparable.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from quern.recipe import ConversationSource, Made, Recipe, Resolved
from quern.records import read_json
from quern.temporaries import alone_in, sha256_of, whole_file, write_whole
from quern.terminal import Meter, silent
from quern.text import downloads, repositories
from quern.text.repositories import PREFIX, DataSet, HubName, Repository, data_set
from quern.validate import data_paths

LISTING = "listing.json"
FOR_DATA = ("documents", "tokens")
"""Kinds of sets to pretrain on."""

Log = Callable[[str], None]


@dataclass(frozen=True)
class _Known:
    """A data set, the listing of its repository, and its folder."""

    files: DataSet
    listed: Repository
    folder: Path

    @property
    def tokenizer(self) -> Path | None:
        """The local file of the vocabulary of tokens."""
        return self.files.tokenizer and self.folder / self.files.tokenizer[0].rpartition("/")[2]

    def fetch(self, name: str, shards: int | None) -> dict[str, tuple[Path, ...]]:
        """Downloads the files for validation, the first `shards` for training and the vocabulary, unless they are
        there; one process at a time does, and the others wait. Returns the local files of "train", then of "val"."""
        names = {"train": self.files.train[:shards], "val": self.files.val}
        found = {split: tuple(self.folder / split / file for file in files) for split, files in names.items()}
        with Meter(f"fetching {name}", None, "MB of this file") as meter, alone_in(self.folder, meter.log):

            def advance(file: str, done: int) -> None:
                meter.at(done / 1e6, file)

            if self.files.tokenizer and self.tokenizer:
                downloads.retrieve(*self.files.tokenizer, self.tokenizer, advance)
            for split in ("val", "train"):
                for file, path in zip(names[split], found[split], strict=True):
                    downloads.download(self.listed, self.files.path(file), path, advance)
        return found


@dataclass(frozen=True)
class PublicData:
    """The files of a public data set that a run reads."""

    name: str  # for file names
    train: tuple[Path, ...]
    val: tuple[Path, ...]
    tokenizer: Path | None  # the vocabulary of tokens
    available: int  # the number of training files that the set has

    @property
    def shards(self) -> int:
        return len(self.train)


def public_data(recipe: Resolved, out: Path, log: Log = silent) -> PublicData | None:
    """The files of the recipe's data; None for tinyworld and for a file or a folder.

    Args:
        recipe: Its `shards` is the number of training files; None for as many as its tokens need.
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
    fetched = known.fetch(name, shards)
    return PublicData(re.sub(r"[^\w.]+", "-", name), **fetched, tokenizer=known.tokenizer, available=available)


def with_local_data(recipe: Recipe, out: Path, arguments: Sequence[str], log: Log) -> Recipe:
    """The recipe with paths in the place of standard input ("-") and of addresses (http, https) in its data.

    Args:
        out: The output folder: the files are kept below it.
        arguments: The command line. With --ranks, --nodes or --processes, standard input cannot be read.
        log: Called with the SHA-256 of each file.

    Raises:
        ValueError: Standard input is a terminal, or empty, or several ranks would read it.
        OSError: A file cannot be downloaded.
    """

    def local(name: str) -> str:
        if name == "-" and any(word.startswith(("--ranks", "--nodes", "--processes")) for word in arguments):
            raise ValueError("--data - can be read by one process: save the text in a file for several")
        if name == "-":
            return str(_kept_input(out / "downloads" / "stdin", log))
        if not re.match(r"https?://", name):
            return name
        stem = re.sub(r"[^\w.]+", "-", urlsplit(name).path.rpartition("/")[2])
        folder = out / "downloads" / hashlib.sha256(name.encode()).hexdigest()[:16]
        path = folder / (stem if Path(stem).suffix else f"{stem or 'page'}.txt")
        known = path.exists()
        with Meter(f"fetching {name}", None, "MB") as meter, alone_in(folder, log):
            downloads.retrieve(name, None, path, lambda file, done: meter.at(done / 1e6, file))
        log(f"{name}: {'kept in' if known else 'saved in'} {path}, SHA-256 {sha256_of(path)}")
        return str(path)

    return replace(recipe, data="\n".join(map(local, recipe.data.split("\n"))))


@cache
def _kept_input(folder: Path, log: Log) -> Path:
    """Writes standard input, which is read once, to a file that is named by its contents."""
    if sys.stdin is None or sys.stdin.isatty() or not (content := sys.stdin.buffer.read()):
        raise ValueError("--data -: nothing is piped in; give text, as in cat texts/*.txt | quern run --data -")
    digest = hashlib.sha256(content).hexdigest()
    path = folder / f"{digest[:16]}.txt"
    with whole_file(path) as temporary:
        temporary.write_bytes(content)
    log(f"standard input: saved in {path}, SHA-256 {digest}")
    return path


def shards_used(recipe: Resolved, out: Path) -> int | None:
    """The number of training files of a public data set that the recipe's run reads; None for other data."""
    known = _data(recipe, out)
    return None if known is None else _shards(recipe, known.files)


def with_shards(recipe: Made, public: PublicData | None) -> Made:
    """The recipe with the number of files that its run reads, so that a longer run reads the same text."""
    return recipe if public is None else replace(recipe, shards=public.shards)


def name_of_set(data: str) -> str | None:
    """The public data set that a recipe's `data` names; None for tinyworld and for files.

    Raises:
        FileNotFoundError: There is no such file, folder or data set.
        ValueError: The set is for fine-tuning, or is one of several names.
    """
    if data == "tinyworld" or data_paths(data):
        return None
    names = data.split("\n")
    name = next(one for one in names if not data_paths(one))
    known = name.startswith(PREFIX) or name in repositories.DATASETS
    if len(names) > 1 and (known or name == "tinyworld"):
        raise ValueError(f"--data {name}: a data set is read alone, without files or other sets: leave the others out")
    if not known:
        raise FileNotFoundError(
            f"--data {name}: there is no such file, folder or data set; use tinyworld, a path, one of "
            f"{', '.join(key for key, known in repositories.DATASETS.items() if known.kind in FOR_DATA)}, or "
            "hf:OWNER/NAME for one of the Hugging Face Hub"
        )
    if name in repositories.DATASETS and repositories.DATASETS[name].kind not in FOR_DATA:
        raise ValueError(
            f"--data {name}: the set holds {repositories.DATASETS[name].kind} to fine-tune on, no text: give it to "
            "--conversations"
        )
    return name


def _data(recipe: Resolved, out: Path) -> _Known | None:
    name = name_of_set(recipe.data)
    if name is None:
        return None
    known = _find(name, out, recipe.text.split, "documents")
    return known if recipe.val is None else replace(known, files=replace(known.files, val=()))


def _shards(recipe: Resolved, files: DataSet) -> int:
    """The number of training files: those asked for, or as many as the run's tokens need by the set's estimate."""
    assert files.file_tokens
    needed = math.ceil(recipe.train.steps * recipe.train.batch_tokens / files.file_tokens)
    return min(len(files.train), recipe.shards or needed)


def fetch_conversations(asked: ConversationSource, out: Path) -> dict[str, tuple[Path, ...]]:
    """The files of each split, "train" and "val", of a public set of conversations or questions; of training files, as
    many as `limit` needs. Raises as `public_data`."""
    known = _find(asked.source, out, asked.split, "conversations")
    rows = known.files.file_rows
    return known.fetch(asked.source, math.ceil(asked.limit / rows) if asked.limit is not None and rows else None)


def fetch_tests(names: Iterable[str], out: Path) -> Path:
    """Downloads the test files of question sets by name. Returns the folder that has a folder NAME for each. Raises
    OSError, which says what to do, if one cannot be downloaded."""
    try:
        for name in names:
            _find(name, out, "test", "conversations").fetch(name, shards=0)
    except OSError as error:
        raise OSError(f"{error}; or name a folder with the files of the tests with --chat-data") from error
    return out / "downloads"


def _find(name: str, out: Path, split: str, kind: Literal["documents", "conversations"]) -> _Known:
    files = repositories.DATASETS.get(name)
    asked = HubName.parse(name) if files is None else HubName(files.repository)
    folder = out / "downloads" / (asked.folder if files is None else name)
    path = folder / LISTING
    if path.exists():
        listed = read_json(path, Repository, "remove it, and the files are listed again")
    else:
        listed = downloads.list_repository(asked)
        write_whole(path, json.dumps(asdict(listed), indent=1))
    if files is None:
        files = data_set(listed, asked, split, kind)
    return _Known(files, listed, folder)
