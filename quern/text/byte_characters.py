"""A byte-level vocabulary as other programs write it: a character for each byte, and merges as pairs of tokens.

tiktoken merges a pair by the rank of the bytes that it spells; Hugging Face's `tokenizers` and llama.cpp merge only
listed pairs. One pair per token is enough: the last pair of the token's own derivation is the only one that can occur.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import count

from quern.text.tokenizer import Tokenizer


@cache
def byte_characters() -> tuple[str, ...]:
    """The character for each byte: the byte itself if printable, else the next one above 255 (GPT-2's alphabet)."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = count(256)
    return tuple(chr(byte if byte in visible else next(others)) for byte in range(256))


def spell(token: bytes) -> str:
    """The characters of a token's bytes."""
    characters = byte_characters()
    return "".join(characters[byte] for byte in token)


def merge_pairs(tokenizer: Tokenizer) -> dict[bytes, tuple[bytes, bytes]]:
    """Token → the pair that forms it, in rank order, without the tokens that merging never forms."""
    tokens = [*(bytes([byte]) for byte in tokenizer.single_bytes), *tokenizer.merges]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    found = ((token, _last_pair(token, ranks)) for token in tokenizer.merges)
    return {token: pair for token, pair in found if pair is not None}


def _last_pair(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes] | None:
    """The last pair that merging by rank joins to form a token; None if merging never forms it."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        found = [(ranks[joined], i) for i in range(len(parts) - 1) if (joined := parts[i] + parts[i + 1]) in ranks]
        if not found:
            return None
        at = min(found)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]
