"""Prepare: raw text → tokenizer → token shards, each re-used when nothing that it was made from changed.

Sources: the built-in tinyworld, a file, a folder, or a public data set (fetched ahead); tokens are not made again
(prepare_tokens.py). Validation text comes from `val` if that is given, else it is held out from the source; it never
depends on how much training text there is beyond that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from quern.data.shards import Corpus, ShardWriter, fingerprint, prepared
from quern.recipe import Recipe
from quern.stages.places import naming, refuse_unwritable
from quern.stages.prepare_tokens import is_tokens, open_tokens, sample
from quern.stages.progress import Meter
from quern.text import hub, tinyworld
from quern.text.documents import files, read
from quern.text.tokenizer import SPLIT_PATTERN, Tokenizer, compression_report

HELD_OUT_EVERY = 20
BATCH_DOCUMENTS = 512


@dataclass(frozen=True)
class Source:
    """name: for file names; fingerprint: changes when the text does; read(split) yields documents."""

    name: str
    fingerprint: str
    read: Callable[[str], Iterator[str]]


@dataclass(frozen=True)
class Prepared:
    """The tokenizer, the two splits, and what the report says of them."""

    tokenizer: Tokenizer
    train: Corpus
    val: Corpus
    facts: dict[str, Any]


def open_source(recipe: Recipe, out: Path) -> Source:
    """The recipe's data. Raises FileNotFoundError or ValueError, naming what would work, when there is none, and what
    the first document of a split raises."""
    source = _tinyworld(recipe) if recipe.data == "tinyworld" else _of_files(recipe, out)
    for split in ("train", "val"):
        if not any(source.read(split)):
            raise ValueError(f"the {split} text of '{source.name}' is empty: give more text, or --val for validation")
    return source


def _of_files(recipe: Recipe, out: Path) -> Source:
    path = Path(recipe.data)
    val = Path(recipe.val) if recipe.val else None
    if not path.exists():
        if recipe.data not in hub.DATASETS:
            sets = ", ".join(hub.DATASETS)
            raise FileNotFoundError(
                f"--data {recipe.data}: there is no such file, folder or data set; "
                f"use tinyworld, a path, or one of {sets}"
            )
        folder = fetch(recipe.data, out)
        path, val = folder / "train", val or folder / "val"
    marks = [str(recipe.text.val_megabytes), *_marks(path), "val", *(_marks(val) if val else [])]

    def documents(split: str) -> Iterator[str]:
        if val is not None:
            yield from (text for text, _ in read(path if split == "train" else val))
        else:
            texts = (text for text, _ in read(path))
            yield from (
                text for held_out, text in _hold_out(texts, recipe.text.val_megabytes) if held_out == (split == "val")
            )

    return Source(path.stem or "data", fingerprint(*marks), documents)


def fetch(name: str, out: Path) -> Path:
    """A public data set's folder, fetched if it is not there."""
    with Meter(f"fetching {name}", None, "MB of this file") as meter:
        return hub.prefetch(
            name, out / "downloads", lambda file, done, total: meter.at(done / 1e6, file), say=meter.say
        )


def _tinyworld(recipe: Recipe) -> Source:
    sizes = {"train": recipe.text.tinyworld_megabytes, "val": recipe.text.val_megabytes}
    sample = "".join(islice(tinyworld.documents(recipe.seed, 0.2, "train"), 200))  # changes with the generator

    def documents(split: str) -> Iterator[str]:
        return tinyworld.documents(recipe.seed, sizes[split], split)

    return Source("tinyworld", fingerprint(str(recipe.seed), str(sizes), sample), documents)


def _marks(path: Path) -> list[str]:
    """Name, size and time of every file: cheap, and changed by whatever changes the text."""
    found = files(path)
    return [f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in found]


def _hold_out(texts: Iterator[str], megabytes: float) -> Iterator[tuple[bool, str]]:
    """Every twentieth document is held out until that is enough; of fewer than twenty, the end of the last one."""
    first = list(islice(texts, HELD_OUT_EVERY))
    if len(first) < HELD_OUT_EVERY:
        yield from ((False, text) for text in first[:-1])
        if first:
            cut = _cut(first[-1])
            yield False, first[-1][:cut]
            yield True, first[-1][cut:]
        return
    left = megabytes * 1e6
    for index, text in enumerate(chain(first, texts)):
        held_out = index % HELD_OUT_EVERY == HELD_OUT_EVERY // 2 and left > 0
        left -= len(text.encode("utf-8", "replace")) if held_out else 0
        yield held_out, text


def _cut(text: str) -> int:
    """Where the last tenth begins, at a space if there is one near."""
    at = len(text) * 9 // 10
    space = text.find(" ", at)
    return space if 0 <= space < len(text) - 1 else at


def split_pattern(digits: int) -> str:
    """The split pattern with up to `digits` digits in a token."""
    return SPLIT_PATTERN.replace(r"\p{N}{1,2}", rf"\p{{N}}{{1,{digits}}}")


def train_tokenizer(recipe: Recipe, source: Source, out: Path, say: Callable[[str], None]) -> Tokenizer:
    """The tokenizer for the source, trained unless it is there already."""
    text = recipe.text
    assert text.vocab_size
    pattern = split_pattern(text.digits)
    mark = fingerprint(source.fingerprint, str(text.vocab_size), pattern, str(text.tokenizer_megabytes))
    path = out / "tokenizers" / f"{source.name}-{mark[:8]}.json"
    if path.exists():
        try:
            tokenizer = Tokenizer.load(path)
        except ValueError as error:
            raise ValueError(f"{error}: remove it, and it is trained again") from error
        say(f"tokenizer: {path} is up to date")
        return tokenizer
    refuse_unwritable(out)
    start = time.monotonic()
    size = text.tokenizer_megabytes
    with Meter("training the tokenizer", size, "MB") as meter:
        texts = _metered(source.read("train"), meter)
        tokenizer = Tokenizer.train(texts, text.vocab_size, pattern, max_bytes=int(size * 1e6))
    for note in tokenizer.notes:
        say(note)
    with naming(path):
        tokenizer.save(path)
    say(f"tokenizer: {tokenizer.vocab_size:,} tokens in {time.monotonic() - start:.1f} s → {path}")
    return tokenizer


def _metered(texts: Iterable[str], meter: Meter) -> Iterator[str]:
    size = 0
    for text in texts:
        size += len(text)
        meter.at(size / 1e6)
        yield text


def prepare(recipe: Recipe, out: Path, say: Callable[[str], None], tokenizer: Tokenizer | None = None) -> Prepared:
    """Everything that training needs of the text. recipe: resolved; tokenizer: None is the one trained on the text."""
    if is_tokens(recipe.data):
        tokenizer, train, val = open_tokens(recipe)
        samples = {"validation text": sample(val, tokenizer)}
        return Prepared(tokenizer, train, val, _facts(Path(recipe.data).stem, samples, tokenizer, train, val))
    source = open_source(recipe, out)
    tokenizer = tokenizer or train_tokenizer(recipe, source, out, say)
    mark = fingerprint(tokenizer.fingerprint, source.fingerprint)
    folder = out / "data" / f"{source.name}-{mark[:8]}"
    if prepared(folder, mark):
        say(f"tokens: {folder} is up to date")
    else:
        refuse_unwritable(out)
        for split in ("val", "train"):
            _tokenize(source, split, tokenizer, folder, mark, say)
    train, val = (Corpus.open(folder, split, fingerprint=mark) for split in ("train", "val"))
    samples = (
        tinyworld.kinds_of_text(recipe.seed)
        if recipe.data == "tinyworld"
        else {"validation text": "\n".join(islice(source.read("val"), 50))}
    )
    return Prepared(tokenizer, train, val, _facts(source.name, samples, tokenizer, train, val))


def _tokenize(
    source: Source, split: str, tokenizer: Tokenizer, folder: Path, mark: str, say: Callable[[str], None]
) -> None:
    start, tokens, size, count = time.monotonic(), 0, 0, 0
    with (
        naming(folder),
        ShardWriter(folder, split, vocab_size=tokenizer.vocab_size, bos=tokenizer.bos, fingerprint=mark) as writer,
        Meter(f"tokenizing {split}", None, "documents") as meter,
    ):
        texts = (text for text in source.read(split) if text)
        while batch := list(islice(texts, BATCH_DOCUMENTS)):
            for text, ids in zip(batch, tokenizer.encode_batch(batch), strict=True):
                writer.add([tokenizer.bos, *ids])
                tokens += len(ids) + 1
                size += len(text)
            count += len(batch)
            meter.at(count, f"{tokens / 1e6:.1f}M tokens")
    seconds = time.monotonic() - start
    say(f"tokens: {split} {tokens:,} from {count:,} documents, {size / 1e6 / seconds:.1f} MB/s → {folder}")


def _facts(name: str, samples: Mapping[str, str], tokenizer: Tokenizer, train: Corpus, val: Corpus) -> dict[str, Any]:
    return {
        "data": {
            "source": name,
            "train": {"documents": train.num_documents, "tokens": train.num_tokens},
            "validation": {"documents": val.num_documents, "tokens": val.num_tokens},
        },
        "tokenizer": {
            "vocabulary": tokenizer.vocab_size,
            "fingerprint": tokenizer.fingerprint[:16],
            "split_pattern": tokenizer.pattern,
            "compression": compression_report(tokenizer, samples),
        },
    }
