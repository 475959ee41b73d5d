"""Lists the files of a source: which are read, in which order, and which are ignored; and fingerprints their contents.

A source is a file, a folder with all its subfolders, or several of these. Names that begin with a dot are skipped.
Links are followed. No file or folder is listed twice, even if several links lead to it or a link leads to a parent of
the source. Sizes are in bytes on disk. readers.py opens the files.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from quern.records import read_json
from quern.temporaries import write_whole
from quern.terminal import Meter, human_size
from quern.text.readers import COMPRESSED, CONVERTED, FORMATS, PLAIN, can_convert, format_of, looks_like_text
from quern.validate import install

CODE = tuple(
    f".{ending}"
    for ending in "py pyi js mjs jsx ts tsx c h cc cpp cxx hpp cs java kt go rs rb php swift scala lua pl r jl hs ml "
    "ex erl clj lisp el sh bash ps1 sql css scss vue svelte dart zig nim f90 asm cmake make proto tex rst org adoc "
    "toml yaml yml ini cfg srt vtt".split()
)
"""Endings of code and of other plain text."""
AS_TEXT = {*PLAIN, *CODE, ""} - {".srt", ".vtt"}  # formats whose bytes are the text
DOCUMENTS = (*FORMATS, *CODE, *CONVERTED, "")
"""Formats of texts to train on; "" is a file without an ending that looks like text."""
SKIPPED_FOLDERS = ("node_modules", "__pycache__", "site-packages")
OF_ROWS = (".jsonl", ".json", ".parquet")
OTHER_PROMPTS = "api_compatible_gauntlet"  # a folder of LLM Foundry whose files have the names of others and other rows
KINDS_SHOWN = 8
NO_ENDING = "without an ending"
CLOSED, BROKEN = "without permission", "broken link"
MARKITDOWN = f"papers, books and pages need the extra `documents`: {install('documents')}"
Where = str | Path | Sequence[Path]  # a source
CHUNK_BYTES = 1 << 20
Digest = tuple[int, int, int, Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]]
"""Size, times of change in nanoseconds, and SHA-256 (hex) of a file."""


class Entry(NamedTuple):
    """A file, its size in bytes, and its kind: the extension, or why it has none that counts."""

    path: Path
    size: int
    kind: str


class Listing(NamedTuple):
    """The files of a source in reading order, and the ignored files."""

    read: tuple[Entry, ...]
    ignored: tuple[Entry, ...]

    @property
    def files(self) -> list[Path]:
        return [entry.path for entry in self.read]

    def without(self, other: Listing) -> Listing:
        """Returns the listing without the files that `other`, the validation text, reads; they count as ignored. Raises
        FileNotFoundError if no file is left."""
        theirs = {os.path.realpath(path) for path in other.files}
        left, taken = list[Entry](), list[Entry]()
        for entry in self.read:
            (taken if os.path.realpath(entry.path) in theirs else left).append(entry)
        if not left:
            raise FileNotFoundError("every file of --data is also in --val, so none is left to train on: name others")
        return Listing(tuple(left), (*self.ignored, *taken))

    def lines(self, what: str) -> list[str]:
        """Lines for the user about read and ignored files, each starting with `what`."""
        lines = [f"{what}: reading {_counts(self.read)}"]
        if self.ignored:
            lines.append(f"{what}: ignoring {_counts(self.ignored)}{_needs(self.ignored)}")
        return lines


def list_source(
    source: Where,
    formats: Sequence[str] = FORMATS,
    include: str | None = None,
    exclude: str | None = None,
    apart: Path | None = None,
) -> Listing:
    """Lists a source.

    Args:
        source: A file, a folder, or several of these.
        formats: The extensions to read, without the one of a compression.
        include: Patterns, separated by spaces, of which a file of a folder must match one, by its name or its path in
            the folder. None includes all.
        exclude: Patterns of files of a folder that are ignored.
        apart: A folder that is never listed: the outputs' folder, which may be in the source.

    Returns:
        The files to read, sorted by their path in the source, and the ignored ones.

    Raises:
        FileNotFoundError: There is no such file or folder, or it has no file of these formats.
        ValueError: The source is a file of another format, or the root of the file system.
    """
    if not isinstance(source, str | Path):
        own = [one for one in source if len(source) == 1 or apart is None or one.resolve() != apart.resolve()]
        return _joined([list_source(one, formats, include, exclude, apart) for one in own])
    source = Path(source)
    if source.is_file():
        entry = Entry(source, source.stat().st_size, _kind(source))
        if not _is_read(entry, formats, named=True):
            instead = f"its name must end in {_accepted(formats)}{_needs([entry])}"
            if "" in formats and format_of(source) == ".rtf":
                instead = "save it as .docx, .html or .txt"
            raise ValueError(f"cannot read {source}: {instead}")
        return Listing((entry,), ())
    if not source.is_dir():
        piped = ", or give --data -" if "" in formats else ""
        other = f", but a pipe or a device: copy it to a file{piped}" if source.exists() else ""
        raise FileNotFoundError(f"there is no file or folder {source}{other}")
    if not source.resolve().parents:
        raise ValueError(f"{source} holds the whole system: name the folder of the texts in it")

    def chosen(entry: Entry) -> bool:
        inside = entry.path.relative_to(source)
        left_out = exclude is not None and _matches(inside, exclude)
        left_out |= bool({*SKIPPED_FOLDERS} & {*inside.parts}) if include is None else not _matches(inside, include)
        return not left_out and _is_read(entry, formats, named=include is not None)

    read, ignored = list[Entry](), list[Entry]()
    for entry in sorted(_walk(source, apart), key=lambda entry: entry.path.relative_to(source).as_posix()):
        (read if chosen(entry) else ignored).append(entry)
    if not read:
        there_are = f" (it holds {_counts(ignored)})" if ignored else ""
        matches = f" and matches {include}" if include else ""
        matches += f" and does not match --data.exclude {exclude}" if exclude else ""
        raise FileNotFoundError(
            f"nothing to read in {source}{there_are}: no file ends in {_accepted(formats)}{matches}{_needs(ignored)}"
        )
    return Listing(tuple(read), tuple(ignored))


def _joined(listings: Sequence[Listing]) -> Listing:
    """The files of several listings, each once, though named twice."""
    read = {os.path.realpath(entry.path): entry for one in listings for entry in one.read}
    ignored = {os.path.realpath(entry.path): entry for one in listings for entry in one.ignored}
    return Listing(tuple(read.values()), tuple(entry for path, entry in ignored.items() if path not in read))


def list_talks(source: Where, apart: Path | None = None) -> Listing:
    """Lists a source of conversations: rows and tables, and a .txt that is named itself. Otherwise as `list_source`."""
    alone = isinstance(source, str | Path) and Path(source).is_file()
    return list_source(source, (*OF_ROWS, ".csv", ".tsv", *([".txt"] if alone else [])), apart=apart)


def find_file(folder: Path, *stems: str, inside: Sequence[str] = ()) -> Path | None:
    """Finds a file of rows (.jsonl, .json, .parquet) by its name, anywhere in a folder.

    Args:
        folder: Upper case counts as lower case in it, and "-" as "_".
        stems: The names that the file may have, without the ending.
        inside: Names of folders in which every file that begins with "test" counts.

    Raises FileNotFoundError as `list_source`, ValueError if several files have such a name.
    """
    found = []
    for path in list_source(folder, OF_ROWS).files:
        *parents, file = path.relative_to(folder.parent).as_posix().lower().replace("-", "_").split("/")
        stem = file.partition(format_of(path))[0]
        fits = stem in stems or stem.startswith("test") and any(parent in inside for parent in parents)
        if fits and OTHER_PROMPTS not in parents:
            found.append(path)
    if len(found) > 1:
        shown = ", ".join(map(str, found[:3])) + (", …" if len(found) > 3 else "")
        raise ValueError(f"{stems[0]} has several files, leave one: {shown}")
    return found[0] if found else None


def files(source: Where) -> list[Path]:
    """The files of a source of texts in reading order; raises as `list_source`."""
    return list_source(source, DOCUMENTS).files


def _is_read(entry: Entry, formats: Sequence[str], named: bool) -> bool:
    """Whether a file is read. named: the user's command names it, or a pattern of the command does."""
    form, plain = format_of(entry.path), entry.kind == NO_ENDING
    if not plain and not entry.kind.startswith("."):
        return False
    if form and form in formats:
        return form not in CONVERTED or can_convert()
    unknown = named and form not in (*CONVERTED, ".rtf", "")
    return "" in formats and (plain or unknown) and looks_like_text(entry.path)


def _needs(entries: Iterable[Entry]) -> str:
    """The end of a message about files that are not read: the extra that would read some of them."""
    return f"; {MARKITDOWN}" if not can_convert() and any(format_of(one.path) in CONVERTED for one in entries) else ""


def _matches(inside: Path, patterns: str) -> bool:
    return any(fnmatch(inside.as_posix(), one) or fnmatch(inside.name, one) for one in patterns.split())


def _walk(root: Path, apart: Path | None) -> Iterator[Entry]:
    """Every file below `root` once. Links come last, so that a file is listed under its own name if possible."""
    seen = {_identity(folder.stat()) for folder in root.resolve().parents}
    if apart is not None and apart.exists():
        seen.add(_identity(apart.stat()))
    folders, links = [root], []
    while folders or links:
        path = (folders or links).pop()
        try:
            info = path.stat()
            is_new = _identity(info) not in seen
            inside = list(os.scandir(path)) if is_new and stat.S_ISDIR(info.st_mode) else None
        except OSError as error:
            closed = path != root and isinstance(error, PermissionError)  # such as lost+found
            if not closed and not path.is_symlink():
                raise
            yield Entry(path, 0, CLOSED if closed else BROKEN)
            continue
        seen.add(_identity(info))
        if inside is not None:
            for entry in sorted(inside, key=lambda entry: entry.name, reverse=True):
                if not entry.name.startswith("."):
                    (links if entry.is_symlink() else folders).append(Path(entry.path))
        elif is_new:
            yield Entry(path, info.st_size, _kind(path) if stat.S_ISREG(info.st_mode) else "no regular file")


def _identity(info: os.stat_result) -> tuple[int, int]:
    return info.st_dev, info.st_ino


def _kind(path: Path) -> str:
    name = path.name.lower()
    compressed = next((ending for ending in COMPRESSED if name.endswith(ending)), "")
    return Path(name.removesuffix(compressed)).suffix + compressed or NO_ENDING


def _counts(entries: Iterable[Entry]) -> str:
    """Such as "notes.txt (300 B), 50 .md (1.2 MB)", the largest kinds first."""
    kinds: dict[str, list[Entry]] = {}
    for entry in entries:
        kinds.setdefault(entry.kind, []).append(entry)
    ranked = sorted(kinds.items(), key=lambda item: -sum(entry.size for entry in item[1]))
    shown = list[str]()
    for kind, members in ranked[:KINDS_SHOWN]:
        alone, size = len(members) == 1, human_size(sum(entry.size for entry in members))
        name = members[0].path.name if alone else f"{len(members):,} {kind}"
        shown.append(f"{name} ({kind if alone and kind in (CLOSED, BROKEN) else size})")
    more = sum(len(members) for _, members in ranked[KINDS_SHOWN:])
    return ", ".join([*shown, f"{more:,} more"] if more else shown)


def _accepted(formats: Sequence[str]) -> str:
    plain = " ".join(name for name in formats if name not in (".parquet", "", *CODE, *CONVERTED))
    more = ", an ending of code or of plain text" if "" in formats else ""
    return f"{plain} (also compressed, such as {formats[0]}.gz or {formats[0]}.zst) or .parquet{more}"


def content_fingerprint(entries: Sequence[Entry], out: Path, what: str) -> str:
    """Hashes the contents of files in the given order; names, paths and times do not matter.

    Args:
        out: The output folder, with a JSON file of known digests, path → `Digest`. A file is hashed again when its size
            or a time differs. A damaged cache is made again, and deleted files are dropped from it.
        what: The files, for the progress bar.

    Returns SHA-256 (hex) over the SHA-256 of each file.
    """
    cache = out / "data" / "digests.json"
    try:
        known = read_json(cache, dict[str, Digest])
    except (FileNotFoundError, ValueError):
        known = dict[str, Digest]()
    kept = {name: entry for name, entry in known.items() if os.path.exists(name)}
    done, whole = 0, hashlib.sha256()
    with Meter(f"looking for changes in the {what}", sum(entry.size for entry in entries) / 1e6, "MB") as meter:
        for path in (entry.path for entry in entries):
            info, name = path.stat(), str(path.resolve())
            mark = (info.st_size, info.st_mtime_ns, info.st_ctime_ns)
            if name not in kept or kept[name][:3] != mark:
                digest = hashlib.sha256()
                try:
                    with open(path, "rb") as file:
                        while chunk := file.read(CHUNK_BYTES):
                            digest.update(chunk)
                            done += len(chunk)
                            meter.at(done / 1e6)
                except OSError:
                    whole.update(b"unreadable")  # whoever reads the file skips or refuses it
                    continue
                kept[name] = (*mark, digest.hexdigest())
            whole.update(bytes.fromhex(kept[name][3]))
    if kept != known:
        write_whole(cache, json.dumps(kept, indent=1))
    return whole.hexdigest()
