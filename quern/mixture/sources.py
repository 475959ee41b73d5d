"""Opens a source of conversations: the built-in world, a public data set, or a file or folder of the user.

Rows of question sets are conversations too:

    GSM8K           {"question": "…", "answer": "…<<48/2=24>>24…\n#### 72"}
    multiple choice {"question": "…", "choices": ["…", …], "answer": 2 or "C"}, as MMLU's rows

Any other record is one of the shapes of text/conversations.py; docs/fine-tuning.md says what becomes of them. A source
is known by the contents of its files, and the built-in ones by their seed, their size and their code.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from quern.generate.tools import ToolError, calculate
from quern.recipe import BUILT_IN_CONVERSATIONS, ConversationSource, Recipe
from quern.temporaries import sha256_of
from quern.terminal import silent
from quern.text import conversations, repositories, tinyworld
from quern.text.chat import ContentPart, Message, parts
from quern.text.documents import Log, converted, place, refuse_surrogates
from quern.text.readers import format_of
from quern.text.repositories import PREFIX, TRAIN, local_copy
from quern.text.sources import Listing, Where, content_fingerprint, list_talks
from quern.text.tinyworld import chat, corpus, skills
from quern.text.tinyworld.prose import Pen
from quern.text.tinyworld.skills import exchange

ROW = ("question", "choices", "answer")
KEYS = (*conversations.KEYS, *ROW)
"""The keys that are read from a record."""
_MARK = re.compile(r"<<([^<>]*)=([^<>=]*)>>")


def to_messages(record: Any, ignored: Counter[str] | None = None) -> list[Message]:
    """Converts a row of a question set, or a record of another shape, to a conversation; see conversations.py. Raises
    ValueError for a record that has none of the shapes."""
    if isinstance(record, Mapping) and not any(
        record.get(key) for key in (*conversations.LISTS, *conversations.ALPACA)
    ):
        question, choices, answer = (record.get(key) for key in ROW)
        rest = {key: value for key, value in record.items() if key not in ROW}
        if isinstance(question, str) and isinstance(choices, list):
            turns = exchange(multiple_choice(question, choices), _letter(answer, choices))
            return conversations.to_messages({**rest, "messages": turns}, ignored)
        if isinstance(question, str) and choices:
            raise ValueError(f'its "choices" are {type(choices).__name__}: give a list of texts, in .jsonl or .parquet')
        if isinstance(question, str) and isinstance(answer, str):
            return conversations.to_messages({**rest, "messages": exchange(question, word_problem(answer))}, ignored)
    return conversations.to_messages(record, ignored)


def multiple_choice(question: str, choices: Sequence[str]) -> str:
    """A question with lettered options; the reply is the letter."""
    return "\n".join(
        [question, *(f"{letter}) {choice}" for letter, choice in zip(ascii_uppercase, choices, strict=False))]
    )


def word_problem(answer: str) -> list[ContentPart]:
    """The reply to a problem of GSM8K: text, with calls of the calculator and their outputs."""
    parts: list[ContentPart] = []
    text, end = "", 0
    for mark in _MARK.finditer(answer):
        text, end = text + answer[end : mark.start()], mark.end()
        output = _output(mark[1], mark[2])
        if output is not None:
            if text:
                parts.append({"type": "text", "text": text})
            parts += [{"type": "tool", "text": mark[1].strip()}, {"type": "output", "text": output}]
            text = ""
    parts.append({"type": "text", "text": text + answer[end:]})
    return parts


def _output(expression: str, stated: str) -> str | None:
    """The calculator's output for the expression; None unless it is the number that the row states."""
    try:
        found = calculate(expression.strip())
        return found if found == calculate(stated.replace("$", "")) else None
    except ToolError:
        return None


def _letter(answer: Any, choices: Sequence[str]) -> str:
    letters = ascii_uppercase[: len(choices)]
    if isinstance(answer, int) and 0 <= answer < len(letters):
        return letters[answer]
    if isinstance(answer, str) and len(answer) == 1 and answer in letters:
        return answer
    raise ValueError(f"the answer is {answer!r}: give one of the {len(choices)} choices by number, from 0, or letter")


HELD_OUT_EVERY = 50
"""One conversation in so many is held out for validation."""
FEWEST_HELD_OUT = 8
"""The least number of held-out conversations of a built-in source, which are extra ones."""
ALL = "all"
"""The split of a source that has no splits of its own."""

Conversation = tuple[list[Message], str]
"""A conversation, and its place for messages: its file and record."""
Fetch = Callable[[ConversationSource], Mapping[str, Where]]
"""A public data set → the files of its splits "train" and "val", downloaded if needed."""


@dataclass(frozen=True)
class OpenSource:
    """A source that can be read."""

    asked: ConversationSource
    marks: tuple[str, ...]  # its conversations are the same if these are
    splits: tuple[str, ...]  # "train" and "val"; or ALL, of which the first conversations are held out
    read: Callable[[str], Iterator[Conversation]]
    public: bool = False  # a set that others made: test rows in it are left out. In a user's file they are an error.

    @property
    def built_in(self) -> bool:
        return self.asked.source in BUILT_IN_CONVERSATIONS

    @property
    def name(self) -> str:
        """A name for its folder."""
        stem = Path(self.asked.source).name.partition(".")[0]
        return "".join(c if c.isalnum() or c in "-_" else "-" for c in stem)[:40] or "own"


def open_source(asked: ConversationSource, recipe: Recipe, out: Path, fetch: Fetch, log: Log) -> OpenSource:
    """Opens a source, and downloads it if it is a public set. Raises as `prepare_mixture`.

    recipe: says the seed and the size of the built-in sources; out: has the cache of digests.
    """
    if asked.source in BUILT_IN_CONVERSATIONS:
        _refuse_idle(asked, split=True, column=True)
        return _built_in(asked, recipe)
    if Path(asked.source).exists():
        return _of_files(asked, {ALL: own_files(asked, out, log)}, out, log)
    require_source(asked)
    known = repositories.DATASETS.get(asked.source)
    _refuse_idle(asked, split=known is not None)
    files = {split: list_talks(where) for split, where in fetch(asked).items() if where}
    splits = files if known is not None and known.kind == "conversations" else {ALL: files["train"]}
    return _of_files(asked, splits, out, log, public=True)


def require_source(asked: ConversationSource) -> None:
    """Raises FileNotFoundError, which says what else there is, for a source that is neither a path nor known."""
    named = asked.source in BUILT_IN_CONVERSATIONS or asked.source.startswith(PREFIX) or Path(asked.source).exists()
    known = repositories.DATASETS.get(asked.source)
    if not named and (known is None or known.kind not in ("conversations", "questions")):
        sets = [name for name, one in repositories.DATASETS.items() if one.kind in ("conversations", "questions")]
        raise FileNotFoundError(
            f"--conversations {asked.source}: there is no such {'data set' if known else 'file, folder or data set'} "
            f"of conversations; use a path, one of {', '.join((*BUILT_IN_CONVERSATIONS, *sets))}, or hf:OWNER/NAME"
        )


def own_files(asked: ConversationSource, out: Path, log: Log = silent) -> Listing:
    """The user's file or folder without the outputs, or the files of the split in a copy of a public set."""
    path = Path(asked.source)
    listing = list_talks(path, out)
    copy = local_copy(path, listing, asked.split, "conversations", lambda line: log(f"conversations: {line}"))
    _refuse_idle(asked, split=copy is None)
    return list_talks(copy[0]) if copy else listing


def _refuse_idle(asked: ConversationSource, *, split: bool, column: bool = False) -> None:
    """Raises ValueError for a split other than the default, or a column, where the source has no use for it."""
    if split and asked.split != TRAIN:
        raise ValueError(
            f"--conversations {asked.source}: split={asked.split} is for hf:OWNER/NAME and folders that are copies of "
            "such data sets: leave it out"
        )
    if column and asked.column is not None:
        raise ValueError(f"--conversations {asked.source}: column={asked.column} is for files: leave it out")


def _of_files(
    asked: ConversationSource, splits: Mapping[str, Listing], out: Path, log: Log, public: bool = False
) -> OpenSource:
    """splits: split → its files."""
    listed = [file for listing in splits.values() for file in listing.read]
    content = content_fingerprint(listed, out, "conversations")
    formats = [format_of(file.path) for file in listed]
    marks = ("files", content, *splits, *formats, str(asked.limit), str(asked.column))

    def read(split: str) -> Iterator[Conversation]:
        return read_rows(splits[split], log, asked.column, asked.limit)

    return OpenSource(asked, marks, tuple(splits), read, public)


def read_rows(
    listing: Listing, log: Log | None = None, column: str | None = None, limit: int | None = None
) -> Iterator[Conversation]:
    """Reads the conversations of files, validated. Skips those without an assistant turn to learn.

    Args:
        listing: The files, by `list_talks`.
        log: Called with lines about read, ignored and skipped files, records and keys.
        column: Has the lists of messages; None for lists of all shapes. In WhatsApp's export, the person whom the model
            learns to write as.
        limit: The most conversations to read.

    Raises:
        ValueError, OSError: The errors of `converted`, or no conversation has an assistant turn to learn.
    """
    say = log or silent
    for line in listing.lines("conversations"):
        say(line)
    skipped, count, first, ignored = 0, 0, "", Counter[str]()

    def messages_of(value: Any) -> list[list[Message]]:
        if isinstance(value, str):
            found = conversations.of_whatsapp(value, column)
        elif column is None:
            found = [to_messages(value, ignored)]
        elif isinstance(value, Mapping) and column in value:
            rest = {key: one for key, one in value.items() if key != column}
            found = [conversations.to_messages({**rest, "messages": value[column]}, ignored)]
        else:
            raise ValueError(f"it has no column or key '{column}'")
        refuse_surrogates(json.dumps(found, ensure_ascii=False))
        return found

    told = log and (lambda line: say(f"conversations: {line}"))
    keys = KEYS if column is None else (column, *conversations.BESIDE)
    # whole: a day of WhatsApp's is never cut
    several = converted(listing.files, keys, messages_of, told, whole=True, refusal="not a conversation: ")
    for messages, path, record in ((one, path, record) for talks, path, record in several for one in talks):
        if limit is not None and count >= limit:
            break
        if any(_learned(message) for message in messages):
            count += 1
            yield messages, place(path, record)
        else:
            skipped += 1
            first = first or place(path, record)
    if skipped and not count:
        raise ValueError(f"{first}: no assistant's turn of the source is learned: add replies, or give them weight 1")
    if skipped:
        say(f"conversations: skipped {skipped:,} without an assistant's turn to learn, the first is {first}")
    if ignored:
        named = ", ".join(f"{key!r} in {rows:,}" for key, rows in ignored.most_common(conversations.NAMES_SHOWN))
        say(f"conversations: keys that are not used, with the number of records: {named}")


def _learned(message: Message) -> bool:
    """Whether a part of a message, or its end, is learned."""
    own = (part.get("weight") for part in parts(message) if part["type"] != "output")
    return message["role"] == "assistant" and any(weight != 0 for weight in (message.get("weight"), *own))


def _built_in(asked: ConversationSource, recipe: Recipe) -> OpenSource:
    seed, wanted = recipe.seed, recipe.text.tinyworld_conversations
    train = min(wanted, asked.limit or wanted)
    counts = {"train": train, "val": max(FEWEST_HELD_OUT, train // HELD_OUT_EVERY)}

    def read(split: str) -> Iterator[Conversation]:
        made = corpus.conversations if asked.source == "tinyworld" else spelling
        for number, messages in enumerate(made(seed, counts[split], split)):
            yield messages, f"{asked.source}, conversation {number + 1}"

    # Another version of the world makes other conversations.
    code = map(sha256_of, sorted(Path(tinyworld.__path__[0]).glob("*.*")))
    return OpenSource(asked, (asked.source, str(seed), str(train), *code), ("train", "val"), read)


def spelling(seed: int, count: int, split: str) -> Iterator[list[Message]]:
    """Yields `count` conversations in which a word is spelled or its letters are counted, in turn.

    They use the words and wordings of the built-in world, without those that its evaluation asks for.
    """
    for index in range(count):
        exercise = skills.EXERCISES[("spelling", "counting")[index % 2]]
        yield chat.of_exercise(exercise(Pen(f"spelling:{split}:{seed}:{index}")))
