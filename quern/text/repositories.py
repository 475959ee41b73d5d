"""Data sets by name: those of data_sets.toml, which explains the fields, and any of the Hugging Face Hub.

Which files of a repository are the training and the validation text is decided by the rules of Hugging Face's library
`datasets`, for files alone (docs/data.md). They hold for a local copy of a repository too. downloads.py lists and
downloads.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NotRequired, TypedDict

import yaml

from quern.records import typed
from quern.text.readers import FORMATS, format_of
from quern.text.sources import Listing

PREFIX = "hf:"
_NAME = re.compile(r"hf:(?P<repository>[\w.-]+/[\w.-]+)(?::(?P<config>[^@]+))?(?:@(?P<revision>\S+))?")
READ = tuple(name for name in FORMATS if name != ".md")
TRAIN = "train"
WORDS: Mapping[str, tuple[str, ...]] = {
    TRAIN: (TRAIN, "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval"),
}
"""The names under which a split is known."""
_NAMED = {word: re.compile(rf"(?:^|/)(?:{'|'.join(its)})(?![a-z])") for word, its in WORDS.items()}
"""The beginning of the name of a file or folder of each split."""
CARD = "README.md"
DESCRIPTIONS = ("dataset_infos.json", "dataset_info.json")
PLAIN_BYTES = {".parquet": 2.0, ".gz": 3.0, ".zst": 3.0}  # bytes of text in a byte of a compressed file, an estimate
BYTES_PER_TOKEN = 4  # an estimate, where no tokenizer has counted
SHOWN = 12


@dataclass(frozen=True)
class DataSet:
    """The files of a data set of the Hugging Face Hub."""

    repository: str
    train: tuple[str, ...]  # the training files, in reading order
    val: tuple[str, ...]  # the files for validation; of conversations and questions in data_sets.toml, the test split
    folder: str = ""  # the folder that holds them there; "" for the root
    kind: Literal["documents", "conversations", "questions", "tests", "tokens"] = "documents"
    file_tokens: int = 0  # tokens in a training file
    file_rows: int = 0  # rows in a training file
    tokenizer: tuple[str, str] | None = None

    def path(self, file: str) -> str:
        """The path of a file in the repository."""
        return f"{self.folder}/{file}".lstrip("/")


def _read(path: Path) -> dict[str, DataSet]:
    tables: dict[str, dict[str, Any]] = tomllib.loads(path.read_text(encoding="utf-8"))
    for table in tables.values():
        match table["train"]:
            case [template, int(count), int(first)]:
                table["train"] = [template.format(number) for number in range(first, first + count)]
    return typed(tables, dict[str, DataSet])


DATASETS: Mapping[str, DataSet] = MappingProxyType(_read(Path(__file__).with_name("data_sets.toml")))


@dataclass(frozen=True)
class HubName:
    """hf:OWNER/NAME[:CONFIG][@REVISION]. config, revision: "" for the default ones."""

    repository: str
    config: str = ""
    revision: str = ""

    @staticmethod
    def parse(text: str) -> HubName:
        """Raises ValueError for a text of another form."""
        match = _NAME.fullmatch(text)
        if match is None:
            raise ValueError(f"{text}: a data set of the Hugging Face Hub is named hf:OWNER/NAME[:CONFIG][@REVISION]")
        return HubName(**{key: value or "" for key, value in match.groupdict().items()})

    def __str__(self) -> str:
        config = f":{self.config}" if self.config else ""
        return f"{PREFIX}{self.repository}{config}{f'@{self.revision}' if self.revision else ''}"

    @property
    def folder(self) -> str:
        """A name for its folder."""
        digest = hashlib.sha256(str(self).encode("utf-8")).hexdigest()[:8]
        return f"{re.sub(r'[^A-Za-z0-9.]+', '-', str(self))}-{digest}"


@dataclass(frozen=True)
class Repository:
    """The files of a data set at one commit."""

    name: str
    commit: str
    files: Mapping[str, tuple[int, str | None]]  # path → size in bytes, and SHA-256 in hex if the server states it
    configs: Sequence[Any] = ()  # the list `configs` of the card, as parsed from its YAML


def data_set(repository: Repository, name: HubName, split: str, kind: Literal["documents", "conversations"]) -> DataSet:
    """The files of a split; for documents, also files of the validation split where another one is asked for. Raises
    ValueError, which lists what there is, if there is no such config or split, or no file that quern reads."""
    splits = {key: files for key, files in _splits(repository, name, split).items() if files}
    train = _of(splits, split)
    if not train:
        raise ValueError(f"{name} has no split '{split}': its splits are {_list(splits) or 'none'}")
    # Of conversations the first are held out, as of every other source without a split for it.
    its_val = _of(splits, "validation") if kind == "documents" else ()
    val = tuple(file for file in its_val if file not in train)
    size = sum(PLAIN_BYTES.get(f".{file.rpartition('.')[2]}", 1.0) * repository.files[file][0] for file in train)
    tokens = max(1, round(size / BYTES_PER_TOKEN / len(train)))
    return DataSet(name.repository, train, val, kind=kind, file_tokens=tokens)


class _DataFiles(TypedDict):
    split: Any
    path: str | list[str]


class _Config(TypedDict):
    """The parts of a card's entry in `configs` that are read."""

    config_name: NotRequired[Any]
    data_files: NotRequired[str | list[str | _DataFiles]]


class _Copy(HubName):
    """A folder that is a copy of a repository, as messages name it."""

    def __str__(self) -> str:
        return self.repository


def local_copy(
    folder: Path, listing: Listing, split: str, kind: Literal["documents", "conversations"], log: Callable[[str], None]
) -> tuple[list[Path], list[Path]] | None:
    """The files of a split and of the validation split of a folder's listing, as `data_set` chooses them; None for
    another folder, or a file.

    A copy of a repository has a card with a list of splits or features, or training files beside those of another split
    or beside a card alone.

    Raises:
        ValueError: The errors of `data_set`, or the card is damaged.
    """
    if not folder.is_dir():
        return None
    found = {entry.path.relative_to(folder).as_posix(): entry.size for entry in listing.read}
    files = {file: (size, None) for file, size in found.items() if format_of(Path(file)) in READ}
    card = (folder / CARD).read_text(encoding="utf-8", errors="replace") if (folder / CARD).is_file() else ""
    head = "".join(re.findall(r"\A---\s*\n(.*?)^---", card, re.DOTALL | re.MULTILINE))
    keys = re.findall(r"^(configs|dataset_info):", head, re.MULTILINE)
    named = [{word for word, its in _NAMED.items() if its.search(file.lower())} for file in files]
    splits = set().union(*named)
    if not files or not keys and not (TRAIN in splits and (len(splits) > 1 or card and all(named))):
        return None
    try:
        configs = yaml.safe_load(head)["configs"] or () if "configs" in keys else ()
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{folder / CARD} is damaged ({reason}): correct it, or name the files") from error
    chosen = data_set(Repository(str(folder), "", files, configs), _Copy(str(folder)), split, kind)
    others = len(found) - len(chosen.train) - len(chosen.val)
    log(
        f"{folder} is laid out as a data set of the Hugging Face Hub: '{split}' is {len(chosen.train):,} of its files, "
        f"validation {len(chosen.val):,}, and {others:,} are not read; name files to read others"
    )
    return [folder / file for file in chosen.train], [folder / file for file in chosen.val]


def _of(splits: Mapping[str, tuple[str, ...]], split: str) -> tuple[str, ...]:
    return next((splits[word] for word in WORDS.get(split, (split,)) if word in splits), ())


def _splits(repository: Repository, name: HubName, split: str) -> dict[str, tuple[str, ...]]:
    readable = _readable(repository, name)
    try:
        typed(repository.configs, Sequence[_Config])
    except ValueError as error:
        raise ValueError(f"{name}: its card is malformed ({error}): correct {CARD} in a copy, or name files") from error
    configs = {str(one["config_name"]): one for one in repository.configs if "config_name" in one}
    if not configs:
        found = _matching(readable, [f"{name.config}/**", f"data/{name.config}/**"]) if name.config else readable
        if not found:
            folders = _list(sorted({file.rpartition("/")[0] for file in readable} - {""}))
            raise ValueError(f"{name}: there is no config or folder '{name.config}'; the folders are {folders}")
        return _by_words(_best(found), split)
    default = [key for key, one in configs.items() if one.get("default") or key == "default"]
    chosen = name.config or (default or list(configs))[0]
    if chosen not in configs or not (name.config or default or len(configs) == 1):
        one, example = f"one of its configs, {_list(configs)}", replace(name, config=next(iter(configs)))
        instead = f"the files of {one}" if isinstance(name, _Copy) else f"{one}, as {example}"
        raise ValueError(f"{name}: name {instead}")
    body = configs[chosen]
    listed = body.get("data_files")
    if listed is None:
        folder = str(body.get("data_dir") or "").rstrip("/")
        return _by_words(_best(_matching(readable, f"{folder}/**") if folder else readable), split)
    if isinstance(listed, str) or all(isinstance(one, str) for one in listed):
        return {TRAIN: _best(_matching(readable, listed))}
    return {str(one["split"]): _best(_matching(readable, one["path"])) for one in listed}


def _readable(repository: Repository, name: HubName) -> tuple[str, ...]:
    """The files that quern reads, apart from descriptions."""
    safe = (file for file in repository.files if ".." not in file.split("/") and not file.startswith("/"))
    plain = sorted(file for file in safe if file.rpartition("/")[2] not in DESCRIPTIONS)
    if found := tuple(file for file in plain if format_of(Path(file)) in READ):
        return found
    converted = replace(name, revision="refs/convert/parquet")
    hint = "" if isinstance(name, _Copy) else f": many data sets have a copy in Parquet, at {converted}"
    raise ValueError(f"{name} has no file that ends in {' '.join(READ)}{hint}")


def _best(files: Sequence[str]) -> tuple[str, ...]:
    """The files of the best format among them."""
    kinds = ((".parquet",), (".jsonl",), READ)
    found = (tuple(file for file in files if format_of(Path(file)) in kind) for kind in kinds)
    return next(filter(None, found), ())


def _by_words(files: Iterable[str], split: str) -> dict[str, tuple[str, ...]]:
    """The split of each file by the last such word in its path; files without one are for training if all are."""
    words = sorted({split, *(word for known in WORDS.values() for word in known)}, key=len, reverse=True)
    pattern = re.compile(rf"(?<![a-z])({'|'.join(map(re.escape, words))})(?![a-z])")
    found: dict[str, list[str]] = {}
    for file in files:
        word = (pattern.findall(file.lower()) or [""])[-1]
        known = word if word == split else next((key for key, its in WORDS.items() if word in its), "")
        found.setdefault(known, []).append(file)
    unnamed = found.pop("", [])
    return {key: tuple(its) for key, its in (found or {TRAIN: unnamed}).items()}


def _matching(files: Sequence[str], patterns: str | Iterable[str]) -> tuple[str, ...]:
    """The files that a pattern names: `*` is within a folder, `**` crosses folders, a folder's name is all in it."""
    from fsspec.utils import glob_translate

    plain = [pattern.removeprefix("./") for pattern in ([patterns] if isinstance(patterns, str) else patterns)]
    whole = re.compile("|".join(glob_translate(form) for pattern in plain for form in (pattern, f"{pattern}/**")))
    return tuple(file for file in files if whole.match(file))


def _list(names: Iterable[str]) -> str:
    found = list(names)
    return ", ".join(found[:SHOWN]) + (f" and {len(found) - SHOWN} more" if len(found) > SHOWN else "")
