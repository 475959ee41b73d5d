"""Prepare: raw text → tokenizer → token shards, each re-used when nothing that it was made from changed.

Sources: the built-in tinyworld, a file, a folder, or a public data set (fetched ahead); tokens are not made again
(prepare_tokens.py). Validation text comes from `val` if that is given, else it is held out from the source
(hold_out.py). A source is known by the contents of its files, not by their names, places or times.
"""

from __future__ import annotations

import inspect
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

from quern.data.shards import Corpus
from quern.data.token_file import fingerprint, prepared
from quern.estimate.own_text import vocabulary
from quern.recipe import Recipe, Resolved
from quern.runs.origin import Origin, group_size_of
from quern.runs.public_data import PublicData, public_data
from quern.runs.run_dir import naming, refuse_unwritable
from quern.stages.hold_out import check_splits, first, hold_out
from quern.stages.prepare_tokens import is_tokens, named_tokenizer, open_tokens, sample, token_listings
from quern.temporaries import alone_in, remove_abandoned
from quern.terminal import Meter
from quern.text.clean.steps import read_records, recorded
from quern.text.documents import read, warning_of
from quern.text.encode.pool import StartWorkers, on_processes, write_shards
from quern.text.formats import text_megabytes
from quern.text.readers import UTF8
from quern.text.repositories import TRAIN, local_copy
from quern.text.sources import (
    AS_TEXT,
    COMPRESSED,
    DOCUMENTS,
    Listing,
    Where,
    content_fingerprint,
    data_paths,
    format_of,
    list_source,
)
from quern.text.tinyworld import corpus
from quern.text.tokenizer import Tokenizer, compression_report, split_pattern, training_pieces

HOLD_OUT_VERSION = "2"  # of hold_out.py: another one means other splits of the same text
SAMPLE_VERSION = "1"  # of `sampled`: another one means other samples of the same text
MOST_BYTES = 2_000_000_000
"""A longer text is sampled up to here: it is read twice."""


Read = Callable[[str], Iterator[str]]
"""Opens the documents of a split."""


@dataclass(frozen=True)
class Source:
    """A text that is not tokenized yet."""

    name: str  # for file names
    fingerprint: str  # changes when the text does
    read: Read
    megabytes: Callable[[], float | None]  # size of the whole text, None if it is not known before it is read
    alike: bool = False
    """The text is the same everywhere, as what a program generates, so its beginning is a sample of it."""
    public: PublicData | None = None  # its files, where it is a public data set


@dataclass(frozen=True)
class Prepared:
    """The tokenizer, the two splits, facts for the report, their origin, and the files of a public data set."""

    tokenizer: Tokenizer
    train: Corpus
    val: Corpus
    facts: dict[str, Any]
    origin: Origin
    public: PublicData | None = None

    @property
    def bytes_per_token(self) -> float:
        """Bytes per token of the validation text, or of the built-in world's first kind of text."""
        return self.facts["tokenizer"]["compression"][0]["bytes_per_token"]


def own_megabytes(recipe: Recipe, out: Path) -> float | None:
    """The size of the text that the recipe names, about, without reading it; None if it is no text of one's own."""
    paths = None if recipe.data == "tinyworld" or is_tokens(recipe.data) else data_paths(recipe.data)
    if paths is None:
        return None
    return text_megabytes(_listed(paths, recipe, out), recipe.text.column)


def _listed(paths: Sequence[Path], recipe: Recipe, out: Path) -> Listing:
    """The files of a text, without the output folder where that is in one of its folders."""
    listing = list_source(paths, DOCUMENTS, recipe.include, recipe.exclude)
    inside = any(path.resolve() in out.resolve().parents for path in paths)
    return listing.without(out) if inside else listing


def fit_vocabulary(recipe: Recipe, megabytes: float | None) -> Recipe:
    """The recipe with the vocabulary that fits a text of so many megabytes (`own_megabytes`), unless it has one."""
    text = recipe.text
    if megabytes is None or text.vocab_size is not None or text.tokenizer is not None:
        return recipe
    return replace(recipe, text=replace(text, vocab_size=vocabulary(megabytes)))


def open_source(recipe: Resolved, out: Path, log: Callable[[str], None] = lambda line: None) -> Source:
    """Opens the recipe's data, both splits of which hold text.

    Args:
        out: The output folder; what killed processes left there is removed.
        log: Called with lines on which files are read and which are ignored, and on a very small validation text.

    Raises:
        FileNotFoundError: There is no such data; the message names what would work.
        ValueError: A split is empty, or its first document cannot be read.
        OSError: A file cannot be read, or the cache of digests cannot be written.
    """
    for folder in (out / "tokenizers", out / "data", *(out / "data").glob("*/")):
        remove_abandoned(folder)
    return _tinyworld(recipe, log) if recipe.data == "tinyworld" else _of_files(recipe, out, log)


def _filter(recipe: Resolved, texts: Read) -> tuple[Read, list[str]]:
    """The texts after the recipe's `make_documents`, and what a fingerprint needs to know of it."""
    make = recipe.make_documents
    if make is None:
        return texts, []
    # Another filter makes another text. Its constants and helpers are in its file, so the whole file counts.
    marks = [make.__qualname__, inspect.getsource(inspect.getmodule(make) or make)]
    return lambda split: iter(make(texts(split), split)), marks


def _of_files(recipe: Resolved, out: Path, log: Callable[[str], None]) -> Source:
    public = public_data(recipe, out, log)
    paths, chosen = data_paths(recipe.data) or [], (recipe.include, recipe.exclude)
    alone = not public and len(paths) == 1 and chosen == (None, None)
    copy = local_copy(paths[0], TRAIN, "documents", lambda line: log(f"text: {line}")) if alone else None
    given, its_val = (public.train, public.val) if public else copy or (paths, ())
    val: Where | None = Path(recipe.val) if recipe.val else its_val or None
    listings = {"text": _listed(given, recipe, out)}
    train = listings["text"].files
    if val is not None:
        listings["validation text"] = list_source(val, DOCUMENTS)
    for what, listing in listings.items():
        for line in listing.lines(what):
            log(line)
    separator, encoding = recipe.text.separator, recipe.text.encoding
    if line := warning_of([path for one in listings.values() for path in one.files], bool(separator), encoding):
        log(line)
    held_out: Read | None = None
    once = cache(lambda line: log(f"text: {line}"))  # the text is read several times

    def texts(source: Where) -> Iterator[str]:
        return read(source, recipe.text.column, once, separator, encoding)

    def documents(split: str) -> Iterator[str]:
        nonlocal held_out
        if val is not None:
            return texts(train) if split == "train" else first(texts(val), recipe.text.val_megabytes)
        held_out = held_out or hold_out(partial(texts, train), recipe.text.val_megabytes)
        return held_out(split)

    name = public.name if public else paths[0].stem or "data"
    filtered, filter_marks = _filter(recipe, documents)
    check_splits(name, filtered, log)  # before anything is written
    marks = [HOLD_OUT_VERSION, str(recipe.text.val_megabytes), recipe.text.column]
    marks += ["the first of it"] if val is not None else []
    marks += ["separator", separator] if separator else []
    marks += ["encoding", encoding] if encoding != UTF8 else []
    for what, listing in listings.items():
        # Another reader finds another text in the same bytes; .md and code are read as .txt.
        marks += [what, *(".txt" if (form := format_of(path)) in AS_TEXT else form for path in listing.files)]
        marks.append(_digest(listing, out))

    def megabytes() -> float | None:
        guessed = any(path.suffix.lower() in COMPRESSED for path in listings["text"].files)
        return None if filter_marks or guessed else text_megabytes(listings["text"], recipe.text.column)

    return Source(name, fingerprint(*marks, *filter_marks), filtered, megabytes, public=public)


def _digest(listing: Listing, out: Path) -> str:
    cache = out / "data" / "digests.json"
    if not cache.exists():
        refuse_unwritable(out)
    megabytes = sum(entry.size for entry in listing.read) / 1e6
    with naming(cache), Meter("looking for changes in the text", megabytes, "MB") as meter:
        return content_fingerprint(listing.files, cache, lambda done: meter.at(done / 1e6))


def _tinyworld(recipe: Resolved, log: Callable[[str], None]) -> Source:
    sizes = {"train": recipe.text.tinyworld_megabytes, "val": recipe.text.val_megabytes}
    sample = "".join(islice(corpus.documents(recipe.seed, 0.2, "train"), 200))  # changes with the generator

    def documents(split: str) -> Iterator[str]:
        return corpus.documents(recipe.seed, sizes[split], split)

    filtered, marks = _filter(recipe, documents)
    check_splits("tinyworld", filtered, log)
    mark = fingerprint(str(recipe.seed), str(sizes), sample, *marks)
    return Source("tinyworld", mark, filtered, lambda: None if marks else sizes["train"], alike=True)


def train_tokenizer(recipe: Resolved, source: Source, out: Path, log: Callable[[str], None]) -> Tokenizer:
    """The tokenizer for the source, trained unless it is there already."""
    text = recipe.text
    pattern = split_pattern(text.digits)
    how = [] if source.alike else [SAMPLE_VERSION]
    mark = fingerprint(source.fingerprint, str(text.vocab_size), pattern, str(text.tokenizer_megabytes), *how)
    known = sorted((out / "tokenizers").glob(f"*-{mark[:8]}.json"))  # the same text may have had another name
    path = known[0] if known else out / "tokenizers" / f"{source.name}-{mark[:8]}.json"
    if known:
        try:
            tokenizer = Tokenizer.load(path)
        except ValueError as error:
            raise ValueError(f"{error}: remove it, and it is trained again") from error
        log(f"tokenizer: {path} is up to date")
        return tokenizer
    refuse_unwritable(out)
    start, size, texts = time.monotonic(), text.tokenizer_megabytes, source.read("train")
    if not source.alike:  # the seed is of the text: a run's seed does not change its tokens
        with Meter("measuring the text", None, "MB") as meter:
            texts = sampled(lambda: source.read("train"), size, source.fingerprint, lambda done: meter.at(done / 1e6))
    with Meter("training the tokenizer", size, "MB") as meter:

        def metered() -> Iterator[str]:
            done = 0
            for one in texts:
                done += len(one)
                meter.at(done / 1e6)
                yield one

        tokenizer = Tokenizer.train(metered(), text.vocab_size, pattern, max_bytes=int(size * 1e6))
    for note in tokenizer.notes:
        log(note)
    with naming(path):
        tokenizer.save(path)
    log(f"tokenizer: {tokenizer.vocab_size:,} tokens in {time.monotonic() - start:.1f} s → {path}")
    return tokenizer


def sampled(
    texts: Callable[[], Iterator[str]], megabytes: float, seed: str, progress: Callable[[int], None]
) -> Iterator[str]:
    """Samples a text by reading it twice: to find its size, then to choose pieces of it. It holds one piece in memory.

    Args:
        megabytes: The size of the sample, to within a piece and a percent or so. A text that is not larger is
            returned whole.
        seed: Equal seeds choose equal pieces.
        progress: Called with the bytes that the first reading has seen.

    Returns:
        Documents, or pieces of at most 65,536 characters of long ones, in the order of the text.
    """
    total = 0
    for piece in training_pieces(texts(), MOST_BYTES):
        total += len(piece.encode("utf-8"))
        progress(total)
    if total <= megabytes * 1e6:
        return texts()
    return _chosen(training_pieces(texts(), MOST_BYTES), megabytes * 1e6 / total, random.Random(seed))


def _chosen(pieces: Iterator[str], share: float, chance: random.Random) -> Iterator[str]:
    """Chooses a share of the bytes. Each piece adds about its share to what is owed, and a chosen one pays for itself.
    So even a small sample has its size and comes from all of the text, which independent draws would not ensure."""
    owed = 0.0
    for piece in pieces:
        size = len(piece.encode("utf-8"))
        if owed >= 0:
            yield piece
            owed -= size
        owed += 2 * chance.random() * share * size


def prepare(
    recipe: Resolved,
    out: Path,
    log: Callable[[str], None],
    tokenizer: Tokenizer | None = None,
    workers: int = 1,
    start_workers: StartWorkers = on_processes,
) -> Prepared:
    """Prepares everything that training needs of the text, with a tokenizer, the one that the recipe names, or one that
    is trained on the text."""
    if is_tokens(recipe.data):
        if recipe.make_documents is not None:
            raise ValueError(
                f"{recipe.data} holds token ids, and the recipe's make_documents works on text: give text with --data"
            )
        public = public_data(recipe, out, log)
        tokenizer, train, val = open_tokens(recipe, log, tokenizer, public)
        samples = {"validation text": sample(val, tokenizer)}
        text = _tokens_fingerprint(recipe, out, public)
        facts = _facts(public.name if public else Path(recipe.data).stem, samples, tokenizer, train, val)
        tokens = fingerprint(tokenizer.fingerprint, text)
        origin = Origin(tokenizer.fingerprint, text, tokens, group_size=group_size_of(train))
        return Prepared(tokenizer, train, val, facts, origin, public)
    source = open_source(recipe, out, log)
    tokenizer = named_tokenizer(recipe, tokenizer, log) or train_tokenizer(recipe, source, out, log)
    mark = fingerprint(tokenizer.fingerprint, source.fingerprint)
    known = [found for found in sorted((out / "data").glob(f"*-{mark[:8]}")) if prepared(found, mark)]
    folder = known[0] if known else out / "data" / f"{source.name}-{mark[:8]}"
    if known:
        log(f"tokens: {folder} is up to date")
    else:
        refuse_unwritable(out)
        write = partial(write_shards, workers=workers, start_workers=start_workers)
        with naming(folder), alone_in(folder, log):
            for split in (split for split in ("val", "train") if not prepared(folder, mark, [split])):
                texts = (text for text in recorded(source.read(split), folder, split) if text)
                megabytes = source.megabytes() if split == "train" else None
                write(texts, tokenizer, folder, split, mark, log, megabytes=megabytes)
    train, val = (Corpus.open(folder, split, fingerprint=mark) for split in ("train", "val"))
    samples = (
        corpus.kinds_of_text(recipe.seed)
        if recipe.data == "tinyworld"
        else {"validation text": "\n".join(islice(source.read("val"), 50))}
    )
    facts = _facts(source.name, samples, tokenizer, train, val)
    if cleaning := read_records(folder):
        facts["data"]["cleaning"] = cleaning
    shards = str(folder.relative_to(out))
    origin = Origin(tokenizer.fingerprint, source.fingerprint, mark, shards, group_size=group_size_of(train))
    return Prepared(tokenizer, train, val, facts, origin, source.public)


def text_fingerprint(recipe: Resolved, out: Path) -> str:
    """The fingerprint of the recipe's text and of how it is split, without preparing it. recipe: resolved."""
    if is_tokens(recipe.data):
        return _tokens_fingerprint(recipe, out, public_data(recipe, out))
    return open_source(recipe, out).fingerprint


def _tokens_fingerprint(recipe: Resolved, out: Path, public: PublicData | None) -> str:
    listings = [listing for listing in token_listings(recipe, public) if listing]
    return fingerprint(str(recipe.text.val_megabytes), *(_digest(listing, out) for listing in listings))


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
