"""Byte-level BPE tokenizer: text to token ids and back.

rustbpe trains the merges, tiktoken encodes with them, and a JSON file stores them. Ids 0 to 255 are the single bytes,
then come the merges in rank order, then the special tokens. hugging_face.py reads files of other programs.

Source: byte-level BPE as in GPT-2 (Radford et al., 2019); the split pattern follows GPT-4's published one, with the
differences listed at SPLIT_PATTERN.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import msgspec
import numpy as np
import tiktoken

from quern.records import read_json
from quern.temporaries import write_whole

# GPT-4's split with three differences. Digits form groups of at most two, which is better than three for the
# vocabularies of small models. Combining marks (\p{M}) belong to their word; otherwise vowel signs would split Hindi,
# Bengali and vocalised Arabic words. Runs of white space are bounded, because the regex engine backtracks over them and
# a run of a million spaces would overflow its stack.
SPLIT_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)"
    r"|[^\r\n\p{L}\p{M}\p{N}]?+[\p{L}\p{M}]++"
    r"|\p{N}{1,2}+"
    r"| ?[^\s\p{L}\p{M}\p{N}]++[\r\n]*+"
    r"|\s{0,255}[\r\n]|\s{1,256}(?!\S)|\s"
)

# The splits of other vocabularies, as their authors publish them: GPT-2 (Radford et al., 2019), GPT-4 (cl100k_base) and
# GPT-4o (o200k_base) in tiktoken, Llama 3 in its own tokenizer.
GPT2_SPLIT_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
GPT4_SPLIT_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
LLAMA3_SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O_SPLIT_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TIKTOKEN_FILES: Mapping[int, tuple[str, int]] = MappingProxyType(
    {
        50_256: (GPT2_SPLIT_PATTERN, 50_256),
        100_256: (GPT4_SPLIT_PATTERN, 100_257),
        128_000: (LLAMA3_SPLIT_PATTERN, 128_000),
        199_998: (GPT4O_SPLIT_PATTERN, 199_999),
    }
)
"""Tokens in a file of tiktoken's → the vocabulary's split pattern, and the id of its token between documents."""


def split_pattern(digits: int) -> str:
    """The split pattern with up to `digits` digits in a token."""
    return SPLIT_PATTERN.replace(r"\p{N}{1,2}", rf"\p{{N}}{{1,{digits}}}")


OWN_PATTERNS = tuple(map(split_pattern, (1, 2, 3)))


def _for_engine(pattern: str) -> str:
    """A pattern that matches the same pieces, in three quarters of the time with the engine of tiktoken and rustbpe."""
    # The possessive marks of quern's own change no match: in no alternative can what follows a quantifier match a
    # character that the quantifier would give back.
    return re.sub(r"([+*?}])\+", r"\1", pattern) if pattern in OWN_PATTERNS else pattern


SPECIAL_TOKENS = (
    "<|bos|>",
    *(f"<|{part}_{end}|>" for part in ("system", "user", "assistant", "tool", "output") for end in ("start", "end")),
)

FILE_FORMAT = "quern-tokenizer-1"
IN_ORDER = bytes(range(256))
# The trainer reads pieces of at most this length and buffers this many, which bounds its memory.
TRAINING_PIECE_CHARACTERS = 65_536
TRAINING_BUFFER_PIECES = 256


@dataclass(frozen=True)
class _Contents:
    """The file that `Tokenizer.save` writes. Bytes are in base64."""

    format: Literal["quern-tokenizer-1"]
    fingerprint: str
    pattern: str
    special_tokens: list[str]
    merges: list[bytes]
    single_bytes: bytes = IN_ORDER


class Tokenizer:
    """An immutable vocabulary.

    Args:
        merges: The byte strings of ids 256 and up, in rank order.
        pattern: The regular expression that splits text into pieces.
        special_tokens: The names of the last ids; they include <|bos|>.
        notes: Lines for the user, such as a corpus too small for the vocabulary.
        single_bytes: The bytes of ids 0 to 255, in order.
    """

    def __init__(
        self,
        merges: Sequence[bytes],
        pattern: str = SPLIT_PATTERN,
        special_tokens: Sequence[str] = SPECIAL_TOKENS,
        notes: Sequence[str] = (),
        single_bytes: bytes = IN_ORDER,
    ) -> None:
        if sorted(single_bytes) != list(IN_ORDER):
            raise ValueError("single_bytes must hold each of the 256 bytes once")
        ranks = {bytes([byte]): i for i, byte in enumerate(single_bytes)}
        for token in merges:
            if len(token) < 2 or token in ranks:
                raise ValueError(f"merge {token!r} is a single byte or a duplicate")
            ranks[token] = len(ranks)
        if len(set(special_tokens)) != len(special_tokens) or "<|bos|>" not in special_tokens:
            raise ValueError("special tokens must differ from each other and contain <|bos|>")
        self.pattern = pattern
        self.merges = tuple(merges)
        self.most_bytes = max(map(len, self.merges), default=1)  # of a token that is not special
        self.ranks: Mapping[bytes, int] = ranks  # ids of the single bytes and the merges
        self.single_bytes = single_bytes
        self.special_tokens = tuple(special_tokens)
        self.special_ids = {name: len(ranks) + i for i, name in enumerate(special_tokens)}
        self.notes = tuple(notes)
        self.vocab_size = len(ranks) + len(special_tokens)
        self.bos = self.special_ids["<|bos|>"]
        self._bytes = [*ranks, *(name.encode("utf-8") for name in special_tokens)]
        self._encoding = tiktoken.Encoding(
            "quern", pat_str=_for_engine(pattern), mergeable_ranks=ranks, special_tokens=self.special_ids
        )
        self.fingerprint = hashlib.sha256(json.dumps(self._contents()).encode("utf-8")).hexdigest()

    @classmethod
    def train(
        cls, texts: Iterable[str], vocab_size: int, pattern: str = SPLIT_PATTERN, *, max_bytes: int = 2_000_000_000
    ) -> "Tokenizer":
        """Learns merges from a stream of texts. Memory grows with the number of different words, not of texts.

        Args:
            vocab_size: The number of ids, including the special tokens. A corpus with too few pairs to merge gives a
                smaller vocabulary and a line in `notes`.
            max_bytes: Reading ends with the piece of up to 65,536 characters that reaches so many bytes.
        """
        smallest = 256 + len(SPECIAL_TOKENS)
        if vocab_size < smallest:
            raise ValueError(f"vocab_size {vocab_size} is too small: bytes and special tokens need at least {smallest}")
        import rustbpe  # only training needs it

        trainer = rustbpe.Tokenizer()  # pyright: ignore[reportAttributeAccessIssue]  (compiled, without stubs)
        pieces, size = training_pieces(texts, max_bytes), vocab_size - len(SPECIAL_TOKENS)
        trainer.train_from_iterator(pieces, size, buffer_size=TRAINING_BUFFER_PIECES, pattern=_for_engine(pattern))
        ranked = sorted(trainer.get_mergeable_ranks(), key=lambda item: item[1])
        # Two pairs can spell the same bytes. Encoding ranks by bytes, so only the earlier pair counts.
        merges = list(dict.fromkeys(bytes(token) for token, rank in ranked if rank >= 256))
        reached = len(merges) + smallest
        few = f"The corpus has too few different words for {vocab_size:,} tokens: the vocabulary has {reached:,}."
        return cls(merges, pattern, notes=[few] if reached < vocab_size else ())

    def _contents(self) -> dict[str, Any]:
        order = {} if self.single_bytes == IN_ORDER else {"single_bytes": self.single_bytes}
        rest = {"pattern": self.pattern, "special_tokens": self.special_tokens, "merges": self.merges}
        return msgspec.to_builtins(order | rest)  # bytes in base64

    def save(self, path: Path) -> Path:
        """Writes the tokenizer as JSON, atomically."""
        contents = {"format": FILE_FORMAT, "fingerprint": self.fingerprint, **self._contents()}
        write_whole(path, json.dumps(contents, indent=1))
        return path

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Reads a file that `save` wrote.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file is damaged or has another format. The caller adds the remedy.
        """
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path}")
        contents = read_json(path, _Contents, "it is not a sound tokenizer file")
        try:
            tokenizer = cls(contents.merges, contents.pattern, contents.special_tokens, (), contents.single_bytes)
            if tokenizer.fingerprint != contents.fingerprint:
                raise ValueError("its contents do not match its fingerprint")
        except ValueError as error:
            raise ValueError(f"{path} is not a sound tokenizer file ({error})") from error
        return tokenizer

    @classmethod
    def from_tiktoken(cls, path: Path) -> "Tokenizer":
        """Reads tiktoken's vocabulary file: one line per token, its bytes in base64 and its id.

        The number of tokens tells which published vocabulary it is (`TIKTOKEN_FILES`), and so its split pattern. BOS
        gets the id of the vocabulary's token between documents, <|endoftext|> in GPT-2; the ids after it are quern's
        special tokens. Another vocabulary is split as GPT-2's, with a line in `notes`.

        Raises:
            ValueError: The file has another format.
        """
        try:
            pairs = [line.split() for line in path.read_text(encoding="ascii").splitlines() if line]
            tokens = [base64.b64decode(token, validate=True) for token, _ in pairs]
            if [int(rank) for _, rank in pairs] != list(range(len(pairs))):
                raise ValueError("ids do not count from 0")
            pattern, bos = TIKTOKEN_FILES.get(len(tokens), (GPT2_SPLIT_PATTERN, len(tokens)))
            special = (*map(unused_name, range(len(tokens), bos)), *SPECIAL_TOKENS)
            unknown = f"{path} has {len(tokens):,} tokens, as no vocabulary that quern knows: it splits text as GPT-2's"
            notes = () if len(tokens) in TIKTOKEN_FILES else (unknown,)
            return cls(tokens[256:], pattern, special, notes, b"".join(tokens[:256]))
        except ValueError as error:
            raise ValueError(
                f"{path} is not a vocabulary of tiktoken's ({error}): each line is a token in base64 and its id, "
                "as in r50k_base.tiktoken"
            ) from error

    def special(self, name: str) -> int:
        """The id of a special token, by its full name such as "<|user_start|>"."""
        if name not in self.special_ids:
            raise ValueError(f"no special token {name!r}; there are {', '.join(self.special_tokens)}")
        return self.special_ids[name]

    def encode(self, text: str) -> list[int]:
        """Ids of the text, never special tokens. Lone surrogates become U+FFFD. Raises ValueError where the split of
        another vocabulary cannot read the text, as a million spaces in a row."""
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> np.ndarray:
        """`encode` as an array, uint32, without a Python number for each id."""
        try:
            return self._encoding.encode_to_numpy(well_formed(text), disallowed_special=())
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # tiktoken's, if a pattern of others backtracks too often
                raise
            raise ValueError("the tokenizer's pattern cannot split a text: use one that quern trains") from error

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of the ids, joined; a special token gives its name."""
        table, ids = self._bytes, [*ids]
        if ids and not 0 <= min(ids) <= max(ids) < len(table):
            wrong = next(token for token in ids if not 0 <= token < len(table))
            raise ValueError(f"token id {wrong} is outside the vocabulary of {len(table)}")
        return b"".join(map(table.__getitem__, ids))

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; bytes that are not valid UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def token_bytes(self) -> np.ndarray:
        """int32 (vocab_size,): the number of bytes of each token, 0 for special tokens. Bits per byte divides by the
        sum of these; a token that holds a part of a character counts its raw bytes."""
        return np.array([len(token) for token in self.vocabulary()], dtype=np.int32)

    def vocabulary(self) -> list[bytes]:
        """The bytes of each token, by id; empty for special tokens."""
        return [*self.ranks, *[b""] * len(self.special_tokens)]


def unused_name(id_: int) -> str:
    """The name of a special token for an id that a vocabulary leaves out."""
    return f"<|unused_{id_}|>"


def compression_report(tokenizer: Tokenizer, samples: Mapping[str, str]) -> list[dict[str, Any]]:
    """One row per kind of text: kind, bytes, tokens, bytes_per_token."""
    rows = []
    for kind, text in samples.items():
        size, tokens = len(well_formed(text).encode("utf-8")), len(tokenizer.encode(text))
        rows.append({"kind": kind, "bytes": size, "tokens": tokens, "bytes_per_token": size / max(1, tokens)})
    return rows


def well_formed(text: str) -> str:
    """The text with surrogate pairs joined and lone surrogates replaced by U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def training_pieces(texts: Iterable[str], max_bytes: int) -> Iterator[str]:
    """The pieces in which the trainer reads texts, cut between two words, up to the one that reaches the size."""
    left = max_bytes
    for text in texts:
        text = well_formed(text)
        start = 0
        while start < len(text):
            if left <= 0:
                return
            end = min(len(text), start + TRAINING_PIECE_CHARACTERS)
            if end < len(text):  # cut between two words
                space = text.rfind(" ", start + 1, end)
                end = space if space > 0 else end
            piece = text[start:end]
            left -= len(piece.encode("utf-8"))
            start = end
            yield piece
