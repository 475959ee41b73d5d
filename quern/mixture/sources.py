"""Opens a source of conversations: the built-in world, a public data set, or a file or folder of the user.

Only the training files of a public set are read. Files are read record by record, so no source is in memory. A source
is known by the contents of its files, and the built-in ones by their seed, their size and their code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from quern.mixture import questions
from quern.recipe import BUILT_IN_CONVERSATIONS, ConversationSource, Recipe
from quern.terminal import Meter
from quern.text import tinyworld
from quern.text.chat import Message
from quern.text.content import content_fingerprint
from quern.text.data_sets import DATASETS
from quern.text.documents import CONVERSATION_FORMATS, Conversation, conversation_rows
from quern.text.sources import format_of, list_source
from quern.text.tinyworld import chat, corpus, skills
from quern.text.tinyworld.prose import Pen

HELD_OUT_EVERY = 50
"""One conversation in so many is held out for validation."""
FEWEST_HELD_OUT = 8
"""Of a built-in source, whose held-out conversations are extra ones."""
SETS = tuple(name for name, known in DATASETS.items() if known.kind in ("conversations", "questions"))
ALL = "all"
"""The split of a source that has no splits of its own."""

Log = Callable[[str], None]
Fetch = Callable[[str], Path]
"""The name of a public data set → its folder, downloaded if needed."""


@dataclass(frozen=True)
class OpenSource:
    """A source that can be read.

    Args:
        asked: What the recipe says of it.
        marks: What its conversations depend on; they are the same if the marks are.
        splits: "train" and "val", or ALL.
        read: Yields the conversations of a split.
        public: A set that others made: test rows in it are left out. In a user's file they are an error.
    """

    asked: ConversationSource
    marks: tuple[str, ...]
    splits: tuple[str, ...]
    read: Callable[[str], Iterator[Conversation]]
    public: bool = False

    @property
    def built_in(self) -> bool:
        return self.splits != (ALL,)

    @property
    def name(self) -> str:
        """A name for its folder."""
        stem = Path(self.asked.source).name.partition(".")[0]
        return "".join(c if c.isalnum() or c in "-_" else "-" for c in stem)[:40] or "own"


def open_source(asked: ConversationSource, recipe: Recipe, out: Path, fetch: Fetch, log: Log) -> OpenSource:
    """Opens a source, and downloads it if it is a public set.

    Args:
        asked: The source.
        recipe: Says the seed and the size of the built-in sources.
        out: The output folder, which has the cache of digests.
        fetch: Downloads a public set.
        log: Takes lines on read, ignored and skipped files.

    Raises:
        FileNotFoundError: There is no such source; the message names what would work.
        ValueError: The data set holds no conversations.
        OSError: A file cannot be downloaded or read.
    """
    if asked.source in BUILT_IN_CONVERSATIONS:
        return _built_in(asked, recipe)
    path, public = Path(asked.source), False
    if not path.exists():
        if asked.source not in SETS:
            kind = "data set" if asked.source in DATASETS else "file, folder or data set"
            raise FileNotFoundError(
                f"--conversations {asked.source}: there is no such {kind} of conversations; use a path, or one of "
                f"{', '.join((*BUILT_IN_CONVERSATIONS, *SETS))}"
            )
        path, public = fetch(asked.source) / "train", True
    files = list_source(path, CONVERSATION_FORMATS)
    megabytes = sum(entry.size for entry in files.read) / 1e6
    with Meter("looking for changes in the conversations", megabytes, "MB") as meter:
        cache = out / "data" / "digests.json"
        content = content_fingerprint(files.files, cache, lambda done: meter.at(done / 1e6))
    marks = ("files", content, *map(format_of, files.files), str(asked.limit))

    def read(split: str) -> Iterator[Conversation]:
        return islice(read_rows(path, log), asked.limit)

    return OpenSource(asked, marks, (ALL,), read, public)


def read_rows(path: Path, log: Log | None = None) -> Iterator[Conversation]:
    """The conversations of a file or a folder; rows of question sets count as conversations."""
    return conversation_rows(path, log, questions.to_messages, questions.KEYS)


def _built_in(asked: ConversationSource, recipe: Recipe) -> OpenSource:
    seed, wanted = recipe.seed, recipe.text.tinyworld_conversations
    train = min(wanted, asked.limit or wanted)
    counts = {"train": train, "val": max(FEWEST_HELD_OUT, train // HELD_OUT_EVERY)}

    def read(split: str) -> Iterator[Conversation]:
        made = corpus.conversations if asked.source == "tinyworld" else spelling
        for number, messages in enumerate(made(seed, counts[split], split)):
            yield Conversation(messages, f"{asked.source}, conversation {number + 1}")

    return OpenSource(asked, (asked.source, str(seed), str(train), _code()), ("train", "val"), read)


def spelling(seed: int, count: int, split: str) -> Iterator[list[Message]]:
    """Yields `count` conversations in which a word is spelled or its letters are counted, in turn.

    They use the words and wordings of the built-in world, without those that its evaluation asks for.
    """
    for index in range(count):
        exercise = skills.EXERCISES[("spelling", "counting")[index % 2]]
        yield chat.of_exercise(exercise(Pen(f"spelling:{split}:{seed}:{index}")))


def _code() -> str:
    """SHA-256 (hex) of the built-in world: another version of it makes other conversations."""
    digest = hashlib.sha256()
    for path in sorted(Path(tinyworld.__path__[0]).glob("*.*")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
