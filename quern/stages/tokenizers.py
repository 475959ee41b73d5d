"""The tokenizer of a text: the one that the recipe names, or one that is trained on the text.

Published vocabularies have names. Their files are those that tiktoken keeps in its cache; nothing is downloaded.
tiktoken names a cached file by the SHA-1 of its address (`tiktoken.load.read_file_cached`).
"""

from __future__ import annotations

import hashlib
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from quern.data.token_file import fingerprint
from quern.process import environment
from quern.recipe import Resolved
from quern.runs.public_data import PublicData
from quern.temporaries import sha256_of
from quern.terminal import Meter, silent
from quern.text.documents import Log
from quern.text.hugging_face import open_tokenizer
from quern.text.tokenizer import Tokenizer, split_pattern, training_pieces

BASE = "https://openaipublic.blob.core.windows.net"
R50K = ("encodings/r50k_base.tiktoken", "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930")
CL100K = ("encodings/cl100k_base.tiktoken", "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7")
O200K = ("encodings/o200k_base.tiktoken", "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d")
VOCABULARIES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"gpt2": R50K, "r50k_base": R50K, "gpt4": CL100K, "cl100k_base": CL100K, "o200k_base": O200K}
)
"""Name → the file that holds the vocabulary, and its SHA-256."""

SAMPLE_VERSION = "1"  # version of `sampled`: another one means other samples of the same text
MOST_BYTES = 2_000_000_000  # a longer text is sampled up to here: it is read twice

Read = Callable[[str], Iterator[str]]  # opens the documents of a split


@dataclass(frozen=True)
class Source:
    """A text that is not tokenized yet."""

    name: str  # for file names
    fingerprint: str  # changes when the text does
    read: Read
    megabytes: Callable[[], float | None]  # size of the whole text, None if it is not known before it is read
    public: PublicData | None = None  # its files, where it is a public data set


def named_tokenizer(name: str | None, own: Tokenizer | None, log: Log, *, may_be_gone: bool = True) -> Tokenizer | None:
    """The tokenizer of this name or file; `own`, the run's, where none is named, or if it may be gone and is. Raises
    FileNotFoundError if it is missing, ValueError if it is another one than `own`."""
    if name is None or (may_be_gone and own is not None and not Path(name).is_file()):
        return own
    try:
        found = published(name) if name in VOCABULARIES and not Path(name).exists() else open_tokenizer(Path(name))
    except (FileNotFoundError, ValueError) as error:
        raise type(error)(f"--text.tokenizer {error}") from error
    if own is not None and own.fingerprint != found.fingerprint:
        raise ValueError(
            f"--text.tokenizer {name} is another tokenizer now ({found.fingerprint[:16]}) than the model's "
            f"({own.fingerprint[:16]}): put it back as it was, or name a copy of the run's tokenizer.json"
        )
    for line in (*found.notes, f"tokenizer: {found.vocab_size:,} tokens of {name}"):
        log(line)
    return found


def require_tokenizer(name: str | None, own: Tokenizer, saved: str | None) -> None:
    """Raises as `named_tokenizer` where a command names another tokenizer than `own`, the run's. Under the name in the
    run's recipe (`saved`) it may be gone, since the run keeps it."""
    same = name and saved and Path(name).absolute() == Path(saved).absolute()
    named_tokenizer(name, own, silent, may_be_gone=bool(same))


def published(name: str) -> Tokenizer:
    """The vocabulary with this name. Raises FileNotFoundError: tiktoken's cache does not have its file, whole."""
    env = environment()
    folder = env.get("TIKTOKEN_CACHE_DIR") or env.get("DATA_GYM_CACHE_DIR")
    folder = Path(folder or Path(tempfile.gettempdir(), "data-gym-cache"))
    file, digest = VOCABULARIES[name]
    path = folder / hashlib.sha1(f"{BASE}/{file}".encode()).hexdigest()
    if path.is_file() and sha256_of(path) == digest:
        return Tokenizer.from_tiktoken(path)
    encoding = Path(file).stem
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


def train_tokenizer(recipe: Resolved, source: Source, out: Path, log: Log) -> Tokenizer:
    """The tokenizer for the source, trained unless it is there already."""
    text = recipe.text
    pattern = split_pattern(text.digits)
    alike = recipe.data == "tinyworld"  # a generated text is the same everywhere: its beginning is a sample of it
    how = [] if alike else [SAMPLE_VERSION]
    mark = fingerprint(source.fingerprint, str(text.vocab_size), pattern, str(text.tokenizer_megabytes), *how)
    known = sorted((out / "tokenizers").glob(f"*-{mark[:8]}.json"))  # the same text may have had another name
    path = known[0] if known else out / "tokenizers" / f"{source.name}-{mark[:8]}.json"
    if known:
        try:
            tokenizer = Tokenizer.load(path)
        except ValueError as error:
            raise ValueError(f"{error}: remove it, and it is trained again") from error
        log(f"tokenizer: {path} is up to date")
        return tokenizer
    start, size, texts = time.monotonic(), text.tokenizer_megabytes, source.read("train")
    if not alike:  # the seed is of the text: a run's seed does not change its tokens
        with Meter("measuring the text", None, "MB") as meter:
            texts = sampled(lambda: source.read("train"), size, source.fingerprint, lambda done: meter.at(done / 1e6))
    with Meter("training the tokenizer", size, "MB") as meter:

        def metered() -> Iterator[str]:
            done = 0
            for one in texts:
                done += len(one)
                meter.at(done / 1e6)
                yield one

        tokenizer = Tokenizer.train(metered(), text.vocab_size, pattern, max_bytes=int(size * 1e6))
    for note in tokenizer.notes:
        log(note)
    tokenizer.save(path)
    log(f"tokenizer: {tokenizer.vocab_size:,} tokens in {time.monotonic() - start:.1f} s → {path}")
    return tokenizer


def sampled(
    texts: Callable[[], Iterator[str]], megabytes: float, seed: str, progress: Callable[[int], None]
) -> Iterator[str]:
    """Samples a text by reading it twice: to find its size, then to choose pieces of it. It holds one piece in memory.

    Args:
        megabytes: The size of the sample, to within a piece and a percent or so. A smaller text is returned whole.
        progress: Called with the bytes that the first reading has seen.

    Returns:
        Documents, or pieces of at most 65,536 characters of long ones, in the order of the text.
    """
    total = 0
    for piece in training_pieces(texts(), MOST_BYTES):
        total += len(piece.encode("utf-8"))
        progress(total)
    if total <= megabytes * 1e6:
        return texts()
    return _chosen(training_pieces(texts(), MOST_BYTES), megabytes * 1e6 / total, random.Random(seed))


def _chosen(pieces: Iterator[str], share: float, chance: random.Random) -> Iterator[str]:
    """Chooses a share of the bytes. Each piece adds about its share to what is owed, and a chosen one pays for itself.
    So even a small sample has its size and comes from all of the text, which independent draws would not ensure."""
    owed = 0.0
    for piece in pieces:
        size = len(piece.encode("utf-8"))
        if owed >= 0:
            yield piece
            owed -= size
        owed += 2 * chance.random() * share * size
