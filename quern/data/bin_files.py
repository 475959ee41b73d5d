"""Token files of other programs, both ways: .bin of modded-nanogpt (and llm.c) and of nanoGPT.

docs/data.md has their layouts. Documents of a `Corpus` begin with BOS, so the delimiter that ends a document of
nanoGPT's is read as the beginning of the next one; the first document gets a BOS of its own, in memory. Sources:
data/fineweb.py of github.com/KellerJordan/modded-nanogpt, data/openwebtext/prepare.py of github.com/karpathy/nanoGPT.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quern.data.shards import Corpus, Part
from quern.data.token_file import header, map_tokens
from quern.temporaries import sync_path, temporary_folder

IDS = 1 << 16
"""Ids in these files are below it."""
BATCH_TOKENS = 1 << 22


@dataclass(frozen=True)
class BinFormat:
    """The layout of a token file."""

    train: str  # names of the files; {name} is that of the data, {number} that of the file, from 1
    val: str  # {number} is 0
    bare: bool = False  # no header, and the delimiter ends documents; else it begins them
    file_tokens: int | None = 100_000_000  # a file is closed as soon as it has this many tokens; None for one file


MODDED_NANOGPT = BinFormat("{name}_train_{number:06d}.bin", "{name}_val_{number:06d}.bin")
NANOGPT = BinFormat("train.bin", "val.bin", bare=True, file_tokens=None)


def read_bin(*paths: str | Path, bos: int = 50256, vocab_size: int = 1 << 32) -> Corpus:
    """Opens the files of one text, in order. bos, vocab_size: from the tokenizer that made them.

    Documents end with the delimiter if the text ends with it and does not begin with it; else they begin with it, and
    tokens before the first one in a file are skipped: modded-nanogpt cuts a document that a file has no room for.

    Raises:
        FileNotFoundError, ValueError: A file is missing, empty or damaged, or another tokenizer made it: it holds no
            delimiter, or ids outside the vocabulary.
    """
    files = [(path, *_find(path, bos, vocab_size)) for path in map(Path, paths)]
    ending = files[0][1][0] != 0 and files[-1][1][-1] == files[-1][2] - 1
    parts, whole = list[Part](), True
    for path, found, count in files:
        first = int(found[0])
        if ending and first and whole:  # the first document has no delimiter before it
            tokens = map_tokens(path, headerless=True)[:first]
            with_bos = np.concatenate([np.array([bos], tokens.dtype), tokens])
            parts.append(Part(len(with_bos), 1, lambda: np.zeros(1, np.int64), lambda read=with_bos: (read, None)))
        skipped = 0 if ending and whole else first
        whole = bool(found[-1] == count - 1)
        parts.append(_part(path, found if ending and whole else np.append(found, count), skipped))
    return Corpus(parts, bos)


def _part(path: Path, starts: np.ndarray, skipped: int) -> Part:
    """The documents of a file. starts: the start of each, and the end of the last."""
    begin, end = int(starts[0]), int(starts[-1])
    own = starts[:-1] - begin
    return Part(
        count=end - begin,
        documents=len(own),
        starts=lambda: own,
        read=lambda: (map_tokens(path, headerless=True)[begin:end], None),
        mapped_bytes=path.stat().st_size,
        skipped=skipped,
    )


def _find(path: Path, bos: int, vocab_size: int) -> tuple[np.ndarray, int]:
    """The places of `bos`, int64, found without a mask of the whole file; and the number of tokens."""
    tokens, found, largest = map_tokens(path, headerless=True), list[np.ndarray](), 0
    for at in range(0, len(tokens), BATCH_TOKENS):
        some = tokens[at : at + BATCH_TOKENS]
        found.append(np.flatnonzero(some == bos) + at)
        largest = max(largest, int(some.max()))
    wrong = "" if any(map(len, found)) else f"never has id {bos:,}, which begins documents"
    wrong = f"holds id {largest:,}, outside the vocabulary of {vocab_size:,}" if largest >= vocab_size else wrong
    if wrong:
        raise ValueError(f"{path} {wrong}: name the tokenizer that made it with --text.tokenizer")
    return np.concatenate(found).astype(np.int64), len(tokens)


def refuse_written(folder: Path) -> None:
    """Raises ValueError if the folder has .bin files already, or is a file."""
    there = folder if folder.is_file() else min(folder.glob("*.bin"), default=None)
    if there is not None:
        raise ValueError(f"{there} is there already: name a new folder")


def refuse_ids(largest: int) -> None:
    """Raises ValueError if the largest id of a text does not fit."""
    if largest >= IDS:
        raise ValueError(f"the text has id {largest:,}, and these files hold ids below {IDS:,}: use another tokenizer")


def write_bin(
    splits: dict[str, Corpus], folder: Path, name: str, form: BinFormat, progress: Callable[[int], None]
) -> list[Path]:
    """Writes token files of the splits "train" and "val", all of them or none, and returns their paths.

    Args:
        name: The name of the data, for file names.
        progress: Called with the number of tokens written.

    Raises:
        ValueError: An id is too large for these files, or the folder has .bin files already.
    """
    refuse_written(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = 0
    with temporary_folder(folder / "bin") as temporary:
        for split, corpus in splits.items():
            pattern, first = (form.train, 1) if split == "train" else (form.val, 0)
            files = _groups(corpus, slice(0, corpus.num_documents), form.file_tokens or corpus.num_tokens)
            for number, documents in enumerate(files, start=first):
                path = temporary / pattern.format(name=name, number=number)
                for tokens in _write_file(path, corpus, documents, form):
                    written += tokens
                    progress(written)
        made = sorted(temporary.glob("*.bin"))
        for path in made:
            os.replace(path, folder / path.name)
        sync_path(folder)
    return [folder / path.name for path in made]


def _groups(corpus: Corpus, documents: slice, tokens: int) -> Iterator[slice]:
    """Consecutive documents, each group closed as soon as it has so many tokens."""
    ends = np.cumsum(corpus.lengths[documents])
    start = 0
    while start < len(ends):
        before = int(ends[start - 1]) if start else 0
        end = min(len(ends), int(np.searchsorted(ends, before + tokens)) + 1)
        yield slice(documents.start + start, documents.start + end)
        start = end


def _write_file(path: Path, corpus: Corpus, documents: slice, form: BinFormat) -> Iterator[int]:
    """Yields the number of tokens of each piece that was written."""
    with open(path, "wb") as file:
        if not form.bare:
            file.write(header(int(corpus.lengths[documents].sum()), np.dtype("<u2")))
        for group in _groups(corpus, documents, BATCH_TOKENS):
            out = corpus.slices(corpus.starts[group], corpus.lengths[group])
            if form.bare:  # each document's first token, BOS, goes behind its last
                out = np.append(out[1:], np.int32(corpus.bos))
            refuse_ids(int(out.max()))
            file.write(out.astype("<u2").tobytes())
            yield out.size
    sync_path(path)
