"""Prepares a mixture: reads each source once, checks and tokenizes it into shards with masks, and joins the shards.

Each source has a folder of its own, `out/data/<source>-chat-<fingerprint>`, so another mixture of the same sources
prepares nothing. Of a file, the first fiftieth of the conversations that fit the context is held out; of a public set
of conversations, its test split. A conversation that equals a held-out one of any source is not trained on. `repeats`
chooses documents of the joined corpus by their index and copies no token; data/loader.py mixes their order.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from quern.data.packing import make_pieces
from quern.data.shards import Corpus
from quern.data.token_file import ShardWriter, fingerprint, prepared
from quern.generate import tools
from quern.mixture import sources, task_rows
from quern.mixture.sources import HELD_OUT_EVERY, Fetch, Log, OpenSource, open_source
from quern.mixture.task_rows import TaskRows, built_in_rows
from quern.recipe import Recipe, Resolved
from quern.records import read_json
from quern.temporaries import write_whole
from quern.terminal import Meter, counted
from quern.text import chat, conversations, data_sets, documents, formats, readers
from quern.text.documents import Conversation
from quern.text.tokenizer import Tokenizer

LEFT_OUT, HASHES = "left_out.json", "hashes.npy"
"""In the folder of a source: how many test rows were left out, and 8 bytes of hash of each conversation's tokens, split
after split."""


@dataclass(frozen=True)
class Mixture:
    """Training and held-out conversations, and a record of each source."""

    train: Corpus  # with repeats
    val: Corpus  # held out, without repeats
    sources: list[dict[str, Any]]
    """For each source its name and repeats, the `conversations` and `tokens` of an epoch, the conversations that are
    `held_out`, the `copies` of held-out ones that are not trained on, those that are `lost` because the context holds
    no reply of theirs, and the test rows of tasks that are `left_out`."""

    def lines(self) -> list[str]:
        """The sources for the user; none if there is a single one, read as it is."""
        first = self.sources[0]
        if len(self.sources) == 1 and first["repeats"] == 1 and not first["left_out"] and not first["copies"]:
            return []
        return [
            f"  {one['source']}: {counted(one['conversations'], 'conversation')}, {one['tokens']:,} tokens"
            + (f", each {one['repeats']:g} times" if one["repeats"] != 1 else "")
            + (f"; {one['left_out']:,} test rows of tasks left out" if one["left_out"] else "")
            + (f"; {one['copies']:,} copies of held-out conversations left out" if one["copies"] else "")
            + (f"; {one['lost']:,} of its conversations are lost" if one["lost"] else "")
            for one in self.sources
        ]


@dataclass
class _Checked:
    """The conversations of a split that hold no test row. left_out: how many of a public set did."""

    source: OpenSource
    rows: TaskRows
    left_out: int = field(default=0, init=False)

    def read(self, split: str) -> Iterator[Conversation]:
        for conversation in self.source.read(split):
            row = None if self.source.built_in else self.rows.find(conversation.messages)
            if row is None:
                yield conversation
            elif self.source.public:
                self.left_out += 1
            else:
                raise ValueError(
                    f"{conversation.place}: the conversation holds a test question, that of {row}: remove it, since a "
                    "model that has learned it cannot be tested on it"
                )


def prepare_mixture(recipe: Resolved, tokenizer: Tokenizer, out: Path, fetch: Fetch, log: Log) -> Mixture:
    """Prepares the conversations of a recipe.

    Args:
        recipe: Says the sources, the seed, the context, and the folder of test rows.
        fetch: Downloads a public data set and returns its files.

    Raises:
        ValueError: A conversation is wrong or holds a test row, or there are too few.
        FileNotFoundError: There is no such source.
        OSError: A file cannot be read or downloaded.
    """
    opened = [open_source(asked, recipe, out, fetch, log) for asked in recipe.conversation_sources]
    rows = _task_rows(recipe, opened, out)
    ready = [_prepared(source, rows, tokenizer, recipe, out) for source in opened]
    hidden = np.concatenate([one.hidden() for one in ready])
    found, train, val = [], [], []
    for number, one in enumerate(ready):
        whole, asked = one.splits[0], one.source.asked
        copied = np.isin(one.hashes[: whole.num_documents], hidden)
        learned = np.flatnonzero(~copied)
        train.append(whole.part(learned[_repeated(len(learned), asked.repeats, (recipe.seed, number))]))
        val.append(one.splits[1] if one.source.has_val else whole.part(one.held))
        found.append(
            {
                "source": asked.source,
                "repeats": asked.repeats,
                "conversations": train[-1].num_documents,
                "tokens": train[-1].num_tokens,
                "held_out": val[-1].num_documents,
                "copies": int(copied.sum()) - len(one.held),
                "lost": one.lost,
                "left_out": one.left_out,
            }
        )
    _refuse_few(recipe, *(sum(one[name] for one in found) for name in ("conversations", "held_out", "lost")))
    return Mixture(Corpus.join(train), Corpus.join(val), found)


@dataclass(frozen=True)
class _Prepared:
    """A source in shards: its splits, a hash of each conversation, those of its first split that are held out, and the
    numbers of the lost ones and of the test rows."""

    source: OpenSource
    splits: list[Corpus]
    hashes: np.ndarray
    held: np.ndarray
    lost: int
    left_out: int

    def hidden(self) -> np.ndarray:
        """The hashes of what no source may train on."""
        if self.source.has_val and not self.source.built_in:
            return self.hashes[self.splits[0].num_documents :]
        return self.hashes[self.held]


def _prepared(source: OpenSource, rows: TaskRows, tokenizer: Tokenizer, recipe: Resolved, out: Path) -> _Prepared:
    """Opens the shards of a source; reads and tokenizes the source if they are not whole."""
    modules = (chat, conversations, documents, formats, readers, tools, sources, task_rows)
    code = [inspect.getsource(module) for module in modules]
    marks = (*source.marks, str(source.public), "" if source.built_in else rows.fingerprint)
    mark = fingerprint(tokenizer.fingerprint, *marks, *code)
    folder = out / "data" / f"{source.name}-chat-{mark[:8]}"
    if not prepared(folder, mark, source.splits) or not all((folder / name).exists() for name in (LEFT_OUT, HASHES)):
        _tokenize(_Checked(source, rows), tokenizer, folder, mark)
    splits = [Corpus.open(folder, split, fingerprint=mark) for split in source.splits]
    # Something is learned from those with a reply in the context.
    pieces = make_pieces(splits[0], 0, splits[0].num_documents, recipe.model.context, recipe.sft.too_long)
    held = np.arange(0) if source.has_val else _held_out(splits[0], pieces.document, recipe.model.context)
    lost = splits[0].num_documents - len(pieces.document)
    left_out = read_json(folder / LEFT_OUT, int, "remove its folder")
    return _Prepared(source, splits, np.load(folder / HASHES), held, lost, left_out)


def check_mixture(recipe: Recipe, out: Path, fetch: Fetch) -> None:
    """Reads and checks every conversation of a recipe, and writes nothing. Raises as `prepare_mixture`."""
    opened = [open_source(asked, recipe, out, fetch, lambda line: None) for asked in recipe.conversation_sources]
    rows = _task_rows(recipe, opened, out)
    # The built-in sources have as many as are asked for.
    counts = [2 if one.built_in else sum(1 for _ in _Checked(one, rows).read(one.splits[0])) for one in opened]
    empty = [source for source, count in zip(opened, counts, strict=True) if not count]
    if empty:
        raise ValueError(_holds_none(empty[0]))
    _refuse_few(
        recipe, sum(counts), sum(count > 1 or source.has_val for source, count in zip(opened, counts, strict=True))
    )


def _refuse_few(recipe: Recipe, count: int, held_out: int, lost: int = 0) -> None:
    if count and held_out:
        return
    names = " and ".join(one.source for one in recipe.conversation_sources)
    missing = "to train on" if held_out else "to hold out"
    there = counted(count + held_out, "conversation")
    if lost:
        there += f", {lost} of them without a reply in the context of {recipe.model.context} tokens"
    raise ValueError(
        f"{names} holds {there}, none {missing}: fine-tuning needs a source with at least 2 different ones"
    )


def _holds_none(source: OpenSource) -> str:
    return f"{source.asked.source} holds 0 conversations: fine-tuning needs a source with at least 2 different ones"


def _task_rows(recipe: Recipe, opened: list[OpenSource], out: Path) -> TaskRows:
    """The test rows that files are compared with: of the named folder, of public sets that are there, and the built-in
    world's questions where the run learns that world."""
    rows = TaskRows()
    if recipe.sft.tests is not None:
        rows.read(Path(recipe.sft.tests), "--sft.tests")
    if all(source.built_in for source in opened):
        return rows
    for name in (name for name, known in data_sets.DATASETS.items() if known.kind in ("questions", "tests")):
        folder = out / "downloads" / name / "val"
        if any(folder.glob("*.parquet")):
            rows.read(folder, name)
    if recipe.data == "tinyworld" or recipe.has_built_in_conversations:
        built_in_rows(rows, recipe.seed)
    return rows


def _tokenize(checked: _Checked, tokenizer: Tokenizer, folder: Path, mark: str) -> None:
    source, tokens, hashes = checked.source, 0, array("Q")
    for split in source.splits:
        read = checked.read(split)
        first = next(read, None)
        if first is None:
            raise ValueError(_holds_none(source))
        with (
            ShardWriter(folder, split, vocab_size=tokenizer.vocab_size, bos=tokenizer.bos, fingerprint=mark) as writer,
            Meter(f"tokenizing {source.asked.source}", source.asked.limit, "conversations") as meter,
        ):
            finished = writer.documents  # by a writer that was stopped
            for number, conversation in enumerate(chain([first], read)):
                ids, learned = chat.render(tokenizer, conversation.messages)
                if number >= finished:
                    writer.add(ids, learned)
                hashes.append(_hash(ids))
                tokens += len(ids)
                meter.at(number + 1, f"{tokens / 1e6:.1f}M tokens")
            write_whole(folder / LEFT_OUT, json.dumps(checked.left_out))
            np.save(folder / HASHES, np.array(hashes, dtype=np.uint64))  # the shards are not valid yet


def _hash(ids: np.ndarray) -> int:
    return int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=8).digest(), "little")


def _held_out(corpus: Corpus, learning: np.ndarray, context: int) -> np.ndarray:
    """The conversations of a file that are held out: the first ones of those that fit the context, or where none
    fits, of those that teach something. One conversation alone is trained on."""
    fitting = learning[corpus.lengths[learning] <= context + 1]
    some = fitting if len(fitting) else learning
    return some[: max(1, len(some) // HELD_OUT_EVERY) if len(learning) > 1 else 0]


def _repeated(count: int, repeats: float, seed: tuple[int, ...]) -> np.ndarray:
    """The indices of an epoch's conversations. The part of `repeats` below 1 is a random choice by the seed."""
    whole = int(repeats)
    some = round((repeats - whole) * count) or (whole == 0)
    chosen = np.sort(np.random.default_rng(seed).permutation(count)[:some])
    return np.concatenate([np.tile(np.arange(count), whole), chosen]).astype(np.int64)
