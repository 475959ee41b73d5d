"""Public data sets of a run: a name → local files under out/downloads/, downloaded unless they are there.

A name is one of text/data_sets.py's, or hf:OWNER/NAME[:CONFIG][@REVISION] for any data set of the Hugging Face Hub. The
files of the latter are listed once: the list, with its commit, is kept in the folder, so a run that is continued reads
the same text although the repository has changed. HF_ENDPOINT names a mirror of the Hub.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from quern.conversation_source import ConversationSource
from quern.machine import environment, set_child_env
from quern.recipe import Recipe
from quern.temporaries import write_whole
from quern.terminal import Meter
from quern.text import data_sets, hub
from quern.text.data_sets import DataSet
from quern.text.repository import PREFIX, HubName, Repository, data_set

LISTING = "listing.json"
FOR_DATA = ("documents", "tokens")
"""Kinds of sets to pretrain on."""


@dataclass(frozen=True)
class PublicData:
    """The files of a public data set that a run reads.

    Args:
        name: For file names.
        files: The local files.
        available: The number of training files that the set has.
    """

    name: str
    files: hub.Fetched
    available: int

    @property
    def shards(self) -> int:
        return len(self.files.train)


@dataclass(frozen=True)
class _Known:
    """A data set, its folder, and what its server is sent."""

    files: DataSet
    folder: Path
    headers: Mapping[str, str]


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
        ImportError: `huggingface_hub` is not installed, for a name of the Hub.
    """
    known = _data(recipe, out)
    if known is None:
        return None
    name, available, shards = recipe.data, len(known.files.train), _shards(recipe, known.files)
    if shards < available:
        log(f"{name}: {shards:,} of {available:,} training files are used; --shards N asks for another number")
    return PublicData(re.sub(r"[^\w.]+", "-", name), _fetch(name, known, shards), available)


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
        ValueError, OSError, ImportError: As `public_data`.
    """
    known = _find(asked.source, out, asked.split, "conversations")
    shards = None
    if asked.limit is not None and known.files.file_rows:
        shards = math.ceil(asked.limit / known.files.file_rows)
    return _fetch(asked.source, known, shards)


def _fetch(name: str, known: _Known, shards: int | None) -> hub.Fetched:
    with Meter(f"fetching {name}", None, "MB of this file") as meter:
        return hub.fetch(
            known.files,
            known.folder,
            lambda file, done, total: meter.at(done / 1e6, file),
            shards=shards,
            endpoint=_endpoint(),
            headers=known.headers,
            log=meter.log,
        )


def _find(name: str, out: Path, split: str, kind: Literal["documents", "conversations"]) -> _Known:
    if not name.startswith(PREFIX):
        return _Known(data_sets.DATASETS[name], out / "downloads" / name, {})
    parsed = HubName.parse(name)
    # The Hub's library reads this when it is imported. Without it, the library asks the Hub for a list of programs, of
    # which it would report this one, and keeps the list in the home folder.
    set_child_env({"HF_HUB_DISABLE_TELEMETRY": "1"})
    folder = out / "downloads" / parsed.folder
    files = data_set(_listed(parsed, folder), parsed, split, kind)
    if kind == "conversations":  # the first of them are held out, as of every other source without a split for it
        files = replace(files, val=())
    return _Known(files, folder, hub.hub_headers(parsed))


def _listed(name: HubName, folder: Path) -> Repository:
    """The list of a repository's files, asked for once."""
    path = folder / LISTING
    if path.exists():
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
            files = {file: (int(size), digest) for file, (size, digest) in body["files"].items()}
            return Repository(body["base"], files, body["configs"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is damaged ({error!r}): remove it, and the files are listed again") from error
    listed = hub.list_repository(name, _endpoint())
    write_whole(path, json.dumps(asdict(listed), indent=1))
    return listed


def _endpoint() -> str:
    return (environment().get("HF_ENDPOINT") or data_sets.HUGGING_FACE).rstrip("/")
