"""Token files of other programs, both ways: .bin of modded-nanogpt (and llm.c) and of nanoGPT.

    modded-nanogpt   256 int32 (magic 20240520, version 1, token count), then uint16; a delimiter begins each document
    nanoGPT          uint16 alone; a delimiter ends each document

The delimiter is GPT-2's <|endoftext|>, 50256, or the BOS of another vocabulary. Documents of a `Corpus` begin with BOS.
So the delimiter that ends a document of nanoGPT's is read as the beginning of the next one; the first document gets a
BOS of its own, in memory. Sources: data/fineweb.py of github.com/KellerJordan/modded-nanogpt, and
data/openwebtext/prepare.py of github.com/karpathy/nanoGPT.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quern.data.index import ArrayIndex, Spans
from quern.data.mapped import MappedFiles
from quern.data.shards import Corpus
from quern.data.token_file import HEADER_INTS, MAGIC, InMemory, TokenFile, TokenMap, find, map_tokens
from quern.temporaries import TemporaryFolder, remove_abandoned, sync_path

IDS = 1 << 16
"""Ids in these files are below it."""
BATCH_TOKENS = 1 << 22


@dataclass(frozen=True)
class BinFormat:
    """How token files are written.

    Args:
        train, val: Names of the files of a split; {name} is that of the data, {number} that of the file.
        first: The number of the first training file.
        header: The file begins with a header.
        begins: The delimiter begins documents; else it ends them.
        file_tokens: A file is closed as soon as it has this many tokens; None for one file.
    """

    train: str
    val: str
    first: int = 0
    header: bool = True
    begins: bool = True
    file_tokens: int | None = 100_000_000


MODDED_NANOGPT = BinFormat("{name}_train_{number:06d}.bin", "{name}_val_{number:06d}.bin", first=1)
NANOGPT = BinFormat("train.bin", "val.bin", header=False, begins=False, file_tokens=None)


class BinCorpus(Corpus):
    """The documents of token files. skipped_tokens: those that belong to no document."""

    def __init__(self, files: Sequence[TokenFile], spans: Sequence[Spans], bos: int, skipped_tokens: int) -> None:
        """spans: of the documents in each file; starts are counted in the file."""
        bases = np.cumsum([0] + [file.count for file in files])
        starts = np.concatenate([start + base for (start, _), base in zip(spans, bases, strict=False)])
        index = ArrayIndex(starts, np.concatenate([lengths for _, lengths in spans]))
        super().__init__(MappedFiles(files), index, bos)
        self.skipped_tokens = skipped_tokens


class _BinFile:
    """A token file of another program, mapped when it is read."""

    masked = False

    def __init__(self, path: Path, bos: int) -> None:
        tokens = map_tokens(path, headerless=True).tokens
        self.path, self.count, self.found = path, len(tokens), find(tokens, bos)
        self.ends_document = bool(tokens[-1] == bos)
        if not self.found.size:
            raise ValueError(f"{path} never has id {bos}, so no document starts in it; pass its own bos=…")

    def map(self) -> TokenMap:
        return map_tokens(self.path, headerless=True)


def read_bin(*paths: str | Path, bos: int = 50256) -> BinCorpus:
    """Opens the files of one text, in order.

    Documents end with the delimiter if the text ends with it and does not begin with it; else they begin with it, and
    tokens before the first one in a file are skipped: modded-nanogpt cuts a document that a file has no room for.

    Args:
        paths: The files.
        bos: The delimiter.

    Raises:
        FileNotFoundError, ValueError: A file is missing, empty or damaged, or holds no delimiter.
    """
    if not paths:
        raise ValueError("read_bin needs at least one path")
    files = [_BinFile(Path(path), bos) for path in paths]
    if files[0].found[0] != 0 and files[-1].ends_document:
        return _ending(files, bos)
    spans = [(file.found, np.diff(file.found, append=file.count)) for file in files]
    return BinCorpus(files, spans, bos, sum(int(file.found[0]) for file in files))


def _ending(files: list[_BinFile], bos: int) -> BinCorpus:
    """Documents that the delimiter ends. The part of a document that the file before cut off is skipped."""
    parts, spans, skipped, whole = list[TokenFile](), list[Spans](), 0, True
    for file in files:
        first = int(file.found[0])
        if first and whole:
            tokens = file.map().tokens[:first]
            parts.append(InMemory(TokenMap(np.concatenate([np.array([bos], tokens.dtype), tokens]))))
            spans.append((np.zeros(1, np.int64), np.array([first + 1])))
        elif first:
            skipped += first
        whole = file.ends_document
        ends = file.found if whole else np.append(file.found, file.count)
        parts.append(file)
        spans.append((ends[:-1], np.diff(ends)))
    return BinCorpus(parts, spans, bos, skipped)


def write_bin(
    splits: dict[str, Corpus],
    folder: Path,
    name: str,
    form: BinFormat,
    progress: Callable[[int], None] = lambda tokens: None,
) -> list[Path]:
    """Writes token files, all of them or none.

    Args:
        splits: The documents of "train" and "val".
        folder: Where to; created if needed.
        name: The name of the data, for file names.
        form: The format.
        progress: Called with the number of tokens written.

    Returns:
        The files.

    Raises:
        ValueError: An id is too large for these files, or the folder has .bin files already.
        OSError: A file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if there := sorted(folder.glob("*.bin")):
        raise ValueError(f"{there[0]} is there already: name a new folder")
    remove_abandoned(folder)
    temporary = TemporaryFolder(folder / "bin")
    written = 0
    try:
        for split, corpus in splits.items():
            pattern, first = (form.train, form.first) if split == "train" else (form.val, 0)
            for number, documents in enumerate(_files(corpus, form), start=first):
                path = temporary.path / pattern.format(name=name, number=number)
                written += _write_file(
                    path, corpus, documents, form, lambda done, before=written: progress(before + done)
                )
        made = sorted(temporary.path.glob("*.bin"))
        for path in made:
            os.replace(path, folder / path.name)
        sync_path(folder)
    finally:
        temporary.remove()
    return [folder / path.name for path in made]


def _files(corpus: Corpus, form: BinFormat) -> Iterator[slice]:
    """The documents of each file."""
    yield from _groups(corpus, slice(0, corpus.num_documents), form.file_tokens or corpus.num_tokens)


def _groups(corpus: Corpus, documents: slice, tokens: int) -> Iterator[slice]:
    """Consecutive documents, each group closed as soon as it has so many tokens."""
    ends = np.cumsum(corpus.lengths[documents])
    start = 0
    while start < len(ends):
        before = int(ends[start - 1]) if start else 0
        end = min(len(ends), int(np.searchsorted(ends, before + tokens)) + 1)
        yield slice(documents.start + start, documents.start + end)
        start = end


def _write_file(path: Path, corpus: Corpus, documents: slice, form: BinFormat, progress: Callable[[int], None]) -> int:
    """Returns the number of tokens."""
    count = 0
    with open(path, "wb") as file:
        if form.header:
            header = np.zeros(HEADER_INTS, dtype="<i4")
            header[:3] = MAGIC, 1, int(corpus.lengths[documents].sum())
            file.write(header.tobytes())
        for group in _groups(corpus, documents, BATCH_TOKENS):
            starts, lengths = corpus.starts[group], corpus.lengths[group]
            ends = np.cumsum(lengths)
            out = np.empty(int(ends[-1]), dtype=np.int32)
            if form.begins:
                corpus.copy(out, ends - lengths, starts, lengths)
            else:
                corpus.copy(out, ends - lengths, starts + 1, lengths - 1)
                out[ends - 1] = corpus.bos
            if out.max() >= IDS:
                raise ValueError(
                    f"the text has id {out.max():,}, and these files hold ids below {IDS:,}: use another tokenizer"
                )
            file.write(out.astype("<u2").tobytes())
            count += out.size
            progress(count)
    sync_path(path)
    return count
