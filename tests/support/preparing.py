"""Prepares a text in a process of its own, which ends itself by SIGKILL at a chosen event.

    python tests/support/preparing.py TEXTS TOKENIZER FOLDER WORKERS [EVENT]

TEXTS is a JSON list of documents. Events are the calls that the writer of shards, its files and its processes make or
receive, of Python and of C functions alike, as Python's profiler sees them: before each write, fsync and rename there
is one. Prints as JSON how many events there were, and how many documents this process encoded.
"""

import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import quern
from quern.data.token_file import prepared
from quern.text.encode.pool import write_shards
from quern.text.tokenizer import Tokenizer

ROOT = Path(quern.__file__).parent
WATCHED = tuple(str(ROOT / part) for part in ("data", "text/encode", "temporaries.py"))
SHARD_TOKENS, UNIT_CHARACTERS = 997, 700


class Events:
    """A profile function: counts events, and kills this process at one of them."""

    def __init__(self, kill: int | None) -> None:
        self.kill, self.count, self.encoded = kill, 0, 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if frame.f_code is Tokenizer.encode_array.__code__ and event == "call":
            self.encoded += 1
        if not frame.f_code.co_filename.startswith(WATCHED):
            return
        self.count += 1
        if self.count == self.kill:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    texts = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    tokenizer, folder, workers = Tokenizer.load(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    events = Events(int(sys.argv[5]) if len(sys.argv) > 5 else None)
    sys.setprofile(events)
    how: dict[str, Any] = {"workers": workers, "shard_tokens": SHARD_TOKENS, "unit_characters": UNIT_CHARACTERS}
    if not prepared(folder, "mark", ["train"]):  # as stages/prepare.py asks
        write_shards(iter(texts), tokenizer, folder, "train", "mark", lambda line: None, **how)
    sys.setprofile(None)
    print(json.dumps({"events": events.count, "encoded": events.encoded}))


if __name__ == "__main__":
    main()
