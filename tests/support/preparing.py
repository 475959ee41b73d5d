"""Prepares a text in a process of its own, which ends itself by SIGKILL at a chosen event.

    python tests/support/preparing.py TEXTS TOKENIZER FOLDER WORKERS [EVENT]

TEXTS is a JSON list of documents. Events (events.py) are those of the writer of shards, its files and its processes.
Prints as JSON how many events there were, and how many documents this process encoded.
"""

import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from quern.data.token_file import prepared
from quern.stages.encode import write_shards
from quern.text.tokenizer import Tokenizer
from tests.support.events import Events

SHARD_TOKENS, UNIT_CHARACTERS = 997, 700


class Counting(Events):
    encoded = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        self.encoded += frame.f_code is Tokenizer.encode_array.__code__ and event == "call"
        super().__call__(frame, event, argument)


def main() -> None:
    texts = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    tokenizer, folder, workers = Tokenizer.load(Path(sys.argv[2])), Path(sys.argv[3]), int(sys.argv[4])
    at = ("train", int(sys.argv[5])) if len(sys.argv) > 5 else None
    files = ("data", "stages/encode.py", "temporaries.py")
    events = Counting(files, at, lambda place: os.kill(os.getpid(), signal.SIGKILL))
    sys.setprofile(events)
    how: dict[str, Any] = {"workers": workers, "shard_tokens": SHARD_TOKENS, "unit_characters": UNIT_CHARACTERS}
    if not prepared(folder, "mark", ["train"]):  # as stages/prepare.py asks
        write_shards(iter(texts), tokenizer, folder, "train", "mark", lambda line: None, **how)
    sys.setprofile(None)
    print(json.dumps({"events": events.counts["train"], "encoded": events.encoded}))


if __name__ == "__main__":
    main()
