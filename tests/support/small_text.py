"""A small text to train on, a vocabulary, and the texts and conversations of files."""

import base64
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from quern.mixture.sources import read_rows
from quern.text.chat import Message
from quern.text.documents import read
from quern.text.sources import Where, files, list_talks
from quern.text.tinyworld import corpus
from quern.text.tokenizer import Tokenizer
from tests.support.rows import write_rows


def write_text(folder: Path) -> None:
    """Writes text.jsonl, a few documents."""
    write_rows(folder / "text.jsonl", ({"text": text} for text in corpus.documents(0, 0.003, "train")))


def write_tiktoken(path: Path, size: int, merges: Iterable[bytes]) -> dict[bytes, int]:
    """Writes a vocabulary of this size as tiktoken does: GPT-2's order of the bytes, merges, bytes that no text has.
    Returns the rank of each token."""
    tokens = dict.fromkeys([*(bytes([byte]) for byte in (*range(33, 256), *range(33))), *merges])
    tokens |= dict.fromkeys(b"\xff" + number.to_bytes(3, "big") for number in range(size - len(tokens)))
    ranks = {token: rank for rank, token in enumerate(tokens)}
    path.write_bytes(b"".join(base64.b64encode(token) + f" {rank}\n".encode() for token, rank in ranks.items()))
    return ranks


def token_shard(tokenizer: Tokenizer, texts: Iterable[str]) -> bytes:
    """A token file as modded-nanogpt writes it."""
    tokens = [token for text in texts for token in (tokenizer.bos, *tokenizer.encode(text))]
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, 1, len(tokens)
    return header.tobytes() + np.array(tokens, dtype="<u2").tobytes()


def read_source(source: Where, *how: Any, **named: Any) -> Iterator[str]:
    """`read` of a file, a folder, or several of these."""
    return read(files(source), *how, **named)


def read_conversations(source: Where, log: Callable[[str], None] | None = None) -> Iterator[list[Message]]:
    """The messages alone of `read_rows`."""
    return (messages for messages, _ in read_rows(list_talks(source), log))
