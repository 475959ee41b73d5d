"""Continuous batching: rows join the running batch when a seat is free and leave it with their last token.

A step decodes one token for every running row, reads a part of the waiting prompts, and chooses the next tokens.
Prompts are read in waves, each with a cache of its own, from which finished rows are copied into free seats of the
running batch. With a budget of prompt tokens a step, a wave has as many short prompts as the budget allows, in the
order of arrival, and a long prompt is read in parts: neither stalls the rows that already answer. Seats have room for a
whole row, so a row that has joined never has to leave before its end.

A row's tokens do not depend on the other rows: it has its own cache, its own random numbers (sample.py), its own bias.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quern import compiler
from quern.generate.cache import KVCache, Prefix, PrefixCache, decode, pad
from quern.generate.compiled import SPAN, CompiledDecode
from quern.generate.reply import Event, Row, Token
from quern.generate.sample import draw, log_probabilities, penalise, sample
from quern.generate.sampling import Sampling
from quern.machine import Machine
from quern.model.base import LanguageModel

PREFILL_TOKENS = 8192  # prompt tokens in one forward pass, padding included
INTERLEAVED_TOKENS = 256
"""Prompt tokens, or tokens of a text to score, that a server reads between two tokens of the replies that run."""


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
    """The rows that answer, a seat of one cache for each, which the decode step computes taken or not, and their
    logits. There are as many seats as a compiled size has; without one, a batch that grows while it runs doubles."""

    def __init__(self, model: LanguageModel, vocab_size: int, max_rows: int, compiled: CompiledDecode | None) -> None:
        self._model, self._vocab_size, self._max_rows, self._compiled = model, vocab_size, max_rows, compiled
        self._seats: list[Row | None] = []
        self._cache: KVCache | None = None
        self._spare: KVCache | None = None  # of the last batch, for the next one
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
        """Frees seats. A batch of a compiled size leaves its cache to the next one."""
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
        cache = self.cache
        longest = max(row.room for row, _ in rows)
        if longest > cache.max_tokens:
            cache.grow(longest, self._model.windows)
        free = [seat for seat, row in enumerate(self._seats) if row is None]
        for (row, entry), seat in zip(rows, free, strict=False):
            assert entry.logits_V is not None
            cache.put(seat, states, entry.at, len(row.tokens))
            self._seats[seat] = row
            self._logits_SV[seat] = entry.logits_V

    @property
    def _fixed(self) -> bool:
        """Whether the decode step is compiled for certain numbers of rows and one length."""
        return self._compiled is not None and bool(self._compiled.rows)

    def _size(self, rows: int) -> int:
        """The number of seats that the decode step computes for this number of rows."""
        seats = None if self._compiled is None else self._compiled.seats(rows)
        return rows if seats is None else seats

    def _open(self, size: int, room: int) -> None:
        """Begins a batch of empty seats; the rows that join overwrite what its cache holds."""
        if self._compiled is not None and self._fixed:
            self._compiled.refresh()
            room = self._compiled.max_tokens
        spare, self._spare = self._spare, None
        if spare is None or len(spare.positions_B) != size or spare.max_tokens != room:
            spare = KVCache(self._model, size, room)
        self._cache, self._seats = spare, [None] * size
        self._logits_SV = torch.empty((size, self._vocab_size), dtype=torch.float32, device=spare.positions_B.device)

    def _resize(self, size: int) -> None:
        """Copies the rows into a batch of `size` seats."""
        taken = self.taken
        index_S = torch.tensor(taken + taken[:1] * (size - len(taken)), device=self.cache.positions_B.device)
        self._cache, self._logits_SV = self.cache.take(index_S), self._logits_SV[index_S]
        self._seats = [self._seats[seat] for seat in taken] + [None] * (size - len(taken))


class Scheduler:
    """The running batch, the wave that is being read, and the rows that wait. Not thread-safe."""

    def __init__(
        self,
        model: LanguageModel,
        machine: Machine,
        vocab_size: int,
        filler: int,
        max_rows: int,
        compiled: CompiledDecode | None,
        prefixes: PrefixCache | None,
    ) -> None:
        self.model, self.machine, self.max_rows, self.prefixes = model, machine, max_rows, prefixes
        self._vocab_size, self._filler = vocab_size, filler
        self.waiting: deque[Row] = deque()
        self._wave: list[Entry] = []  # prompts that are read together
        self._wave_cache: KVCache | None = None
        self.batch = RunningBatch(model, vocab_size, max_rows, compiled)

    def reset(self) -> None:
        """Cancels all generations and forgets their rows."""
        reading = [row for entry in self._wave for row in entry.rows]
        for row in (*self.waiting, *reading, *self.batch.rows):
            row.generation.cancel()
        self.waiting.clear()
        self._wave, self._wave_cache = [], None
        self.batch.leave(self.batch.taken)

    @property
    def running(self) -> int:
        """Rows that are answering or whose prompts are being read. Any thread may ask."""
        return len(self.batch) + sum(len(entry.rows) for entry in self._wave if not entry.joined)

    @torch.inference_mode()
    def step(self, prefill_tokens: int | None = None) -> None:
        """One token for every running row, and prompts of waiting ones.

        prefill_tokens: The most prompt tokens to read beside running rows (`_interleave`). None reads prompts until no
        seat is free (`_fill_seats`).
        """
        if any(row.generation.cancelled for row in self.waiting):
            self.waiting = deque(row for row in self.waiting if not row.generation.cancelled)
        seats = zip(self.batch.taken, self.batch.rows, strict=True)
        if gone := [seat for seat, row in seats if row.generation.cancelled]:
            self.batch.leave(gone)
        busy = len(self.batch) > 0
        if busy:
            self.batch.decode(shrink=not self.waiting)
        if prefill_tokens is None:
            self._fill_seats()
        else:
            self._interleave(prefill_tokens, busy)
        if len(self.batch):
            self._choose()

    def _fill_seats(self) -> None:
        """Reads prompts until no seat is free: the highest throughput, when nobody watches."""
        while self._wave or self._next_wave(PREFILL_TOKENS):
            self._read(PREFILL_TOKENS)

    def _interleave(self, left: int, busy: bool) -> None:
        """Reads at most so many prompt tokens, so that running rows wait little. busy: There are running rows."""
        while left > 0 and (self._wave or self._next_wave(left)):
            left -= self._read(left if busy else PREFILL_TOKENS)

    def _next_wave(self, budget: int) -> bool:
        """Starts to read the prompts that waited longest, as many as there are free seats. False if there are none.

        A wave has prompts without a known beginning, or only prompts with one, which take different paths. It has one
        prompt, or as many as are read with at most `budget` tokens.
        """
        wave: list[Entry] = []
        widest = rows = 0
        free = self.max_rows - len(self.batch)
        while self.waiting and rows < free:
            row = self.waiting[0]
            if wave and row.tokens is wave[-1].tokens:
                wave[-1].rows.append(self.waiting.popleft())
                rows += 1
                continue
            prefix = None if self.prefixes is None else self.prefixes.find(row.tokens)
            start = 0 if prefix is None else prefix.length
            wider = max(widest, len(row.tokens) - start)
            if wave and ((start > 0) != (wave[0].read > 0) or (len(wave) + 1) * wider > budget):
                break
            wave.append(Entry([self.waiting.popleft()], len(wave), prefix, start))
            if self.prefixes is not None:
                self.prefixes.count(row.tokens, prefix)
                wave[-1].cut = self.prefixes.branch(row.tokens, start)
            if row.prompt == 0:
                row.generation.cached_tokens = start
            widest, rows = wider, rows + 1
        if wave:
            self._wave_cache = KVCache(self.model, len(wave), max(len(entry.tokens) for entry in wave))
            for entry in wave:
                if (prefix := entry.prefix) is not None:
                    self._wave_cache.put(entry.at, prefix.cache, 0, prefix.length)
                    entry.logits_V = prefix.logits_V if entry.read == len(entry.tokens) else None
            self._wave = wave
        return bool(wave)

    def _read(self, budget: int) -> int:
        """Reads a part of the wave's prompts, at most so many tokens; prompts that are finished join the batch.

        Returns the number of tokens that were computed.
        """
        wave, cache, computed = self._wave, self._wave_cache, 0
        assert cache is not None
        unread = sum(entry.read < len(entry.tokens) for entry in wave)
        if unread:
            chunks = [entry.chunk(max(1, budget // unread)) for entry in wave]
            tokens_BT, lengths_B = pad(chunks, self._filler, cache.positions_B.device)
            computed = tokens_BT.numel()
            with compiler.eager():  # a model in training is compiled for its training shape
                x_BD = cache.prefill(self.model, tokens_BT, lengths_B, self.machine.attention)
            ends: list[Entry] = []
            for entry, chunk in zip(wave, chunks, strict=True):
                entry.read += len(chunk)
                if chunk and entry.read == len(entry.tokens):
                    ends.append(entry)
                elif chunk and entry.read == entry.cut:
                    self._keep(entry.tokens[: entry.read], cache, entry.at)
            if ends:
                index_N = torch.tensor([entry.at for entry in ends], device=x_BD.device)
                logits_NV = self.model.logits(x_BD[index_N])[:, : self._vocab_size]
                for entry, logits_V in zip(ends, logits_NV, strict=True):
                    entry.logits_V = logits_V
                    # The cache of a prompt alone is of use to nobody else: it need not be copied.
                    self._keep(entry.tokens, cache, entry.at, logits_V, alone=len(wave) == 1)
        joining = [entry for entry in wave if entry.logits_V is not None and not entry.joined]
        if joining:
            coming = (row for entry in wave for row in entry.rows)
            self.batch.join(joining, cache, max(row.room for row in (*coming, *self.waiting)))
            for entry in joining:
                entry.joined = True
        if all(entry.joined for entry in wave):
            self._wave, self._wave_cache = [], None
        return computed

    def _keep(
        self, tokens: Sequence[int], cache: KVCache, row: int, logits_V: Tensor | None = None, alone: bool = False
    ) -> None:
        if self.prefixes is not None and self.prefixes.wants(tokens, logits_V is not None):
            row_1 = torch.tensor([row], device=cache.positions_B.device)
            own = None if logits_V is None else logits_V.clone()
            self.prefixes.add(tokens, cache if alone else cache.take(row_1, len(tokens)), own)

    def _choose(self) -> None:
        """The next token of every row that has logits, and what becomes final with it."""
        rows, logits_BV = self.batch.rows, self.batch.logits_BV
        picked = choose(rows, logits_BV)
        tokens = [row.reply.choose(token) for row, token in zip(rows, picked, strict=True)]
        wanted = max((row.logprobs for row in rows if row.logprobs is not None), default=None)
        told = [] if wanted is None else log_probabilities(logits_BV, tokens, wanted)
        finished = []
        for number, (seat, row) in enumerate(zip(self.batch.taken, rows, strict=True)):
            events, place = row.generation.events, (row.prompt, row.sample)
            if row.logprobs is not None:
                value, top = told[number]
                row.reply.logprobs.append(value)
                row.reply.top_logprobs.append(top[: row.logprobs])
                start = row.reply.start(tokens[number])
                events.append(Event(*place, Token(tokens[number], value, top[: row.logprobs], start)))
            events += [Event(*place, delta) for delta in row.reply.push(tokens[number])]
            if row.reply.finish_reason is not None:
                events.append(Event(*place, row.reply.completion()))
                row.generation.unfinished -= 1
                finished.append(seat)
                if row.sample == 0:  # the last token is not in the cache
                    self._keep([*row.tokens, *row.reply.ids[:-1]], self.batch.cache, seat)
        self.batch.leave(finished)


def choose(rows: Sequence[Row], logits_BV: Tensor) -> list[int]:
    """Samples every row's next token, each with its own settings."""
    allowed = [row.reply.allowed() for row in rows]
    changed = [at for at, row in enumerate(rows) if row.bias or row.sampling.penalises or allowed[at] is not None]
    if changed:
        logits_BV = logits_BV.clone()
        for at in changed:
            row, mask_V = rows[at], allowed[at]
            penalise(row.sampling, logits_BV[at], row.tokens, row.reply.ids)
            if row.bias:
                ids = torch.tensor(list(row.bias), device=logits_BV.device)
                logits_BV[at, ids] += torch.tensor(list(row.bias.values()), device=logits_BV.device)
            if mask_V is not None:
                logits_BV[at].masked_fill_(torch.from_numpy(~mask_V).to(logits_BV.device), -torch.inf)
    groups: dict[Sampling, list[int]] = {}
    for at, row in enumerate(rows):
        groups.setdefault(row.sampling, []).append(at)
    picked = [0] * len(rows)
    for sampling, group in groups.items():
        own_BV = logits_BV if len(group) == len(rows) else logits_BV[group]
        uniform_BN = None
        if sampling.temperature > 0:
            uniform_BN = draw([rows[at].random for at in group], own_BV.size(-1)).to(own_BV.device)
        for at, token in zip(group, sample(own_BV, sampling, uniform_BN).tolist(), strict=True):
            picked[at] = token
    return picked
