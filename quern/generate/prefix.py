"""Prompts that were read before: the states of cache rows, kept for later prompts that begin with the same tokens.

A windowed layer keeps the last tokens only, so a state cannot be cut shorter afterwards. States are therefore kept
where later prompts can use them: at the end of a prompt (with its logits: the same prompt again reads nothing), at the
end of a reply (the next turn of a chat begins there), and where a prompt parts from an earlier one (`branch`): a system
prompt in front of different questions is kept from its second use on. The least recently used states leave first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from quern.generate.cache import KVCache

LEAST_TOKENS = 16  # a shorter prefix is read as fast as it is copied
MAX_PREFIXES = 512


@dataclass(frozen=True)
class Prefix:
    """The state of a row after `length` tokens. logits_V: of the next token, if they were computed."""

    length: int
    cache: KVCache
    logits_V: Tensor | None

    @property
    def bytes(self) -> int:
        """Memory of keys, values and logits."""
        return self.cache.bytes + (0 if self.logits_V is None else self.logits_V.nbytes)


class PrefixCache:
    """The states, up to `max_bytes` of keys, values and logits."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._prefixes: OrderedDict[bytes, Prefix] = OrderedDict()  # by their tokens
        self.bytes = self.queried_tokens = self.hit_tokens = 0

    def __len__(self) -> int:
        return len(self._prefixes)

    def find(self, tokens: Sequence[int]) -> Prefix | None:
        """The longest state that `tokens` begins with. One of all the tokens is of use only with its logits."""
        key = _key(tokens)
        for known in sorted(self._alike(key), key=len, reverse=True):
            found = self._prefixes[known]
            if key.startswith(known) and (len(known) < len(key) or found.logits_V is not None):
                self._prefixes.move_to_end(known)
                return found
        return None

    def count(self, tokens: Sequence[int], found: Prefix | None) -> None:
        """Takes down that a prompt is read, and how much of it was known."""
        self.queried_tokens += len(tokens)
        self.hit_tokens += 0 if found is None else found.length

    def branch(self, tokens: Sequence[int], start: int) -> int | None:
        """Where `tokens` part from the earlier ones that they agree with longest; None unless well after `start`."""
        mine = np.asarray(tokens, dtype=np.int32)
        alike = self._alike(mine.tobytes())
        agreed = max((_agreement(mine, np.frombuffer(key, dtype=np.int32)) for key in alike), default=0)
        return agreed if start + LEAST_TOKENS <= agreed < len(tokens) else None

    def wants(self, tokens: Sequence[int], logits: bool) -> bool:
        """Whether the state after these tokens is worth keeping and not kept yet. logits: its logits are known."""
        known = self._prefixes.get(_key(tokens))
        return len(tokens) >= LEAST_TOKENS and (known is None or (logits and known.logits_V is None))

    def add(self, tokens: Sequence[int], cache: KVCache, logits_V: Tensor | None = None) -> None:
        """Keeps a state. cache: one row (`KVCache.take`), not used by others."""
        key, prefix = _key(tokens), Prefix(len(tokens), cache, logits_V)
        if (old := self._prefixes.pop(key, None)) is not None:
            self.bytes -= old.bytes
        if prefix.bytes <= self._max_bytes:
            self._prefixes[key] = prefix
            self.bytes += prefix.bytes
        while self.bytes > self._max_bytes or len(self) > MAX_PREFIXES:
            self.bytes -= self._prefixes.popitem(last=False)[1].bytes

    def clear(self) -> None:
        self._prefixes.clear()
        self.bytes = 0

    def _alike(self, key: bytes) -> Iterator[bytes]:
        """The known keys with the same first tokens."""
        return (known for known in self._prefixes if known.startswith(key[: 4 * LEAST_TOKENS]))


def _key(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, dtype=np.int32).tobytes()


def _agreement(left: np.ndarray, right: np.ndarray) -> int:
    """The number of equal tokens at the beginning."""
    shorter = min(len(left), len(right))
    different = left[:shorter] != right[:shorter]
    return int(different.argmax()) if different.any() else shorter
