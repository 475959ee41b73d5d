"""Continuous batching: rows join the running batch when a seat is free and leave it with their last token.

A step decodes one token for every running row, reads a part of the waiting prompts, and chooses the next tokens.
Prompts are read in waves, each with a cache of its own, from which finished rows are copied into free seats of the
running cache. With a budget of prompt tokens a step, long prompts do not stall the rows that already answer. Seats have
room for a whole row, so a row that has joined never has to leave before its end.

A row's tokens do not depend on the other rows: it has its own cache, its own random numbers (sample.py), its own bias.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quern import compiler
from quern.generate.cache import KVCache, decode, pad
from quern.generate.compiled import SPAN, CompiledDecode
from quern.generate.prefix import PrefixCache
from quern.generate.reply import Completion, Delta, Reply, Token
from quern.generate.sample import Sampling, draw, log_probabilities, sample
from quern.machine import Machine
from quern.model.base import LanguageModel

PREFILL_TOKENS = 8192  # prompt tokens in one forward pass, padding included


class Event(NamedTuple):
    """A piece of the reply, or the finished reply, of sample number `sample` of prompt number `prompt`.

    If log-probabilities were asked for, each token comes before the piece that it completes.
    """

    prompt: int
    sample: int
    value: Delta | Token | Completion


class Generation:
    """Rows that were submitted together. `events` holds what they have produced and nobody has taken yet."""

    def __init__(self, rows: int) -> None:
        self.events: deque[Event] = deque()
        self.unfinished = rows
        self.cancelled = False
        self.cached_tokens = 0
        """Prompt tokens that were not read again, of the first prompt."""

    def cancel(self) -> None:
        """The rows leave at the next step, without further events."""
        self.cancelled = True


@dataclass(eq=False)
class Row:
    """One reply in the making. prompt, sample: its place in its generation; tokens: its prompt's ids."""

    generation: Generation
    prompt: int
    sample: int
    tokens: Sequence[int]
    reply: Reply
    random: np.random.Generator
    sampling: Sampling
    bias: Mapping[int, float]
    logprobs: int | None


@dataclass(eq=False)
class Entry:
    """A prompt of a wave, with its rows. read: tokens in the wave's cache; cut: where its state is kept on the way."""

    rows: list[Row]
    read: int = 0
    cut: int | None = None
    logits_V: Tensor | None = None
    joined: bool = False

    @property
    def tokens(self) -> Sequence[int]:
        return self.rows[0].tokens

    def chunk(self, most: int) -> Sequence[int]:
        """The next tokens to read, at most so many and not beyond the cut."""
        end = self.cut if self.cut is not None and self.read < self.cut else len(self.tokens)
        return self.tokens[self.read : min(end, self.read + most)]


@dataclass(eq=False)
class Wave:
    """Prompts that are read together."""

    entries: list[Entry]
    cache: KVCache


class Scheduler:
    """The running batch, the wave that is being read, and the rows that wait. Not thread-safe.

    Args:
        model: The model. Its weights may change while nothing runs; `PrefixCache.clear` is then the caller's duty.
        machine: Where it runs.
        vocab_size: Tokens of the tokenizer; the model's vocabulary may be padded.
        filler: A token id for padding.
        max_rows: The most rows that run or are read; further rows wait, in the order of arrival.
        compiled: The compiled decode step, if any.
        prefixes: Where states of prompts are kept; with None, every prompt is read in full.
    """

    def __init__(
        self,
        model: LanguageModel,
        machine: Machine,
        vocab_size: int,
        filler: int,
        max_rows: int,
        compiled: CompiledDecode | None = None,
        prefixes: PrefixCache | None = None,
    ) -> None:
        self.model, self.machine, self.max_rows, self.prefixes = model, machine, max_rows, prefixes
        self._vocab_size, self._filler, self._compiled = vocab_size, filler, compiled
        self.waiting: deque[Row] = deque()
        self._wave: Wave | None = None
        self._seats: list[Row | None] = []
        self._cache: KVCache | None = None
        self._spare: KVCache | None = None  # of the last batch, for the next one
        self._logits_SV = torch.empty(0)

    def reset(self) -> None:
        """Cancels all generations and forgets their rows."""
        reading = [] if self._wave is None else [row for entry in self._wave.entries for row in entry.rows]
        for row in (*self.waiting, *reading, *self._seats):
            if row is not None:
                row.generation.cancel()
        self.waiting.clear()
        self._wave = None
        self._empty()

    def _empty(self) -> None:
        """No row is left in the batch. A batch of a compiled size leaves its cache to the next one."""
        if self._fixed() and self._cache is not None:
            self._spare = self._cache
        self._seats, self._cache = [], None

    @property
    def running(self) -> int:
        """Rows that are answering or whose prompts are being read."""
        reading = sum(len(entry.rows) for entry in self._wave.entries if not entry.joined) if self._wave else 0
        return len(self._taken()) + reading

    @torch.inference_mode()
    def step(self, prefill_tokens: int | None = None) -> None:
        """One token for every running row. prefill_tokens: The most prompt tokens to read beside running rows.

        None reads as many prompts as there are free seats first: the highest throughput when nobody watches.
        """
        self._drop_cancelled()
        taken = self._taken()
        if taken:
            self._decode(taken)
        while self._wave is not None or self._next_wave(self.max_rows - len(self._taken())):
            self._read(prefill_tokens if taken and prefill_tokens is not None else PREFILL_TOKENS)
            if prefill_tokens is not None:
                break
        self._choose()

    def _taken(self) -> list[int]:
        return [seat for seat, row in enumerate(self._seats) if row is not None]

    def _drop_cancelled(self) -> None:
        if any(row.generation.cancelled for row in self.waiting):
            self.waiting = deque(row for row in self.waiting if not row.generation.cancelled)
        if any(row is not None and row.generation.cancelled for row in self._seats):
            self._seats = [None if row is None or row.generation.cancelled else row for row in self._seats]
            if not self._taken():
                self._empty()

    def _decode(self, taken: list[int]) -> None:
        """Appends the last token of every running row to the cache; computes the next logits."""
        size = self._size(len(taken))
        if size <= len(self._seats) // 2 and not self.waiting:
            self._arrange(taken, size)
            taken = self._taken()
        cache = self._cache
        assert cache is not None
        device = cache.positions_B.device
        if len(taken) < len(self._seats):  # empty seats are computed too: they start again at position 0
            cache.positions_B[[seat for seat, row in enumerate(self._seats) if row is None]] = 0
        rows = [row for row in self._seats if row is not None]
        longest = max(len(row.tokens) + len(row.reply.ids) for row in rows)
        tokens_B = torch.tensor([0 if row is None else row.reply.ids[-1] for row in self._seats], device=device)
        slots_S = torch.arange(min(-(-longest // SPAN) * SPAN, cache.max_tokens), device=device)
        if self._compiled is not None and self._compiled.fits(cache):
            logits_SV = self._compiled(cache, tokens_B, slots_S)
        else:
            with compiler.eager():
                logits_SV = decode(self.model, cache, tokens_B, slots_S)
        self._logits_SV = logits_SV[:, : self._vocab_size]

    def _next_wave(self, free: int) -> bool:
        """Starts to read the prompts that waited longest, as many as there are free seats. False if there are none.

        A wave has prompts without a known beginning, or only prompts with one, which take different paths.
        """
        entries: list[Entry] = []
        known = []
        widest = rows = 0
        while self.waiting and rows < free:
            row = self.waiting[0]
            if entries and row.tokens is entries[-1].tokens:
                entries[-1].rows.append(self.waiting.popleft())
                rows += 1
                continue
            prefix = None if self.prefixes is None else self.prefixes.find(row.tokens)
            start = 0 if prefix is None else prefix.length
            wider = max(widest, len(row.tokens) - start)
            if entries and ((start > 0) != (entries[0].read > 0) or (len(entries) + 1) * wider > PREFILL_TOKENS):
                break
            entry = Entry([self.waiting.popleft()], read=start)
            if self.prefixes is not None:
                self.prefixes.count(row.tokens, prefix)
                entry.cut = self.prefixes.branch(row.tokens, start)
            if row.prompt == 0:
                row.generation.cached_tokens = start
            entries.append(entry)
            known.append(prefix)
            widest, rows = wider, rows + 1
        if not entries:
            return False
        if self._compiled is not None and not self._seats:
            self._compiled.refresh()
        cache = KVCache.for_model(self.model, len(entries), max(len(entry.tokens) for entry in entries))
        for at, (entry, prefix) in enumerate(zip(entries, known, strict=True)):
            if prefix is not None:
                cache.put(at, prefix.cache, 0, prefix.length)
                entry.logits_V = prefix.logits_V if entry.read == len(entry.tokens) else None
        self._wave = Wave(entries, cache)
        return True

    def _read(self, budget: int) -> None:
        """Reads a part of the wave's prompts, at most so many tokens; prompts that are finished join the batch."""
        wave = self._wave
        assert wave is not None
        entries = wave.entries
        unread = sum(entry.read < len(entry.tokens) for entry in entries)
        if unread:
            chunks = [entry.chunk(max(1, budget // unread)) for entry in entries]
            tokens_BT, lengths_B = pad(chunks, self._filler, wave.cache.positions_B.device)
            with compiler.eager():  # a model in training is compiled for its training shape
                x_BD = wave.cache.prefill(self.model, tokens_BT, lengths_B, self.machine.attention)
            ends = []
            for at, (entry, chunk) in enumerate(zip(entries, chunks, strict=True)):
                entry.read += len(chunk)
                if chunk and entry.read == len(entry.tokens):
                    ends.append(at)
                elif chunk and entry.read == entry.cut:
                    self._keep(entry.tokens[: entry.read], wave.cache, at)
            if ends:
                logits_NV = self.model.logits(x_BD[torch.tensor(ends, device=x_BD.device)])[:, : self._vocab_size]
                for at, logits_V in zip(ends, logits_NV, strict=True):
                    entries[at].logits_V = logits_V
                    # The cache of a prompt alone is of use to nobody else: it need not be copied.
                    self._keep(entries[at].tokens, wave.cache, at, logits_V, alone=len(entries) == 1)
        ready = [at for at, entry in enumerate(entries) if entry.logits_V is not None and not entry.joined]
        self._join(wave, ready)
        if all(entry.joined for entry in entries):
            self._wave = None

    def _keep(
        self, tokens: Sequence[int], cache: KVCache, row: int, logits_V: Tensor | None = None, alone: bool = False
    ) -> None:
        if self.prefixes is not None and self.prefixes.wants(tokens, logits_V is not None):
            own = None if logits_V is None else logits_V.clone()
            self.prefixes.add(tokens, cache if alone else cache.copy_of(row, len(tokens)), own)

    def _join(self, wave: Wave, ready: Sequence[int]) -> None:
        """Copies the rows of finished prompts into free seats."""
        joining = [(row, at) for at in ready for row in wave.entries[at].rows]
        if not joining:
            return
        taken = self._taken()
        needed = self._size(len(taken) + len(joining))
        if needed > len(self._seats):
            # A batch that grows while it runs is copied each time: it doubles.
            self._arrange(
                taken, needed if self._fixed() or not taken else max(needed, min(2 * len(self._seats), self.max_rows))
            )
        cache = self._cache
        assert cache is not None
        free = [seat for seat, row in enumerate(self._seats) if row is None]
        room = max(len(row.tokens) + row.reply.max_tokens for row, _ in joining)
        if room > cache.max_tokens:
            cache.grow(room, self.model.windows)
        for (row, at), seat in zip(joining, free, strict=False):
            cache.put(seat, wave.cache, at, len(row.tokens))
            self._seats[seat] = row
            logits_V = wave.entries[at].logits_V
            assert logits_V is not None
            self._logits_SV[seat] = logits_V
        for at in ready:
            wave.entries[at].joined = True

    def _fixed(self) -> bool:
        """Whether the decode step is compiled for certain numbers of rows and one length."""
        return self._compiled is not None and bool(self._compiled.rows)

    def _size(self, rows: int) -> int:
        """The number of seats that the decode step computes for this number of rows."""
        seats = None if self._compiled is None else self._compiled.seats(rows)
        return rows if seats is None else seats

    def _arrange(self, taken: list[int], size: int) -> None:
        """Makes a batch of `size` seats, of which the first ones are `taken` of this one's."""
        if self._cache is None or not taken:
            assert self._wave is not None
            rows = [row for entry in self._wave.entries for row in entry.rows]
            room = max(len(row.tokens) + row.reply.max_tokens for row in [*rows, *self.waiting])
            if self._compiled is not None and self._fixed():
                room = self._compiled.max_tokens
            spare, self._spare = self._spare, None
            if spare is None or len(spare.positions_B) != size or spare.max_tokens != room:
                spare = KVCache.for_model(self.model, size, room)
            self._cache = spare  # the rows that join overwrite what it holds
            self._logits_SV = torch.empty(
                (size, self._vocab_size), dtype=torch.float32, device=self._cache.positions_B.device
            )
            self._seats = [None] * size
            return
        index_S = torch.tensor(taken + taken[:1] * (size - len(taken)), device=self._cache.positions_B.device)
        self._cache, self._logits_SV = self._cache.take(index_S), self._logits_SV[index_S]
        self._seats = [self._seats[seat] for seat in taken] + [None] * (size - len(taken))

    def _choose(self) -> None:
        """The next token of every row that has logits, and what becomes final with it."""
        taken = self._taken()
        if not taken:
            return
        rows = [row for row in self._seats if row is not None]
        logits_BV = self._logits_SV if len(taken) == len(self._seats) else self._logits_SV[taken]
        picked = choose(rows, logits_BV)
        tokens = [row.reply.choose(token) for row, token in zip(rows, picked, strict=True)]
        wanted = max((row.logprobs for row in rows if row.logprobs is not None), default=None)
        told = [] if wanted is None else log_probabilities(logits_BV, tokens, wanted)
        for number, (seat, row) in enumerate(zip(taken, rows, strict=True)):
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
                self._seats[seat] = None
                assert self._cache is not None
                if self.prefixes is not None and row.sample == 0:
                    # The last token is not in the cache.
                    self._keep([*row.tokens, *row.reply.ids[:-1]], self._cache, seat)
        if not self._taken():
            self._empty()


def choose(rows: Sequence[Row], logits_BV: Tensor) -> list[int]:
    """Samples every row's next token, each with its own settings."""
    allowed = [row.reply.allowed() for row in rows]
    changed = [at for at, row in enumerate(rows) if row.bias or row.sampling.penalises or allowed[at] is not None]
    if changed:
        logits_BV = logits_BV.clone()
        for at in changed:
            row, mask_V = rows[at], allowed[at]
            row.sampling.penalise(logits_BV[at], row.tokens, row.reply.ids)
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
