"""Writes documents as token shards.

A writer that was stopped, even by SIGKILL, is continued after its last whole shard. The text before that is read again,
which takes a few percent of the time of encoding it, but not encoded again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

from quern.data.shard_writer import SHARD_TOKENS, ShardWriter
from quern.terminal import Meter, counted
from quern.text.encode.pool import UNIT_CHARACTERS, StartWorkers, encoded, on_processes
from quern.text.tokenizer import Tokenizer


def write_shards(
    texts: Iterator[str],
    tokenizer: Tokenizer,
    folder: Path,
    split: str,
    fingerprint: str,
    log: Callable[[str], None],
    *,
    workers: int = 1,
    megabytes: float | None = None,
    shard_tokens: int = SHARD_TOKENS,
    unit_characters: int = UNIT_CHARACTERS,
    start_workers: StartWorkers = on_processes,
) -> None:
    """Writes a split, or what an earlier writer of the same split has left to do.

    Args:
        texts: All documents of the split.
        tokenizer: Encodes them.
        folder, split, fingerprint, shard_tokens: As `ShardWriter`.
        log: Takes lines for the user.
        workers, unit_characters, start_workers: As `encoded`.
        megabytes: The size of the text, for the time left; None if unknown.

    Raises:
        ValueError: There are no documents.
        RuntimeError: A worker has died.
        OSError: The shards cannot be written.
    """
    with ShardWriter(
        folder,
        split,
        shard_tokens=shard_tokens,
        vocab_size=tokenizer.vocab_size,
        bos=tokenizer.bos,
        fingerprint=fingerprint,
    ) as writer:
        skipped = _skip(texts, writer.documents, split)
        if writer.documents:
            log(f"tokens: {split} continues after {counted(writer.documents, 'document')}, finished before")
        start, done = time.monotonic(), 0
        with (
            Meter(f"tokenizing {split}", megabytes, "MB") as meter,
            closing(encoded(texts, tokenizer, writer.dtype, workers, unit_characters, start_workers)) as units,
        ):
            for unit in units:
                writer.add_documents(unit.ids, unit.lengths)
                done += unit.text_bytes
                speed = done / 1e6 / (time.monotonic() - start)
                meter.at((skipped + done) / 1e6, f"{speed:.1f} MB/s, {writer.tokens / 1e6:.1f}M tokens")
    speed = done / 1e6 / (time.monotonic() - start)
    written = f"{writer.tokens:,} from {counted(writer.documents, 'document')}"
    log(f"tokens: {split} {written}, {speed:.1f} MB/s → {folder}")


def _skip(texts: Iterator[str], documents: int, split: str) -> int:
    """Reads past the first documents, and returns their size in bytes."""
    size = 0
    with Meter(f"reading past finished documents of {split}", documents, "documents") as meter:
        for number, text in enumerate(islice(texts, documents)):
            size += len(text.encode("utf-8", "replace"))
            meter.at(number)
    return size
