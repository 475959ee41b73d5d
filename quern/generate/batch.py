"""The running batch: the rows that answer, each in a seat of one cache. A step computes every seat, taken or not."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quern import compiler
from quern.generate.cache import KVCache, Prefix, decode
from quern.generate.compiled import SPAN, CompiledDecode
from quern.generate.reply import Row
from quern.model.base import LanguageModel


@dataclass(eq=False)
class Entry:
    """A prompt that is read, with its rows. Its state is row `at` of the wave's cache."""

    rows: list[Row]
    at: int
    prefix: Prefix | None
    read: int = 0  # tokens in the cache
    cut: int | None = None  # where the state is kept on the way
    logits_V: Tensor | None = None
    joined: bool = False

    @property
    def tokens(self) -> Sequence[int]:
        return self.rows[0].tokens

    def chunk(self, most: int) -> Sequence[int]:
        """The next tokens to read, at most so many and not beyond the cut."""
        end = self.cut if self.cut is not None and self.read < self.cut else len(self.tokens)
        return self.tokens[self.read : min(end, self.read + most)]


class RunningBatch:
    """Rows, their states and their next logits, by seat. There are as many seats as a compiled size has; without one, a
    batch that grows while it runs doubles."""

    def __init__(self, model: LanguageModel, vocab_size: int, max_rows: int, compiled: CompiledDecode | None) -> None:
        self._model, self._vocab_size, self._max_rows, self._compiled = model, vocab_size, max_rows, compiled
        self._seats: list[Row | None] = []
        self._cache: KVCache | None = None
        self._spare: KVCache | None = None  # from the last batch of a compiled size, for the next one
        self._logits_SV = torch.empty(0)

    def __len__(self) -> int:
        """The number of rows."""
        return len(self._seats) - self._seats.count(None)

    @property
    def taken(self) -> list[int]:
        """The seats of the rows."""
        return [seat for seat, row in enumerate(self._seats) if row is not None]

    @property
    def rows(self) -> list[Row]:
        """The rows, in the order of their seats."""
        return [row for row in self._seats if row is not None]

    @property
    def logits_BV(self) -> Tensor:
        """The logits of each row's next token, fp32."""
        taken = self.taken
        return self._logits_SV if len(taken) == len(self._seats) else self._logits_SV[taken]

    @property
    def cache(self) -> KVCache:
        """The states of the rows, by seat."""
        assert self._cache is not None
        return self._cache

    def leave(self, seats: Collection[int]) -> None:
        """Frees seats."""
        for seat in seats:
            self._seats[seat] = None
        if not len(self):
            if self._fixed and self._cache is not None:
                self._spare = self._cache
            self._seats, self._cache = [], None

    def decode(self, shrink: bool) -> None:
        """Appends the last token of every row to the cache; computes the next logits.

        shrink: Give up seats that are not needed, because no row waits for one.
        """
        size = self._size(len(self))
        if shrink and size <= len(self._seats) // 2:
            self._resize(size)
        cache = self.cache
        device = cache.positions_B.device
        if len(self) < len(self._seats):  # empty seats are computed too: they start again at position 0
            cache.positions_B[[seat for seat, row in enumerate(self._seats) if row is None]] = 0
        longest = max(len(row.tokens) + len(row.reply.ids) for row in self.rows)
        tokens_B = torch.tensor([0 if row is None else row.reply.ids[-1] for row in self._seats], device=device)
        slots_S = torch.arange(min(-(-longest // SPAN) * SPAN, cache.max_tokens), device=device)
        if self._compiled is not None and self._compiled.fits(cache):
            logits_SV = self._compiled(cache, tokens_B, slots_S)
        else:
            with compiler.eager():
                logits_SV = decode(self._model, cache, tokens_B, slots_S)
        self._logits_SV = logits_SV[:, : self._vocab_size]

    def join(self, joining: Sequence[Entry], states: KVCache, room: int) -> None:
        """Copies rows of prompts that have been read, whose states are in a cache, into free seats.

        room: Tokens of the longest row that is known to come, which a new batch has room for.
        """
        rows = [(row, entry) for entry in joining for row in entry.rows]
        needed = self._size(len(self) + len(rows))
        if not self._seats:
            self._open(needed, room)
        elif needed > len(self._seats):
            self._resize(needed if self._fixed else max(needed, min(2 * len(self._seats), self._max_rows)))
        longest = max(row.room for row, _ in rows)
        if longest > self.cache.max_tokens:
            self.cache.grow(longest, self._model.windows)
        free = [seat for seat, row in enumerate(self._seats) if row is None]
        for (row, entry), seat in zip(rows, free, strict=False):
            assert entry.logits_V is not None
            self.cache.put(seat, states, entry.at, len(row.tokens))
            self._seats[seat], self._logits_SV[seat] = row, entry.logits_V

    @property
    def _fixed(self) -> bool:
        """Whether the decode step is compiled for certain numbers of rows and one length."""
        return self._compiled is not None and bool(self._compiled.rows)

    def _size(self, rows: int) -> int:
        """The number of seats that the decode step computes for this number of rows."""
        return (self._compiled and self._compiled.seats(rows)) or rows

    def _open(self, size: int, room: int) -> None:
        """Begins a batch of empty seats; the rows that join overwrite what its cache holds."""
        if self._compiled is not None and self._fixed:
            self._compiled.refresh()
            room = self._compiled.max_tokens
        cache, self._spare = self._spare, None
        if cache is None or len(cache.positions_B) != size or cache.max_tokens != room:
            cache = KVCache(self._model, size, room)
        self._cache, self._seats = cache, [None] * size
        self._logits_SV = torch.empty((size, self._vocab_size), dtype=torch.float32, device=cache.positions_B.device)

    def _resize(self, size: int) -> None:
        """Copies the rows into a batch of `size` seats."""
        taken = self.taken
        index_S = torch.tensor(taken + taken[:1] * (size - len(taken)), device=self.cache.positions_B.device)
        self._cache, self._logits_SV = self.cache.take(index_S), self._logits_SV[index_S]
        self._seats = [self._seats[seat] for seat in taken] + [None] * (size - len(taken))
