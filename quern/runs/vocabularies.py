"""Published vocabularies by name, from the files that tiktoken keeps in its cache. Nothing is downloaded.

tiktoken names a cached file by the SHA-1 of its address (`tiktoken.load.read_file_cached`). For GPT-2 it has either of
two files with the same tokens.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from quern.process import environment
from quern.temporaries import sha256_of
from quern.text.hugging_face import byte_characters
from quern.text.tokenizer import GPT2_SPLIT_PATTERN, Tokenizer

BASE = "https://openaipublic.blob.core.windows.net"
R50K = ("encodings/r50k_base.tiktoken", "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930")
MERGES = ("gpt-2/encodings/main/vocab.bpe", "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5")
CL100K = ("encodings/cl100k_base.tiktoken", "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7")
O200K = ("encodings/o200k_base.tiktoken", "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d")
VOCABULARIES: Mapping[str, tuple[tuple[str, str], ...]] = MappingProxyType(
    {"gpt2": (R50K, MERGES), "r50k_base": (R50K,), "gpt4": (CL100K,), "cl100k_base": (CL100K,), "o200k_base": (O200K,)}
)
"""Name → the files that hold the vocabulary, each with its SHA-256. GPT-4's is cl100k_base."""


def published(name: str) -> Tokenizer:
    """The vocabulary with this name. Raises FileNotFoundError: tiktoken's cache does not have its file, whole."""
    env = environment()
    folder = env.get("TIKTOKEN_CACHE_DIR") or env.get("DATA_GYM_CACHE_DIR")
    folder = Path(folder or Path(tempfile.gettempdir(), "data-gym-cache"))
    for file, digest in VOCABULARIES[name]:
        path = folder / hashlib.sha1(f"{BASE}/{file}".encode()).hexdigest()
        if path.is_file() and sha256_of(path) == digest:
            return _from_merges(path) if file == MERGES[0] else Tokenizer.from_tiktoken(path)
    encoding = {"gpt4": "cl100k_base"}.get(name, name)
    raise FileNotFoundError(
        f"{name}: the cache of tiktoken, {folder}, does not have this vocabulary: run `python -c 'import tiktoken; "
        f'tiktoken.get_encoding("{encoding}")\'` once with a network, or name a file such as {encoding}.tiktoken'
    )


def for_comparison() -> dict[str, Tokenizer]:
    """The vocabularies of GPT-2 and GPT-4 whose files exist, by a name for the user."""
    found = {}
    for name in ("gpt2", "gpt4"):
        with suppress(FileNotFoundError):
            found[f"  as {name}'s tokens"] = published(name)
    return found


def _from_merges(path: Path) -> Tokenizer:
    """GPT-2's first format: two words in GPT-2's alphabet on each line, after a line with the version."""
    byte_of = {character: byte for byte, character in enumerate(byte_characters())}
    lines = path.read_text(encoding="utf-8").splitlines()[1:]
    merges = [bytes(byte_of[character] for character in line.replace(" ", "")) for line in lines if line]
    singles = bytes(sorted(range(256), key=lambda byte: byte_characters()[byte]))
    return Tokenizer(merges, GPT2_SPLIT_PATTERN, single_bytes=singles)
