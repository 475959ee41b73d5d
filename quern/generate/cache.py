"""The key-value cache, and the contexts with which a model reads and extends it.

Each layer has a ring of slots: its window's length for a windowed layer, the maximal length for a long layer, none for
a layer without attention. The token at position p is stored in slot p mod ring, so the ring of a windowed layer holds
exactly the keys that the next query sees. Each row has its own position: prompts of unequal length share a batch,
padded on the right, and padding is not stored. The cache also holds what a model asks of each row's last token by name
(`previous`), as the smear does, and the ids of as many last tokens as the model looks back (`lookback`).

`PrefixCache` keeps states of rows for later prompts that begin with the same tokens. A windowed layer keeps the last
tokens only, so a state cannot be cut shorter afterwards. States are therefore kept where later prompts can use them: at
the end of a prompt (with its logits: the same prompt again reads nothing), at the end of a reply (the next turn of a
chat begins there), and where a prompt parts from an earlier one (`branch`): a system prompt in front of different
questions is kept from its second use on. The least recently used states leave first.

Shapes: B rows, T new tokens, R ring slots, H query heads, K key/value heads, E head dim, D width.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quern.kernels.attention.attend import MaskSpec, attend
from quern.machine import Attention
from quern.model.base import LanguageModel


class KVCache:
    """An empty cache of `rows` rows of at most `max_tokens` tokens, in the parameters' dtype and on their device."""

    def __init__(self, model: LanguageModel, rows: int, max_tokens: int):
        shape, weight = model.shape, model.embedding.weight
        dtype, device = weight.dtype, weight.device
        self.max_tokens = max_tokens
        rings = [
            min(window or max_tokens, max_tokens) if layer in model.attention_layers else 0
            for layer, window in enumerate(model.windows)
        ]
        sizes = [(rows, shape.kv_heads // model.shards, ring, shape.head_dim) for ring in rings]
        self.keys_BKRE = [torch.zeros(size, dtype=dtype, device=device) for size in sizes]
        self.values_BKRE = [torch.zeros_like(keys) for keys in self.keys_BKRE]
        self.last = {name: torch.zeros(rows, n, dtype=dtype, device=device) for name, n in model.remembered.items()}
        self.positions_B = torch.zeros(rows, dtype=torch.int64, device=device)
        self.recent_BN = torch.full((rows, model.lookback), -1, dtype=torch.int64, device=device)  # the newest N tokens
        self.filled = 0  # at least the tokens in any row, without those of `decode`

    def take(self, rows: Tensor, length: int | None = None) -> KVCache:
        """A new cache whose row i is a copy of this one's row rows[i].

        length: The tokens of these rows; the copy has room for no more. None keeps the room.
        """
        taken = copy.copy(self)
        if length is not None:
            taken.max_tokens = taken.filled = length
        taken.keys_BKRE = [keys[rows, :, :length] for keys in self.keys_BKRE]
        taken.values_BKRE = [values[rows, :, :length] for values in self.values_BKRE]
        taken.last = {name: last_BD[rows] for name, last_BD in self.last.items()}
        taken.positions_B, taken.recent_BN = self.positions_B[rows], self.recent_BN[rows]
        return taken

    def put(self, row: int, other: KVCache, theirs: int, length: int) -> None:
        """Overwrites a row with row `theirs` of a cache of the same model, which holds `length` tokens there."""
        for mine_BKRE, from_BKRE in zip(self._stored(), other._stored(), strict=True):
            # Both rings have the window's length, or the row has not gone round either of them.
            held = min(length, mine_BKRE.size(2))
            mine_BKRE[row, :, :held] = from_BKRE[theirs, :, :held]
        for name, last_BD in self.last.items():
            last_BD[row] = other.last[name][theirs]
        self.positions_B[row], self.recent_BN[row] = length, other.recent_BN[theirs]
        self.filled = max(self.filled, length)

    def grow(self, max_tokens: int, windows: Sequence[int | None]) -> None:
        """Makes room for `max_tokens` tokens in each row. windows: windows of the model."""
        for layer, window in enumerate(windows):
            ring = self.keys_BKRE[layer].size(2)
            more = min(window or max_tokens, max_tokens) - ring
            if ring and more > 0:  # no row has gone round this ring: its slots keep their positions
                self.keys_BKRE[layer] = F.pad(self.keys_BKRE[layer], (0, 0, 0, more))
                self.values_BKRE[layer] = F.pad(self.values_BKRE[layer], (0, 0, 0, more))
        self.max_tokens = max(self.max_tokens, max_tokens)

    @property
    def bytes(self) -> int:
        """Memory of the keys and values."""
        return sum(stored.nbytes for stored in self._stored())

    def _stored(self) -> list[Tensor]:
        return [*self.keys_BKRE, *self.values_BKRE]

    def remembered(self, name: str) -> Tensor:
        """The value that `previous` received for the last token, (B, D)."""
        if name not in self.last:
            raise ValueError(f"the model asks for the previous '{name}' and does not declare it: set its `remembered`")
        return self.last[name]

    def prefill(
        self, model: LanguageModel, tokens_BT: Tensor, lengths_B: Tensor, attention: Attention | None = None
    ) -> Tensor:
        """Appends tokens, padded on the right; returns their hidden states (B, T, D), undefined for padding.

        A long prompt may be split over several calls. lengths_B: tokens of each row without padding; attention: the one
        for empty rows (`Machine.attention`), None for the portable path.
        """
        longest = int((self.positions_B + lengths_B).max())
        if longest > self.max_tokens:
            raise ValueError(f"the cache holds {self.max_tokens} tokens a row; {longest} do not fit")
        x_BTD = model(tokens_BT, PrefillContext(self, lengths_B, attention))
        newest_BN = lengths_B[:, None] + torch.arange(self.recent_BN.size(1), device=lengths_B.device)
        self.recent_BN = torch.cat([self.recent_BN, tokens_BT], dim=1).gather(1, newest_BN)
        self.positions_B += lengths_B
        self.filled = longest
        return x_BTD


class _CacheContext:
    """The context of tokens that follow those in a cache."""

    continues = True

    def __init__(self, cache: KVCache):
        self._cache = cache

    def windows(self, full: Sequence[int | None]) -> Sequence[int | None]:
        return full

    def previous_tokens(self, tokens_BT: Tensor, n: int) -> Tensor:
        """The ids (B, T) that are n tokens before each of the new tokens; -1 before a row's first token."""
        recent_BN, T = self._cache.recent_BN, tokens_BT.size(1)
        lookback = recent_BN.size(1)
        if n > lookback:
            raise ValueError(f"the model looks {n} tokens back and declares {lookback}: set its `lookback`")
        return torch.cat([recent_BN, tokens_BT], dim=1)[:, lookback - n : lookback - n + T]


class PrefillContext(_CacheContext):
    """The context of a prefill: many tokens at once, appended to rows that may already hold tokens."""

    def __init__(self, cache: KVCache, lengths_B: Tensor, attention: Attention | None = None):
        super().__init__(cache)
        self._lengths_B = lengths_B
        self._fresh = cache.filled == 0
        self._attend: Callable[..., Tensor] = attend if attention is None else attention.attend
        self._masks: dict[tuple[int | None, ...], Tensor] = {}
        self._places: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # by the ring: where new tokens go

    def positions(self, x_BTD: Tensor) -> Tensor:
        return self._cache.positions_B[:, None] + torch.arange(x_BTD.size(1), device=x_BTD.device)

    def previous(self, x_BTD: Tensor, name: str) -> Tensor:
        last_BD = self._cache.remembered(name)
        shifted = torch.cat([last_BD[:, None], x_BTD[:, :-1]], dim=1)
        newest_BD = take_token(x_BTD, self._lengths_B - 1)
        self._cache.last[name] = torch.where(self._lengths_B[:, None] > 0, newest_BD, last_BD)
        return shifted

    def attend(
        self, layer: int, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, window: int | None, scale: float | None = None
    ) -> Tensor:
        """Padding needs no mask: it is to the right of all real tokens, which do not see it."""
        keys, values = self._cache.keys_BKRE[layer], self._cache.values_BKRE[layer]
        if self._fresh:
            y_BTHE = self._attend(q_BTHE, k_BTKE, v_BTKE, MaskSpec(window), scale)
        else:
            T, ring = q_BTHE.size(1), keys.size(2)
            used = min(ring, self._cache.filled)
            if (ring, used, window) not in self._masks:  # which layers of one kind share
                self._masks[ring, used, window] = self._visible(T, ring, used, window)
            y_BTHE = attend_masked(
                q_BTHE,
                torch.cat([keys[:, :, :used], k_BTKE.transpose(1, 2)], dim=2),
                torch.cat([values[:, :, :used], v_BTKE.transpose(1, 2)], dim=2),
                self._masks[ring, used, window],
                scale,
            )
        self._store(keys, k_BTKE)
        self._store(values, v_BTKE)
        return y_BTHE

    def _visible(self, T: int, ring: int, used: int, window: int | None) -> Tensor:
        """Mask (B, T, used + T): which of the first `used` slots and of the T new tokens each new token sees."""
        start_B1 = self._cache.positions_B[:, None]
        new_T = torch.arange(T, device=start_B1.device)
        slots_R = torch.arange(used, device=start_B1.device)
        # A slot holds the newest position below `start` that maps to it; a negative position means empty.
        held_BR = start_B1 - 1 - (start_B1 - 1 - slots_R) % ring
        old = (held_BR >= 0)[:, None, :].expand(-1, T, -1)
        new = (new_T <= new_T[:, None]).expand(len(start_B1), -1, -1)
        if window is not None:
            query_BT1 = (start_B1 + new_T)[:, :, None]
            old = old & (held_BR[:, None, :] > query_BT1 - window)
            new = new & (new_T > new_T[:, None] - window)
        return torch.cat([old, new], dim=-1)

    def _store(self, slots_BKRE: Tensor, new_BTKE: Tensor) -> None:
        """Writes into each slot the newest new token that maps to it, if there is one."""
        R, T = slots_BKRE.size(2), new_BTKE.size(1)
        if self._fresh and T <= R:
            # Padding is written to slots that a real token overwrites before any query sees them.
            slots_BKRE[:, :, :T] = new_BTKE.transpose(1, 2)
            return
        if R not in self._places:
            new_T = torch.arange(T, device=new_BTKE.device)
            ends_B1 = self._lengths_B[:, None]
            rows_N, tokens_N = ((new_T < ends_B1) & (new_T >= ends_B1 - R)).nonzero(as_tuple=True)
            self._places[R] = rows_N, tokens_N, (self._cache.positions_B[rows_N] + tokens_N) % R
        rows_N, tokens_N, slots_N = self._places[R]
        slots_BKRE[rows_N, :, slots_N] = new_BTKE[rows_N, tokens_N]


class DecodeContext(_CacheContext):
    """The context of a decode step: one new token per row. Only S is dynamic, so the step compiles once.

    slots_S: arange(S), where S exceeds the position of every live row: long layers read their first S slots only.
    """

    def __init__(self, cache: KVCache, slots_S: Tensor):
        super().__init__(cache)
        self._slots_S = slots_S

    def positions(self, x_BTD: Tensor) -> Tensor:
        return self._cache.positions_B[:, None]

    def previous(self, x_BTD: Tensor, name: str) -> Tensor:
        last_BD = self._cache.remembered(name)
        before_B1D = last_BD[:, None].clone()
        last_BD.copy_(x_BTD[:, 0])
        return before_B1D

    def attend(
        self, layer: int, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, window: int | None, scale: float | None = None
    ) -> Tensor:
        cache = self._cache
        keys, values = cache.keys_BKRE[layer], cache.values_BKRE[layer]
        rows_B, ring = torch.arange(len(keys), device=keys.device), keys.size(2)
        slot_B = cache.positions_B % ring
        keys[rows_B, :, slot_B] = k_BTKE[:, 0]
        values[rows_B, :, slot_B] = v_BTKE[:, 0]
        # The new token has replaced the token that left the window: the stored keys are the visible keys.
        if ring == cache.max_tokens:
            slots = self._slots_S
            keys, values = keys[:, :, : len(slots)], values[:, :, : len(slots)]
        else:
            slots = torch.arange(ring, device=keys.device)
        return attend_masked(q_BTHE, keys, values, (slots <= cache.positions_B[:, None])[:, None], scale)


def attend_masked(q_BTHE: Tensor, k_BKRE: Tensor, v_BKRE: Tensor, visible_BTR: Tensor, scale: float | None) -> Tensor:
    """Attention of each query over its visible keys. Returns (B, T, H, E); scale None is E^-1/2.

    With a mask, a GPU has no kernel for grouped heads: the heads that share keys are queries of one head where each has
    one query, and otherwise the keys are repeated, which are small beside a mask for each head.
    """
    (B, T, H, E), K = q_BTHE.shape, k_BKRE.size(1)
    if T > 1 and H > K:
        k_BKRE, v_BKRE, K = k_BKRE.repeat_interleave(H // K, 1), v_BKRE.repeat_interleave(H // K, 1), H
    q_BKME = q_BTHE.transpose(1, 2).reshape(B, K, H // K * T, E)
    y_BKME = F.scaled_dot_product_attention(q_BKME, k_BKRE, v_BKRE, visible_BTR[:, None], scale=scale)
    return y_BKME.reshape(B, H, T, E).transpose(1, 2)


def take_token(x_BTD: Tensor, index_B: Tensor) -> Tensor:
    """Returns x[b, index[b]] of each row, (B, D); a negative index reads the first token."""
    return x_BTD[torch.arange(len(x_BTD), device=x_BTD.device), index_B.clamp(min=0)]


def decode(model: LanguageModel, cache: KVCache, tokens_B: Tensor, slots_S: Tensor) -> Tensor:
    """Appends a token to every row. Returns the next fp32 logits (B, V). slots_S: as in `DecodeContext`."""
    x_B1D = model(tokens_B[:, None], DecodeContext(cache, slots_S))
    cache.positions_B.add_(1)
    if model.lookback:
        cache.recent_BN.copy_(torch.cat([cache.recent_BN[:, 1:], tokens_B[:, None]], dim=1))
    return model.logits(x_B1D[:, 0]).contiguous()


def pad(prompts: Sequence[Sequence[int]], filler: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Pads prompts on the right. Returns tokens (B, T) and lengths (B,), int64."""
    lengths = [len(prompt) for prompt in prompts]
    tokens = np.full((len(prompts), max(lengths)), filler, dtype=np.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    return torch.from_numpy(tokens).to(device), torch.tensor(lengths, device=device)


LEAST_TOKENS = 16  # a shorter prefix is read as fast as it is copied
MAX_PREFIXES = 512


@dataclass(frozen=True)
class Prefix:
    """The state of a row after `length` tokens. logits_V: logits of the next token, if they were computed."""

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
        self.bytes = 0

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

    def branch(self, tokens: Sequence[int], start: int) -> int | None:
        """The length to which `tokens` agree with the most similar earlier ones; None unless well after `start`."""
        mine = np.asarray(tokens, dtype=np.int32)
        alike = self._alike(mine.tobytes())
        agreed = max((_agreement(mine, np.frombuffer(key, dtype=np.int32)) for key in alike), default=0)
        return agreed if start + LEAST_TOKENS <= agreed < len(tokens) else None

    def keep(
        self, tokens: Sequence[int], cache: KVCache, row: int, logits_V: Tensor | None = None, alone: bool = False
    ) -> None:
        """Keeps the state of a row after these tokens, unless there are few or it is kept already.

        logits_V: logits of the next token, if they are known; alone: the row is all of a cache that nobody else uses.
        """
        key = _key(tokens)
        old = self._prefixes.get(key)
        if len(tokens) < LEAST_TOKENS or (old is not None and (logits_V is None or old.logits_V is not None)):
            return
        own = cache if alone else cache.take(torch.tensor([row], device=cache.positions_B.device), len(tokens))
        prefix = Prefix(len(tokens), own, None if logits_V is None else logits_V.clone())
        if old is not None:
            self.bytes -= self._prefixes.pop(key).bytes
        if prefix.bytes <= self._max_bytes:
            self._prefixes[key] = prefix
            self.bytes += prefix.bytes
        while self.bytes > self._max_bytes or len(self) > MAX_PREFIXES:
            self.bytes -= self._prefixes.popitem(last=False)[1].bytes

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
