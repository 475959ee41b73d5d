"""Continuous batching: rows join the running batch when a seat is free and leave it with their last token.

A step decodes one token for every running row, reads a part of the waiting prompts, and chooses the next tokens.
Prompts are read in waves, each with a cache of its own, from which finished rows are copied into free seats of the
running batch (batch.py). With a budget of prompt tokens a step, a wave has as many short prompts as the budget allows,
in the order of arrival, and a long prompt is read in parts: neither stalls the rows that already answer. Seats have
room for a whole row, so a row that has joined never has to leave before its end.

A row's tokens do not depend on the other rows: it has its own cache, its own random numbers (sample.py), its own bias.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quern import compiler
from quern.generate.batch import Joining, RunningBatch
from quern.generate.cache import KVCache, pad
from quern.generate.compiled import CompiledDecode
from quern.generate.prefix import PrefixCache
from quern.generate.reply import Token
from quern.generate.rows import Event, Row
from quern.generate.sample import draw, log_probabilities, penalise, sample
from quern.generate.sampling import Sampling
from quern.machine import Machine
from quern.model.base import LanguageModel

PREFILL_TOKENS = 8192  # prompt tokens in one forward pass, padding included
INTERLEAVED_TOKENS = 256
"""Prompt tokens, or tokens of a text to score, that a server reads between two tokens of the replies that run."""


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
        self._vocab_size, self._filler = vocab_size, filler
        self.waiting: deque[Row] = deque()
        self._wave: Wave | None = None
        self.batch = RunningBatch(model, vocab_size, max_rows, compiled)

    def reset(self) -> None:
        """Cancels all generations and forgets their rows."""
        reading = [] if self._wave is None else [row for entry in self._wave.entries for row in entry.rows]
        for row in (*self.waiting, *reading, *self.batch.rows):
            row.generation.cancel()
        self.waiting.clear()
        self._wave = None
        self.batch.leave(self.batch.taken)

    @property
    def running(self) -> int:
        """Rows that are answering or whose prompts are being read."""
        reading = sum(len(entry.rows) for entry in self._wave.entries if not entry.joined) if self._wave else 0
        return len(self.batch) + reading

    @torch.inference_mode()
    def step(self, prefill_tokens: int | None = None) -> None:
        """One token for every running row, and prompts of waiting ones.

        Args:
            prefill_tokens: The most prompt tokens to read beside running rows (`_interleave`). None reads prompts until
                no seat is free (`_fill_seats`).
        """
        self._drop_cancelled()
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
        while self._wave is not None or self._next_wave(PREFILL_TOKENS):
            self._read(PREFILL_TOKENS)

    def _interleave(self, left: int, busy: bool) -> None:
        """Reads at most so many prompt tokens, so that running rows wait little. busy: There are running rows."""
        while left > 0 and (self._wave is not None or self._next_wave(left)):
            left -= self._read(left if busy else PREFILL_TOKENS)

    def _drop_cancelled(self) -> None:
        if any(row.generation.cancelled for row in self.waiting):
            self.waiting = deque(row for row in self.waiting if not row.generation.cancelled)
        rows = zip(self.batch.taken, self.batch.rows, strict=True)
        if gone := [seat for seat, row in rows if row.generation.cancelled]:
            self.batch.leave(gone)

    def _next_wave(self, budget: int) -> bool:
        """Starts to read the prompts that waited longest, as many as there are free seats. False if there are none.

        A wave has prompts without a known beginning, or only prompts with one, which take different paths. It has one
        prompt, or as many as are read with at most `budget` tokens.
        """
        entries: list[Entry] = []
        known = []
        widest = rows = 0
        free = self.max_rows - len(self.batch)
        while self.waiting and rows < free:
            row = self.waiting[0]
            if entries and row.tokens is entries[-1].tokens:
                entries[-1].rows.append(self.waiting.popleft())
                rows += 1
                continue
            prefix = None if self.prefixes is None else self.prefixes.find(row.tokens)
            start = 0 if prefix is None else prefix.length
            wider = max(widest, len(row.tokens) - start)
            if entries and ((start > 0) != (entries[0].read > 0) or (len(entries) + 1) * wider > budget):
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
        cache = KVCache.for_model(self.model, len(entries), max(len(entry.tokens) for entry in entries))
        for at, (entry, prefix) in enumerate(zip(entries, known, strict=True)):
            if prefix is not None:
                cache.put(at, prefix.cache, 0, prefix.length)
                entry.logits_V = prefix.logits_V if entry.read == len(entry.tokens) else None
        self._wave = Wave(entries, cache)
        return True

    def _read(self, budget: int) -> int:
        """Reads a part of the wave's prompts, at most so many tokens; prompts that are finished join the batch.

        Returns the number of tokens that were computed.
        """
        wave = self._wave
        assert wave is not None
        entries, computed = wave.entries, 0
        unread = sum(entry.read < len(entry.tokens) for entry in entries)
        if unread:
            chunks = [entry.chunk(max(1, budget // unread)) for entry in entries]
            tokens_BT, lengths_B = pad(chunks, self._filler, wave.cache.positions_B.device)
            computed = tokens_BT.numel()
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
        self._join(wave)
        if all(entry.joined for entry in entries):
            self._wave = None
        return computed

    def _keep(
        self, tokens: Sequence[int], cache: KVCache, row: int, logits_V: Tensor | None = None, alone: bool = False
    ) -> None:
        if self.prefixes is not None and self.prefixes.wants(tokens, logits_V is not None):
            own = None if logits_V is None else logits_V.clone()
            self.prefixes.add(tokens, cache if alone else cache.copy_of(row, len(tokens)), own)

    def _join(self, wave: Wave) -> None:
        """Rows of finished prompts join the batch."""
        ready = [
            (at, entry) for at, entry in enumerate(wave.entries) if entry.logits_V is not None and not entry.joined
        ]
        joining = []
        for at, entry in ready:
            assert entry.logits_V is not None
            joining += [Joining(row, wave.cache, at, entry.logits_V) for row in entry.rows]
            entry.joined = True
        if joining:
            coming = (row for entry in wave.entries for row in entry.rows)
            self.batch.join(joining, max(row.room for row in (*coming, *self.waiting)))

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
