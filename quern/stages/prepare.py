"""Prepare: raw text → tokenizer → token shards, each re-used when nothing that it was made from changed.

Sources: the built-in tinyworld, a file, a folder, or a public data set (fetched ahead); tokens are not made again
(prepare_tokens.py). Validation text comes from `val` if that is given, else it is held out from the source
(`hold_out`). A source is known by the contents of its files, not by their names, places or times.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

from quern.data.shards import Corpus
from quern.data.token_file import fingerprint, prepared
from quern.estimate.own_text import vocabulary
from quern.recipe import Recipe, Resolved
from quern.runs.origin import Origin, read_origin, require_same
from quern.runs.public_data import PublicData, public_data
from quern.runs.run_dir import STAGES, RunDir, command_of
from quern.stages.encode import StartWorkers, on_processes, write_shards
from quern.stages.prepare_tokens import is_tokens, open_tokens, sample, token_listings
from quern.stages.tokenizers import Read, Source, named_tokenizer, train_tokenizer
from quern.temporaries import alone_in, remove_abandoned
from quern.text.clean.steps import Cleaned, read_records, recorded
from quern.text.documents import Log, read, warning_of
from quern.text.readers import UTF8, format_of, text_megabytes
from quern.text.repositories import TRAIN, local_copy
from quern.text.sources import AS_TEXT, DOCUMENTS, content_fingerprint, list_source
from quern.text.tinyworld import corpus
from quern.text.tokenizer import Tokenizer, compression_report
from quern.validate import data_paths

HOLD_OUT_VERSION = "2"  # version of `hold_out`: another one means other splits of the same text
EVERY = 20
ENOUGH_BYTES = 1 << 16
LEAST_SHARE, MOST_SHARE = 1 / 40, 1 / 5
"""The smallest and the largest share of the text that a held-out twentieth of the documents may take."""
TAIL_SHARE, MOST_TAIL_SHARE = 1 / 10, 1 / 3
"""The share of the text that its held-out end takes, and the largest share, to reach LEAST_BYTES."""
LEAST_BYTES = 512
SMALL_VALIDATION_BYTES = 4000  # about a thousand tokens
SPACE = re.compile(r"\s")
NAME_CHARACTERS = 40
"""The most characters of a text's name in the names of its folder and tokenizer; a file name has at most 255 bytes."""


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
    paths = None if recipe.data == "tinyworld" or is_tokens(recipe.data, out) else data_paths(recipe.data)
    if paths is None:
        return None
    return text_megabytes(list_source(paths, DOCUMENTS, recipe.include, recipe.exclude, out).files, recipe.text.column)


def fit_vocabulary(recipe: Recipe, megabytes: float | None) -> Recipe:
    """The recipe with the vocabulary that fits a text of so many megabytes (`own_megabytes`), unless it has one."""
    text = recipe.text
    if megabytes is None or text.vocab_size is not None or text.tokenizer is not None:
        return recipe
    return replace(recipe, text=replace(text, vocab_size=vocabulary(megabytes)))


def open_source(recipe: Resolved, out: Path, log: Log = lambda line: None) -> Source:
    """Opens the recipe's data, both splits of which hold text.

    Args:
        out: The output folder; what killed processes left there is removed.
        log: Called with lines on which files are read and which are ignored, and on a very small validation text.

    Raises:
        FileNotFoundError: There is no such data; the message names what would work.
        ValueError: The data is tokens, a split is empty, or its first document cannot be read.
        OSError: A file cannot be read, or the cache of digests cannot be written.
    """
    if is_tokens(recipe.data, out):
        raise ValueError(f"--data {recipe.data} is tokens: a new tokenizer and a recipe's make_documents need text")
    for folder in (out / "tokenizers", out / "data", *(out / "data").glob("*/")):
        remove_abandoned(folder)
    return _tinyworld(recipe, log) if recipe.data == "tinyworld" else _of_files(recipe, out, log)


def _filter(recipe: Resolved, texts: Read) -> tuple[Read, list[str]]:
    """The texts after the recipe's `make_documents`, and what a fingerprint needs to know of it, when both are open."""
    make = recipe.make_documents
    if make is None:
        return texts, []
    # Another filter makes another text. Its constants and helpers are in its file, so the whole file counts.
    marks = [make.__qualname__, inspect.getsource(inspect.getmodule(make) or make)]

    def filtered(split: str) -> Iterator[str]:
        made = make(texts(split), split)
        found = {step.mark for step in made.steps if step.mark} if isinstance(made, Cleaned) else set[str]()
        marks[2:] = sorted(found.union(marks[2:]))
        return iter(made)

    return filtered, marks


def _of_files(recipe: Resolved, out: Path, log: Log) -> Source:
    public = public_data(recipe, out, log)
    paths, chosen = data_paths(recipe.data) or [], (recipe.include, recipe.exclude)
    listings = {"text": list_source(public.train if public else paths, DOCUMENTS, *chosen, out)}
    its_val: Sequence[Path] = public.val if public else ()
    if not public and len(paths) == 1 and chosen == (None, None):
        copy = local_copy(paths[0], listings["text"], TRAIN, "documents", lambda line: log(f"text: {line}"))
        if copy is not None:
            listings["text"], its_val = list_source(copy[0], DOCUMENTS), copy[1]
    if val := recipe.val or its_val:
        listings["validation text"] = list_source(val, DOCUMENTS, apart=out)
        listings["text"] = listings["text"].without(listings["validation text"])
    for what, listing in listings.items():
        for line in listing.lines(what):
            log(line)
    separator, encoding = recipe.text.separator, recipe.text.encoding
    if line := warning_of([path for one in listings.values() for path in one.files], bool(separator), encoding):
        log(line)
    once = cache(lambda line: log(f"text: {line}"))  # the text is read several times

    def texts(what: str) -> Iterator[str]:
        return read(listings[what].files, recipe.text.column, once, separator, encoding)

    held_out = cache(lambda: hold_out(partial(texts, "text"), recipe.text.val_megabytes))

    def documents(split: str) -> Iterator[str]:
        if val:
            return texts("text") if split == "train" else first(texts("validation text"), recipe.text.val_megabytes)
        return held_out()(split)

    name = _name(recipe, public)
    filtered, filter_marks = _filter(recipe, documents)
    check_splits(name, filtered, log)  # before anything is written
    marks = [HOLD_OUT_VERSION, str(recipe.text.val_megabytes), recipe.text.column]
    marks += ["the first of it"] if val else []
    marks += ["separator", separator] if separator else []
    marks += ["encoding", encoding] if encoding != UTF8 else []
    for what, listing in listings.items():
        # Another reader finds another text in the same bytes; .md and code are read as .txt.
        marks += [what, *(".txt" if (form := format_of(path)) in AS_TEXT else form for path in listing.files)]
        marks.append(content_fingerprint(listing.read, out, "text"))

    def megabytes() -> float | None:
        return None if filter_marks else text_megabytes(listings["text"].files, recipe.text.column)

    return Source(name, fingerprint(*marks, *filter_marks), filtered, megabytes, public=public)


def _tinyworld(recipe: Resolved, log: Log) -> Source:
    sizes = {"train": recipe.text.tinyworld_megabytes, "val": recipe.text.val_megabytes}
    sample = "".join(islice(corpus.documents(recipe.seed, 0.2, "train"), 200))  # changes with the generator

    def documents(split: str) -> Iterator[str]:
        return corpus.documents(recipe.seed, sizes[split], split)

    filtered, marks = _filter(recipe, documents)
    check_splits("tinyworld", filtered, log)
    mark = fingerprint(str(recipe.seed), str(sizes), sample, *marks)
    return Source("tinyworld", mark, filtered, lambda: None if marks else sizes["train"])


def hold_out(texts: Callable[[], Iterator[str]], megabytes: float) -> Callable[[str], Iterator[str]]:
    """Decides how to hold out: it reads the documents until every twentieth is enough, or to their end.

    A large corpus holds out every twentieth document until that is enough, so that validation does not depend on how
    much text follows. Where this would give too little or too much, as in a few documents, the end is held out.

    texts opens the documents, as often as it is called; megabytes: the most that is held out, by whole documents.
    Returns a function that opens a split, "train" or "val"; together they hold every document.
    """
    tail = _tail_of(texts(), megabytes)

    def opened(split: str) -> Iterator[str]:
        pairs = _by_number(texts(), megabytes) if tail is None else _tail(texts(), *tail)
        chosen = (text for held_out, text in pairs if held_out == (split == "val"))
        return first(chosen, megabytes) if split == "val" and tail is None else chosen

    return opened


def _tail_of(texts: Iterator[str], megabytes: float) -> tuple[int, int] | None:
    """The byte of the text where validation begins, and the bytes from there on; None for every twentieth document."""
    held = total = 0
    for held_out, text in _by_number(texts, megabytes):
        size = _size(text)
        total += size
        held += size if held_out else 0
        if held >= min(ENOUGH_BYTES, megabytes * 1e6) and 0 < held <= MOST_SHARE * total:
            return None
    if max(LEAST_SHARE * total, LEAST_BYTES) <= held <= MOST_SHARE * total:
        return None
    wanted = max(TAIL_SHARE * total, min(LEAST_BYTES, MOST_TAIL_SHARE * total))
    wanted = math.ceil(min(wanted, megabytes * 1e6))
    return total - wanted, wanted


def first(texts: Iterator[str], megabytes: float) -> Iterator[str]:
    """The first documents of a validation text, up to the one that makes it this large."""
    left = megabytes * 1e6
    for text in texts:
        yield text
        left -= _size(text)
        if left <= 0:
            return


def check_splits(name: str, documents: Callable[[str], Iterator[str]], log: Log) -> None:
    """Refuses an empty split, and warns of a validation text that is too small to measure anything."""
    for split in ("train", "val"):
        if not any(documents(split)):
            raise ValueError(f"the {split} text of '{name}' is empty: give more text, or --val for validation")
    size = sum(map(_size, first(documents("val"), SMALL_VALIDATION_BYTES / 1e6)))
    if size < SMALL_VALIDATION_BYTES:
        log(f"warning: the validation text has only {size:,} bytes, so its loss says little: give more text, or --val")


def _by_number(texts: Iterator[str], megabytes: float) -> Iterator[tuple[bool, str]]:
    left = megabytes * 1e6
    for index, text in enumerate(texts):
        held_out = index % EVERY == EVERY // 2 and left > 0
        left -= _size(text) if held_out else 0
        yield held_out, text


def _tail(texts: Iterator[str], at: int, wanted: int) -> Iterator[tuple[bool, str]]:
    """Validation from byte `at` on, or from the next space if that is near. A short document is not cut."""
    before = 0
    for text in texts:
        size = _size(text)
        if before + size <= at or before >= at or 2 * size <= wanted:
            yield before + size > at, text
        else:
            cut = _cut(text, at - before)
            yield False, text[:cut]
            yield True, text[cut:]
        before += size


def _cut(text: str, at_byte: int) -> int:
    at = len(text.encode("utf-8")[:at_byte].decode("utf-8", "ignore"))
    space = SPACE.search(text, at, at + (len(text) - at) // 2)
    return space.start() if space else at


def _size(text: str) -> int:
    return len(text.encode("utf-8"))


def prepare(
    recipe: Resolved,
    out: Path,
    log: Log,
    tokenizer: Tokenizer | None = None,
    workers: int = 1,
    start_workers: StartWorkers = on_processes,
    check: Callable[[Tokenizer], None] = lambda tokenizer: None,
) -> Prepared:
    """Prepares everything that training needs of the text, with a tokenizer, the one that the recipe names, or one that
    is trained on the text. check: refuses a tokenizer, before the text is tokenized."""
    tokenizer = named_tokenizer(recipe.text.tokenizer, tokenizer, log)  # before anything is downloaded or read
    if is_tokens(recipe.data, out) and recipe.make_documents is None:
        public = public_data(recipe, out, log)
        tokenizer, train, val = open_tokens(recipe, log, tokenizer, public)
        text = text_fingerprint(recipe, out, public)
        facts = _facts(recipe, _name(recipe, public), tokenizer, train, val)
        origin = Origin(tokenizer.fingerprint, text, fingerprint(tokenizer.fingerprint, text))
        return Prepared(tokenizer, train, val, facts, origin, public)
    source = open_source(recipe, out, log)
    tokenizer = tokenizer or train_tokenizer(recipe, source, out, log)
    check(tokenizer)
    mark = fingerprint(tokenizer.fingerprint, source.fingerprint)
    known = [found for found in sorted((out / "data").glob(f"*-{mark[:8]}")) if prepared(found, mark)]
    folder = known[0] if known else out / "data" / f"{source.name}-{mark[:8]}"
    if known:
        log(f"tokens: {folder} is up to date")
    else:
        write = partial(write_shards, workers=workers, start_workers=start_workers)
        with alone_in(folder, log):
            for split in (split for split in ("val", "train") if not prepared(folder, mark, [split])):
                texts = (text for text in recorded(source.read(split), folder, split) if text)
                megabytes = source.megabytes() if split == "train" else None
                write(texts, tokenizer, folder, split, mark, log, megabytes=megabytes)
    train, val = (Corpus.open(folder, split, fingerprint=mark) for split in ("train", "val"))
    facts = _facts(recipe, source.name, tokenizer, train, val)
    if cleaning := read_records(folder):
        facts["data"]["cleaning"] = cleaning
    origin = Origin(tokenizer.fingerprint, source.fingerprint, mark, str(folder.relative_to(out)))
    return Prepared(tokenizer, train, val, facts, origin, source.public)


def text_fingerprint(recipe: Resolved, out: Path, public: PublicData | None = None) -> str:
    """The fingerprint of the recipe's text and of how it is split, without preparing it. public: its files, where it is
    a public data set of tokens that is open already."""
    if not is_tokens(recipe.data, out):
        return open_source(recipe, out).fingerprint
    listings = [listing for listing in token_listings(recipe, public or public_data(recipe, out)) if listing]
    digests = (content_fingerprint(listing.read, out, "text") for listing in listings)
    return fingerprint(str(recipe.text.val_megabytes), *digests)


def open_data(
    recipe: Resolved, run_dir: RunDir, origin: Origin, log: Log, stage: str, *, named: bool = False, workers: int = 1
) -> Prepared:
    """Opens the tokenizer and the shards that a stage began with; shards that are gone are made again.

    named: the user named the text in this command, so it must still be the same; else its shards are used, whatever the
    text is now. Raises ValueError if the tokenizer or the text is another one.
    """
    tokenizer = run_dir.tokenizer()
    require_same(origin, replace(origin, tokenizer=tokenizer.fingerprint), run_dir, stage)
    folder = None if origin.shards is None else run_dir.out / origin.shards
    if folder is None or origin.tokens is None or not prepared(folder, origin.tokens):
        data = prepare(recipe, run_dir.out, log, tokenizer, workers)
        instead = "put it back as it was" if folder is None else "its token shards are gone: put it back as it was"
        require_same(origin, replace(origin, text=data.origin.text), run_dir, stage, instead=instead)
        return data
    if named:
        others = "" if stage in STAGES else " and its other flags"  # which it does not take from the saved recipe
        instead = f"leave --data out (`{command_of(stage)} --resume {run_dir.flags}`{others})"
        found = replace(origin, text=text_fingerprint(recipe, run_dir.out))
        require_same(origin, found, run_dir, stage, instead=instead)
    log(f"tokens: {folder}, as the run began with them")
    train, val = (Corpus.open(folder, split, fingerprint=origin.tokens) for split in ("train", "val"))
    return Prepared(tokenizer, train, val, {}, origin)


def data_of_run(recipe: Resolved, run_dir: RunDir, log: Log, *stages: str) -> Prepared:
    """The run's text for evaluation: the shards that one of these stages (by default all) names, else its text."""
    for stage in stages or STAGES:
        origin = read_origin(run_dir.stage(stage))
        if origin is not None:
            return open_data(recipe, run_dir, origin, log, stage)
    return prepare(recipe, run_dir.out, log, run_dir.tokenizer())


def _name(recipe: Resolved, public: PublicData | None) -> str:
    """The name of the data, for file names and reports."""
    return public.name if public else (data_paths(recipe.data) or [Path()])[0].stem[:NAME_CHARACTERS] or "data"


def _facts(recipe: Resolved, name: str, tokenizer: Tokenizer, train: Corpus, val: Corpus) -> dict[str, Any]:
    built_in = recipe.data == "tinyworld"
    samples = corpus.kinds_of_text(recipe.seed) if built_in else {"validation text": sample(val, tokenizer)}
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
