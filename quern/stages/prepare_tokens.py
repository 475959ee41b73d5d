"""Data that is tokens already: .bin files, read as they are and written, with the tokenizer that made them beside them.

A folder with text is text, and a .bin in it is ignored. Folders of token shards may also have a README, .json files,
settings and shell scripts, which are no text there. They may have code, too, if each .bin begins as modded-nanogpt's
do, or has "train" or "val" in its name, as nanoGPT's have.

A source is .bin files, folders of them (modded-nanogpt's, nanoGPT's, our own shards) or a public set. Validation is
`val` (a file or folder too), else the files with the word "val" in their name, else documents held out from the rest;
of it, the first `text.val_megabytes`, at four bytes a token. The tokenizer is `text.tokenizer`, or comes with the
public set, or is beside the files, or is GPT-2's if the ids are.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from quern.data.bin_files import BinFormat, read_bin, write_bin
from quern.data.shards import Corpus
from quern.data.token_file import MAGIC, map_tokens
from quern.recipe import Resolved
from quern.runs.public_data import PublicData
from quern.stages.tokenizers import named_tokenizer
from quern.temporaries import naming
from quern.terminal import Meter, counted
from quern.text import repositories
from quern.text.documents import Log
from quern.text.readers import FORMATS, format_of
from quern.text.sources import CODE, Listing, list_source
from quern.text.tokenizer import Tokenizer
from quern.validate import data_paths

HELD_OUT_EVERY = 20
SAMPLED_DOCUMENTS = 50
GPT2_BOS, LOOKED_AT = 50_256, 1 << 22
VALIDATION = re.compile(r"(?<![a-z])val(id(ation)?)?(?![a-z])")
"""The mark in the name of a file for validation: a word, not the letters in "retrieval"."""
TRAINING = re.compile(r"(?<![a-z])train(ing)?(?![a-z])")
BESIDE_TOKENS = {".bin", ".json", ".toml", ".yaml", ".yml", ".ini", ".cfg", ".sh", ".bash"}
"""Formats of token files, and of settings and scripts that come with them."""


def is_tokens(data: str, out: Path | None = None) -> bool:
    """Whether `--data` names tokens rather than text. out: the output folder, which may be in a folder of tokens."""
    paths = data_paths(data)
    if paths is None:
        return data in repositories.DATASETS and repositories.DATASETS[data].kind == "tokens"
    return all(_holds_tokens(path, out) if path.is_dir() else path.suffix == ".bin" for path in paths)


def _holds_tokens(folder: Path, out: Path | None) -> bool:
    found = [file for file in folder.glob("[!.]*.bin") if file.is_file()]
    paths = list_source(folder, (*FORMATS, *CODE, ".bin"), apart=out).files if found else []
    readmes = ("readme.md", "readme.rst")
    kinds = {format_of(path) for path in paths if path.name.lower() not in readmes} - BESIDE_TOKENS
    return bool(found) and (not kinds or kinds <= {*CODE} and all(map(_looks_like_tokens, found)))


def _looks_like_tokens(file: Path) -> bool:
    name = file.name.lower()
    return bool(TRAINING.search(name) or VALIDATION.search(name)) or MAGIC in np.fromfile(file, "<i4", 1)


def open_tokens(
    recipe: Resolved, log: Log, tokenizer: Tokenizer | None, public: PublicData | None
) -> tuple[Tokenizer, Corpus, Corpus]:
    """Opens the recipe's token files. Returns (tokenizer, training corpus, validation corpus).

    tokenizer: the run's, or the one that the recipe names; None for the one beside the files. Raises FileNotFoundError
    for a file that is missing, ValueError for no tokenizer, or too little to hold some out.
    """
    listed, other = token_listings(recipe, public)
    for line in listed.lines("tokens"):
        log(line)
    if tokenizer is None:
        name = str(public.tokenizer) if public else _unnamed_tokenizer(recipe, listed.files)
        tokenizer = named_tokenizer(name, None, log)
    assert tokenizer is not None
    train, val = listed.files, other.files if other else []
    if not val:
        val = [path for path in train if VALIDATION.search(path.name.lower())]
        train = [path for path in train if path not in val]
    if not train:
        raise FileNotFoundError(f"--data {recipe.data}: every file there is for validation, none is left to train on")
    known = {"bos": tokenizer.bos, "vocab_size": tokenizer.vocab_size}
    corpus = read_bin(*train, **known)
    if corpus.skipped_tokens:
        log(f"tokens: {corpus.skipped_tokens:,} before the first document of a file belong to none and are not read")
    most = int(recipe.text.val_megabytes * 1e6 / repositories.BYTES_PER_TOKEN)
    if val:
        held_out = read_bin(*val, **known)
        return tokenizer, corpus, held_out.part(_first(held_out, np.arange(held_out.num_documents), most))
    chosen = _first(corpus, np.arange(HELD_OUT_EVERY // 2, corpus.num_documents, HELD_OUT_EVERY), most)
    if not chosen.size:
        raise ValueError(f"--data {recipe.data} holds too few documents to hold some out: name a file with --val")
    rest = np.setdiff1d(np.arange(corpus.num_documents), chosen)
    return tokenizer, corpus.part(rest), corpus.part(chosen)


def _unnamed_tokenizer(recipe: Resolved, files: Sequence[Path]) -> str:
    """The tokenizer beside token files, or "gpt2" if their ids are GPT-2's."""
    for path in (files[0].parent / "tokenizer.json", *sorted(files[0].parent.glob("*.tiktoken"))):
        if path.is_file():
            return str(path)
    ids = map_tokens(files[0], headerless=True)[:LOOKED_AT]
    if ids.max() == GPT2_BOS:  # its delimiter, the last one of its ids
        return "gpt2"
    raise ValueError(
        f"--data {recipe.data} is tokens already, and evaluation and chat need the tokenizer that made them: name "
        "its file with --text.tokenizer, a tokenizer.json of quern's or of Hugging Face, or a vocabulary of "
        "tiktoken's such as r50k_base.tiktoken"
    )


def write_tokens(
    splits: dict[str, Corpus], tokenizer: Tokenizer, folder: Path, name: str, form: BinFormat, log: Log
) -> None:
    """Writes prepared tokens as files of another program (`write_bin`), with the tokenizer beside them."""
    total = sum(corpus.num_tokens for corpus in splits.values())
    with naming(folder), Meter("writing tokens", total / 1e6, "M tokens") as meter:
        files = write_bin(splits, folder, name, form, lambda done: meter.at(done / 1e6))
        path = tokenizer.save(folder / "tokenizer.json")
    flags = shlex.join(["--data", str(folder), "--text.tokenizer", str(path)])
    log(f"tokens: {total:,} in {counted(len(files), 'file')} → {folder}; to read them: {flags}")


def sample(corpus: Corpus, tokenizer: Tokenizer) -> str:
    """The text of the first documents."""
    found = (corpus.gather(i)[1:].tolist() for i in range(min(SAMPLED_DOCUMENTS, corpus.num_documents)))
    return "\n".join(tokenizer.decode(ids) for ids in found)


def _first(corpus: Corpus, documents: np.ndarray, tokens: int) -> np.ndarray:
    """So many of the documents, in order, that they hold about as many tokens; one at least."""
    before = np.cumsum(corpus.lengths[documents]) - corpus.lengths[documents]
    return documents[before < max(1, tokens)]


def token_listings(recipe: Resolved, public: PublicData | None) -> tuple[Listing, Listing | None]:
    """The recipe's token files, and those that are named for validation."""
    train = list_source(public.train, (".bin",)) if public else _listing(recipe.data)
    val = _listing(recipe.val) if recipe.val else list_source(public.val, (".bin",)) if public else None
    return train.without(val) if val else train, val


def _listing(data: str) -> Listing:
    """The .bin files that are named, and the ones directly in a named folder, not in its subfolders."""
    paths = data_paths(data) or [Path(data)]
    missing = f"{data}: there is no .bin file of that name, nor one in a folder of that name"
    try:
        found = list_source(paths, (".bin",))
    except (FileNotFoundError, ValueError) as error:
        raise FileNotFoundError(missing) from error
    here = tuple(entry for entry in found.read if {entry.path, entry.path.parent} & {*paths})
    if not here:
        raise FileNotFoundError(missing)
    return Listing(here, tuple(entry for entry in (*found.ignored, *found.read) if entry not in here))
