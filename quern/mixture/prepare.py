"""Prepares a mixture: reads each source once, checks and tokenizes it into shards with masks, and joins the shards.

docs/fine-tuning.md, "What happens to them" and "Test rows are refused", says what is held out, left out and counted,
and which test rows of tasks are found (`TaskRows`). `repeats` chooses documents of the joined corpus by their index and
copies no token; data/loader.py mixes their order.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from quern.data.packing import make_pieces
from quern.data.shards import Corpus
from quern.data.token_file import ShardWriter, fingerprint, prepared
from quern.generate import tools
from quern.mixture import sources
from quern.mixture.sources import HELD_OUT_EVERY, Fetch, OpenSource, multiple_choice, open_source
from quern.recipe import Resolved
from quern.records import Natural, read_json
from quern.temporaries import alone_in, write_whole
from quern.terminal import Meter, counted
from quern.text import chat, conversations, documents, readers, repositories
from quern.text.chat import Message, parts
from quern.text.documents import Log, converted, place
from quern.text.sources import OF_ROWS, list_source
from quern.text.tinyworld import corpus
from quern.text.tokenizer import Tokenizer

FACTS = "conversations.json"
"""The file of `_Facts` in the folder of a source."""
CODE = (chat, conversations, documents, readers, tools, sources, sys.modules[__name__])
"""The modules on whose code the tokens of a source depend."""
NOTES = {
    "repeats": "each {:g} times",
    "left_out": "test rows of tasks left out: {:,}",
    "copies": "copies of held-out conversations left out: {:,}",
    "lost": "conversations lost: {:,}",
}


@dataclass(frozen=True)
class Mixture:
    """Training and held-out conversations, and a record of each source."""

    train: Corpus  # with repeats
    val: Corpus  # held out, without repeats
    sources: list[dict[str, Any]]
    """The name and repeats of each source, the `conversations` and `tokens` of an epoch, the conversations that are
    `held_out`, the `copies` of held-out ones that are not trained on, the ones that are `lost` because the context
    holds no reply of theirs, and the test rows of tasks that are `left_out`."""

    tests: list[str]  # the public test sets that they were compared with

    def lines(self) -> list[str]:
        """The sources for the user; none if there is a single one, read as it is."""
        found, usual = list[str](), {"repeats": 1}
        for one in self.sources:
            size = f"  {one['source']}: {counted(one['conversations'], 'conversation')}, {one['tokens']:,} tokens"
            notes = [note.format(one[key]) for key, note in NOTES.items() if one[key] != usual.get(key, 0)]
            found.append("; ".join([size, *notes]))
        first = self.sources[0]
        plain = len(found) == 1 and first["repeats"] == 1 and not first["left_out"] and not first["copies"]
        return [] if plain else found


class _Facts(TypedDict):
    hashes: list[Natural]  # hash of each conversation's tokens, split after split
    left_out: int  # test rows


@dataclass(frozen=True)
class _Prepared:
    """A source in shards."""

    whole: Corpus  # with the conversations that are held out of it
    val: Corpus
    hashes: np.ndarray  # hash of each conversation in `whole`
    hidden: np.ndarray  # the hashes of what no source may train on
    held: int  # how many of `whole` are held out
    lost: int
    left_out: int


def prepare_mixture(
    recipe: Resolved, tokenizer: Tokenizer, out: Path, fetch: Fetch, log: Log, tests: Sequence[str] | None = None
) -> Mixture:
    """Prepares the conversations of a recipe.

    tests: the public test sets to compare them with, of those that are there; None for all.

    Raises:
        ValueError: A conversation is wrong or holds a test row, or there are too few.
        FileNotFoundError: There is no such source.
        OSError: A file cannot be read or downloaded.
    """
    opened, rows, compared = _open(recipe, out, fetch, log, tests)
    ready = [_prepared(source, rows, tokenizer, recipe, out, log) for source in opened]
    hidden = np.concatenate([one.hidden for one in ready])
    found, train = [], []
    for number, (one, asked) in enumerate(zip(ready, recipe.conversation_sources, strict=True)):
        copied = np.isin(one.hashes, hidden)
        learned = np.flatnonzero(~copied)
        train.append(one.whole.part(learned[_repeated(len(learned), asked.repeats, (recipe.seed, number))]))
        found.append(
            {
                "source": asked.source,
                "repeats": asked.repeats,
                "conversations": train[-1].num_documents,
                "tokens": train[-1].num_tokens,
                "held_out": one.val.num_documents,
                "copies": int(copied.sum()) - one.held,
                "lost": one.lost,
                "left_out": one.left_out,
            }
        )
    _refuse_few(recipe, *(sum(one[name] for one in found) for name in ("conversations", "held_out", "lost")))
    return Mixture(Corpus.join(train), Corpus.join([one.val for one in ready]), found, compared)


def _open(
    recipe: Resolved, out: Path, fetch: Fetch, log: Log, tests: Sequence[str] | None
) -> tuple[list[OpenSource], TaskRows, list[str]]:
    """The sources, and the test rows that files are compared with: rows of the named folder, of the public sets that
    are there, which are named, and the built-in world's questions where the run learns that world."""
    opened, rows = [open_source(asked, recipe, out, fetch, log) for asked in recipe.conversation_sources], TaskRows()
    if recipe.sft.tests is not None:
        rows.read(Path(recipe.sft.tests), "--sft.tests")
    if all(source.built_in for source in opened):
        return opened, rows, []
    asked = repositories.DATASETS if tests is None else tests
    known = [name for name, known in repositories.DATASETS.items() if known.kind in ("questions", "tests")]
    folders = {name: out / "downloads" / name / "val" for name in known if name in asked}
    compared = [name for name, folder in folders.items() if any(folder.glob("*.parquet"))]
    for name in compared:
        rows.read(folders[name], name)
    if recipe.data == "tinyworld" or recipe.has_built_in_conversations:
        built_in_rows(rows, recipe.seed)
    return opened, rows, compared


def _read(source: OpenSource, split: str, rows: TaskRows, facts: _Facts) -> Iterator[list[Message]]:
    """The conversations of a split that hold no test row. Those of a public set that do are counted in `facts`."""
    for messages, where in source.read(split):
        row = None if source.built_in else rows.find(messages)
        if row is None:
            yield messages
        elif source.public:
            facts["left_out"] += 1
        else:
            raise ValueError(f"{where}: it holds a test question, that of {row}, which must not be learned: remove it")


def _refuse_few(recipe: Resolved, count: int, held_out: int, lost: int) -> None:
    if count and held_out:
        return
    there = counted(count + held_out, "conversation")
    if lost:
        there += f", {lost} of them without a reply in the context of {recipe.model.context} tokens"
    names = " and ".join(one.source for one in recipe.conversation_sources)
    raise _too_few(names, f"{there}, none {'to train on' if held_out else 'to hold out'}")


def _too_few(names: str, there_are: str) -> ValueError:
    return ValueError(f"{names} holds {there_are}: fine-tuning needs a source with at least 2 different ones")


def _prepared(
    source: OpenSource, rows: TaskRows, tokenizer: Tokenizer, recipe: Resolved, out: Path, log: Log
) -> _Prepared:
    """Opens the shards of a source; reads and tokenizes the source if they are not whole."""
    marks = (*source.marks, str(source.public), "" if source.built_in else rows.fingerprint)
    mark = fingerprint(tokenizer.fingerprint, *marks, *map(inspect.getsource, CODE))
    folder = out / "data" / f"{source.name}-chat-{mark[:8]}"
    with alone_in(folder, log):
        if not prepared(folder, mark, source.splits) or not (folder / FACTS).exists():
            _tokenize(source, rows, tokenizer, folder, mark)
    whole, *val = (Corpus.open(folder, split, fingerprint=mark) for split in source.splits)
    count = whole.num_documents
    # Something is learned from those with a reply in the context.
    learning = make_pieces(whole, 0, count, recipe.model.context, recipe.sft.too_long).document
    held = np.arange(0) if val else _held_out(whole, learning, recipe.model.context)
    facts = read_json(folder / FACTS, _Facts, "remove it, and it is made again")
    hashes = np.array(facts["hashes"])
    hidden = hashes[count:] if val and not source.built_in else hashes[held]
    own = val[0] if val else whole.part(held)
    return _Prepared(whole, own, hashes[:count], hidden, len(held), count - len(learning), facts["left_out"])


def _tokenize(source: OpenSource, rows: TaskRows, tokenizer: Tokenizer, folder: Path, mark: str) -> None:
    tokens, facts = 0, _Facts(hashes=[], left_out=0)
    known = {"vocab_size": tokenizer.vocab_size, "bos": tokenizer.bos, "fingerprint": mark}
    for split in source.splits:
        read = _read(source, split, rows, facts)
        first = next(read, None)
        if first is None:
            raise _too_few(source.asked.source, "0 conversations")
        with (
            ShardWriter(folder, split, **known) as writer,
            Meter(f"tokenizing {source.asked.source}", source.asked.limit, "conversations") as meter,
        ):
            finished = writer.documents  # by a writer that was stopped
            for number, messages in enumerate(chain([first], read)):
                ids, learned = chat.render(tokenizer, messages)
                if number >= finished:
                    writer.add(ids, learned)
                digest = hashlib.blake2b(ids.tobytes(), digest_size=7).digest()
                facts["hashes"].append(int.from_bytes(digest, "little"))
                tokens += len(ids)
                meter.at(number + 1, f"{tokens / 1e6:.1f}M tokens")
            # The shards are not valid yet.
            write_whole(folder / FACTS, json.dumps(facts))


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


# Test rows of tasks --------------------------------------------------------------------------------------------------

SHORTEST = 8
"""A question of so many words is found anywhere in a message, a shorter one only as a whole message of the user."""
BUILT_IN_QUESTIONS = 500
"""Held-out questions of each kind of the built-in world that are compared: the first ones of the run's seed."""
QUESTION_KEYS = ("question", "query", "prompt", "context_options", "context", "messages")
"""The keys that can hold the question of a test row; the first one that a row has counts."""
TRAINING_FILE = re.compile(r"(^|[^a-z])train(ing)?([^a-z]|$)")
_WORD = re.compile(r"\w+|[+\-*/=<>^%×÷−]")
_LABEL = re.compile(r"\A\s*(question|problem)\s*:\s*", re.IGNORECASE)


class TaskRows:
    """A set of test rows. fingerprint: SHA-256 (hex) of all questions."""

    def __init__(self) -> None:
        self._short: dict[bytes, str] = {}
        self._long: dict[str, dict[int, dict[bytes, str]]] = {}  # first words → number of words → digest → row
        self._digest = hashlib.sha256()

    @property
    def fingerprint(self) -> str:
        return self._digest.hexdigest()

    def add(self, question: str, row: str) -> None:
        """Adds a question. row: the row and the task, for messages."""
        words = _words(_LABEL.sub("", question))
        if not words:
            return
        digest = _hash(words)
        self._digest.update(digest)
        if len(words) < SHORTEST:
            self._short.setdefault(digest, row)
        else:
            self._long.setdefault(" ".join(words[:SHORTEST]), {}).setdefault(len(words), {}).setdefault(digest, row)

    def read(self, folder: Path, task: str) -> None:
        """Adds the rows of the test files in a folder. Files with the word "train" or "training" in their name are not
        read. Raises as `list_source`, and ValueError for a file that is damaged or a row that has no question."""
        for path in list_source(folder, OF_ROWS).files:
            if TRAINING_FILE.search(path.name.lower()):
                continue
            for found, _, record in converted([path], (*QUESTION_KEYS, "choices"), lambda row: [*_questions(row)]):
                for question in found:
                    self.add(question, f"{place(path, record)} ({task})")

    def find(self, messages: Sequence[Message]) -> str | None:
        """The test row that a conversation holds; None if it holds none."""
        for message in messages:
            words = _words(" ".join(part["text"] for part in parts(message)))
            short = len(words) < SHORTEST and message["role"] == "user"
            if short and (row := self._short.get(_hash(words))):
                return row
            for at in range(len(words) - SHORTEST + 1):
                for size, rows in self._long.get(" ".join(words[at : at + SHORTEST]), {}).items():
                    if at + size <= len(words) and (row := rows.get(_hash(words[at : at + size]))):
                        return row
        return None


def built_in_rows(rows: TaskRows, seed: int) -> None:
    """Adds the held-out questions of the built-in world."""
    for kind in (kind for kind in corpus.QUESTION_KINDS if kind != "small_talk"):  # anyone may say hello
        for number, question in enumerate(corpus.questions(seed, kind, BUILT_IN_QUESTIONS)):
            rows.add(question.question, f"question {number + 1} of tinyworld/{kind}")


def _questions(value: Any) -> Iterator[str]:
    found = next((value[key] for key in QUESTION_KEYS if value.get(key)), None) if isinstance(value, Mapping) else None
    if isinstance(found, str):
        options = value.get("choices")
        if isinstance(options, Mapping):  # ARC's: {"text": […], "label": […]}
            options = options.get("text")
        if not isinstance(options, list) or len(_words(found)) >= SHORTEST:
            yield found
        if isinstance(options, list):
            yield multiple_choice(found, options)
    elif isinstance(found, list) and found:
        for one in found:
            content = one.get("content") if isinstance(one, Mapping) and one.get("role") == "user" else one
            if isinstance(content, str) and (content is one or len(_words(content)) >= SHORTEST):
                yield content
    else:
        raise ValueError(f"no test row: it has none of {', '.join(QUESTION_KEYS)}")


def _words(text: str) -> list[str]:
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def _hash(words: Iterable[str]) -> bytes:
    return hashlib.blake2b(" ".join(words).encode("utf-8", "surrogatepass"), digest_size=16).digest()
