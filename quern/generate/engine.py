"""Generation with one model, for everyone who needs replies: evaluation, reinforcement learning, chat, the server.

Continuous batching: rows join the running batch (batch.py) when a seat is free and leave it with their last token. A
step decodes one token for every running row, reads a part of the waiting prompts, and chooses the next tokens. Prompts
are read in waves, each with a cache of its own, from which finished rows are copied into free seats of the running
batch. Seats have room for a whole row, so a row that has joined never has to leave before its end.

A row's tokens do not depend on the other rows: it has its own cache, its own random numbers (sample.py), its own bias.
In bf16, rounding depends on the number of rows, and may choose another one of two nearly equal tokens.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from quern import compiler
from quern.generate.batch import Entry, RunningBatch
from quern.generate.cache import KVCache, PrefixCache, pad, take_token
from quern.generate.compiled import CompiledDecode
from quern.generate.grammar import Grammar, Grammars
from quern.generate.reply import Completion, Event, Generation, Reply, Row, Token
from quern.generate.sample import choose, generator, log_probabilities
from quern.generate.sampling import Sampling
from quern.machine import Machine
from quern.model.base import LanguageModel
from quern.text.tokenizer import Tokenizer

PREFILL_TOKENS = 8192  # prompt tokens in one forward pass, padding included
SERVED_TOKENS = 256  # prompt tokens, also of a text to score, that a server reads between two tokens of its replies
SHARE = 7  # seats of a request of many rows, for each one that stays free for others


class Engine:
    """Generates with one model. Not thread-safe: the server runs it in a single thread (serve/worker.py).

    All requests share one running batch. Callers that wait for their replies iterate over `events`; a server submits
    requests and calls `step` itself. Weights may change while no request is open.

    Args:
        max_rows: The most rows in one batch; further rows wait until one of them leaves.
        prefix_megabytes: Memory for the states of prompts that were read, for later prompts that begin alike. With 0,
            every prompt is read in full, which weights that change need.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        machine: Machine,
        max_rows: int = 64,
        prefix_megabytes: float = 0,
    ):
        if model.shape.vocab_size < tokenizer.vocab_size:
            raise ValueError(
                f"the tokenizer has {tokenizer.vocab_size} tokens, the model {model.shape.vocab_size}: they do not "
                "belong together; use the tokenizer.json of the model's run"
            )
        self.model, self.tokenizer, self.machine, self.max_rows = model, tokenizer, machine, max_rows
        self.context = model.shape.context
        self.prefixes = PrefixCache(int(prefix_megabytes * 1e6)) if prefix_megabytes else None
        self.waiting: deque[Row] = deque()
        self._compiled = CompiledDecode(model, self.context) if machine.compile else None
        self._wave: list[Entry] = []  # prompts that are read together
        self._wave_cache: KVCache | None = None
        self.batch = RunningBatch(model, tokenizer.vocab_size, max_rows, self._compiled)

    @cached_property
    def grammars(self) -> Grammars:
        """Compiles the forms that replies can be bound to."""
        return Grammars(self.tokenizer)

    @property
    def running(self) -> int:
        """Rows that are answering or whose prompts are being read. Any thread may ask."""
        return len(self.batch) + sum(len(entry.rows) for entry in self._wave if not entry.joined)

    def warm_up(self, rows: Sequence[int]) -> None:
        """Compiles the decode step for these numbers of rows, to which smaller batches are padded, if the machine
        compiles. It pays off after some thousands of steps: in a server, not for a few questions."""
        if self._compiled is not None:
            for count in rows:
                self._compiled.warm_up(count)

    def generate(self, prompts: Sequence[Sequence[int]], *, samples: int = 1, **options: Any) -> list[list[Completion]]:
        """Returns `samples` completions of each prompt. Takes the arguments of `submit` and raises its errors."""
        done: list[list[Any]] = [[None] * samples for _ in prompts]
        for event in self.events(prompts, samples=samples, **options):
            if isinstance(event.value, Completion):
                done[event.prompt][event.sample] = event.value
        return done

    def events(self, prompts: Sequence[Sequence[int]], **options: Any) -> Iterator[Event]:
        """Yields the final pieces of every sample, each sample's `Completion` last; closing the iterator after its
        first event stops the work. Takes the arguments of `submit` and raises its errors."""
        generation = self.submit(prompts, **options)

        def produced() -> Iterator[Event]:
            try:
                while True:
                    while generation.events:
                        yield generation.events.popleft()
                    if not generation.unfinished or generation.cancelled:
                        return
                    self.step()
            finally:
                generation.cancelled = True

        return produced()

    def read(self, prompt: Sequence[int], top: int = 0, part: int = SERVED_TOKENS) -> Iterator[list[Token]]:
        """Yields the tokens of a text after its first one with their log-probabilities, and `top` likeliest ones each.

        part: tokens read at a time, between two steps of other work. Raises ValueError as `refuse`.
        """
        self.refuse(prompt)
        cache = KVCache(self.model, 1, len(prompt))
        for start in range(0, len(prompt) - 1, part):
            tokens = prompt[start : start + part + 1]
            with torch.inference_mode(), compiler.eager():
                tokens_BT, lengths_B = pad([tokens[:-1]], 0, cache.positions_B.device)
                x_BTD = cache.prefill(self.model, tokens_BT, lengths_B, self.machine.attention)
                logits_TV = self.model.logits(x_BTD[0])[:, : self.tokenizer.vocab_size]
                scored = log_probabilities(logits_TV, tokens[1:], top)
            yield [Token(id, value, best, 0) for id, (value, best) in zip(tokens[1:], scored, strict=True)]

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        samples: int = 1,
        max_tokens: int = 256,
        sampling: Sampling | None = None,
        seed: int | Sequence[int] = 0,
        stop: Sequence[str] = (),
        stop_ids: Sequence[int] = (),
        plain: bool = False,
        logprobs: int | None = None,
        bias: Mapping[int, float] | None = None,
        form: Grammar | None = None,
        calls: Grammar | None = None,
        must_call: bool = False,
    ) -> Generation:
        """Queues prompts. Their rows join the running batch as seats are free, in the order of arrival; where `step`
        is fair, later ones pass a generation that has its share of seats.

        Args:
            prompts: Token ids starting with BOS, each prompt shorter than the context.
            samples: Completions of each prompt.
            max_tokens: The most tokens in a completion; the context may end it earlier.
            sampling: How a token is chosen.
            seed: Seed of the random choice, one for all prompts or one for each.
            stop: A completion ends before any of these strings.
            stop_ids: A completion ends with any of these tokens.
            plain: Continue each prompt as text. Any special token ends it, and no tool is called.
            logprobs: Also compute the log-probability of every token (`Completion.logprobs`), and of so many of the
                likeliest tokens in its place (`Completion.top_logprobs`); None for neither.
            bias: Added to the logits of these tokens; -inf forbids one.
            form: The form of each text, from `grammars`; special tokens cannot occur in it.
            calls: The form of a call of the caller's tools, from `grammars`; they replace the calculator.
            must_call: Begin with a call, which needs `calls`.

        Returns:
            The open generation; `step` adds its events.

        Raises:
            ValueError: A prompt is empty or leaves no room for a token, a stop string is empty, a number out of range;
                no text of the form is short enough.
        """
        self._refuse(prompts, samples, max_tokens, [*stop_ids, *(bias or {})])
        seeds = [seed] * len(prompts) if isinstance(seed, int) else seed
        generation, rows = Generation(len(prompts) * samples), list[Row]()
        for p, prompt in enumerate(prompts):
            room = min(max_tokens, self.context - len(prompt))
            for demanded, what, most in ((form, "text", room), (calls if must_call else None, "call", room - 1)):
                if demanded is not None and demanded.shortest(most) is None:
                    raise ValueError(f"no {what} of the form that ends within {most} tokens was found")
            for s in range(samples):
                reply = Reply(self.tokenizer, len(prompt), room, stop, plain, stop_ids, form, calls, must_call)
                random = generator(seeds[p], prompt, s)
                rows.append(Row(generation, p, s, prompt, reply, random, sampling or Sampling(), bias or {}, logprobs))
        self.waiting.extend(rows)
        return generation

    def _refuse(self, prompts: Sequence[Sequence[int]], samples: int, max_tokens: int, tokens: Sequence[int]) -> None:
        """Refuses numbers below 1, prompts that are empty or too long, and ids that are no tokens."""
        if samples < 1 or max_tokens < 1:
            raise ValueError(f"samples ({samples}) and max_tokens ({max_tokens}) must be at least 1")
        for prompt in prompts:
            if not prompt:
                raise ValueError("a prompt is empty: begin it with the tokenizer's BOS")
            self.refuse(prompt, answer=1)
        for token in tokens:
            if not 0 <= token < self.tokenizer.vocab_size:
                raise ValueError(f"{token} is no token: ids are 0 to {self.tokenizer.vocab_size - 1}")

    def refuse(self, text: Sequence[int], answer: int = 0) -> None:
        """Raises ValueError if a text leaves fewer than `answer` tokens of the context, or holds several documents that
        the model hides from each other: a cache would show the earlier ones."""
        if len(text) > self.context - answer:
            has = f"the prompt has {len(text)} tokens and the model's context holds {self.context}"
            needs = ", of which at least one is for the answer" if answer else ""
            raise ValueError(f"{has}{needs}: shorten the prompt to {self.context - answer} tokens or fewer")
        if not text:
            return
        documents_BT = self.model.context(torch.tensor([text])).documents_BT
        if documents_BT is not None and documents_BT[0, 0] != documents_BT[0, -1]:
            raise ValueError("the prompt has several documents, which the model reads apart: send them one by one")

    def reset(self) -> None:
        """Cancels all generations and forgets their rows."""
        reading = [row for entry in self._wave for row in entry.rows]
        for row in (*self.waiting, *reading, *self.batch.rows):
            row.generation.cancelled = True
        self.waiting.clear()
        self._wave, self._wave_cache = [], None
        self.batch.leave(self.batch.taken)

    def step(self, most: int | None = None) -> None:
        """Computes one token for every running row of every generation, and prompts of waiting ones.

        most: The most tokens to read of prompts while rows run, so that these wait little; generations then also leave
        seats to others, which is fair. None, when nobody watches, reads prompts until no seat is free.

        If it fails, all rows are lost, and the engine can be used again.
        """
        try:
            with torch.inference_mode():
                self._step(most)
        except BaseException:
            self.reset()
            raise

    def _step(self, most: int | None) -> None:
        if any(row.generation.cancelled for row in self.waiting):
            self.waiting = deque(row for row in self.waiting if not row.generation.cancelled)
        seats = zip(self.batch.taken, self.batch.rows, strict=True)
        if gone := [seat for seat, row in seats if row.generation.cancelled]:
            self.batch.leave(gone)
        for entry in self._wave:
            if rest := [row for row in entry.rows if not row.generation.cancelled]:
                entry.rows = rest
            else:  # nobody waits for it
                entry.read, entry.joined = len(entry.tokens), True
        busy = len(self.batch) > 0
        if busy:
            self.batch.decode(shrink=not self.waiting)
        left = sys.maxsize if most is None else most
        while left > 0 and (self._wave or self._next_wave(min(left, PREFILL_TOKENS), fair=most is not None)):
            left -= self._read(min(left, PREFILL_TOKENS) if busy else PREFILL_TOKENS)
        if len(self.batch):
            self._choose()

    def _next_wave(self, budget: int, fair: bool) -> bool:
        """Starts to read the prompts that waited longest, as many as there are free seats. False if there are none.

        fair: A generation takes no further seat once it has `SHARE` times those that would stay free (the dynamic
        thresholds of Choudhury and Hahne, 1998). One of many rows so leaves room for those that come later.

        A wave has prompts without a known beginning, or only prompts with one, which take different paths. It has one
        prompt, or as many as are read with at most `budget` tokens: several short prompts, or a part of a long one.
        """
        wave: list[Entry] = []
        widest, free = 0, self.max_rows - len(self.batch)
        seats, passed = Counter(row.generation for row in self.batch.rows), list[Row]()
        while self.waiting and free:
            row = self.waiting[0]
            if fair and (has := seats[row.generation]) and has >= SHARE * (free - 1):
                passed.append(self.waiting.popleft())
                continue
            if not wave or row.tokens is not wave[-1].tokens:
                prefix = None if self.prefixes is None else self.prefixes.find(row.tokens)
                start = 0 if prefix is None else prefix.length
                wider = max(widest, len(row.tokens) - start)
                if wave and ((start > 0) != (wave[0].read > 0) or (len(wave) + 1) * wider > budget):
                    break
                wave.append(Entry([], len(wave), prefix, start))
                if self.prefixes is not None:
                    wave[-1].cut = self.prefixes.branch(row.tokens, start)
                widest = wider
            row.reply.cached_tokens = None if self.prefixes is None else wave[-1].read
            wave[-1].rows.append(self.waiting.popleft())
            seats[row.generation] += 1
            free -= 1
        self.waiting.extendleft(reversed(passed))
        if wave:
            self._wave, self._wave_cache = wave, KVCache(self.model, len(wave), max(len(one.tokens) for one in wave))
            for entry in wave:
                if (prefix := entry.prefix) is not None:
                    self._wave_cache.put(entry.at, prefix.cache, 0, prefix.length)
                    entry.logits_V = prefix.logits_V if entry.read == len(entry.tokens) else None
        return bool(wave)

    def _read(self, budget: int) -> int:
        """Reads a part of the wave's prompts, at most so many tokens; prompts that are finished join the batch.

        Returns the number of tokens that were computed.
        """
        wave, cache, computed = self._wave, self._wave_cache, 0
        assert cache is not None
        if unread := sum(entry.read < len(entry.tokens) for entry in wave):
            chunks = [entry.chunk(max(1, budget // unread)) for entry in wave]
            tokens_BT, lengths_B = pad(chunks, self.tokenizer.bos, cache.positions_B.device)
            computed = tokens_BT.numel()
            with compiler.eager():  # a model in training is compiled for its training shape
                x_BTD = cache.prefill(self.model, tokens_BT, lengths_B, self.machine.attention)
            ends: list[Entry] = []
            for entry, chunk in zip(wave, chunks, strict=True):
                entry.read += len(chunk)
                if chunk and entry.read == len(entry.tokens):
                    ends.append(entry)
                elif chunk and entry.read == entry.cut and self.prefixes is not None:
                    self.prefixes.keep(entry.tokens[: entry.read], cache, entry.at)
            if ends:
                index_N = torch.tensor([entry.at for entry in ends], device=x_BTD.device)
                x_ND = take_token(x_BTD, lengths_B - 1)[index_N]
                logits_NV = self.model.logits(x_ND)[:, : self.tokenizer.vocab_size]
                for entry, logits_V in zip(ends, logits_NV, strict=True):
                    entry.logits_V = logits_V
                    if self.prefixes is not None:
                        self.prefixes.keep(entry.tokens, cache, entry.at, logits_V, alone=len(wave) == 1)
        if joining := [entry for entry in wave if entry.logits_V is not None and not entry.joined]:
            coming = (row for entry in wave for row in entry.rows)
            self.batch.join(joining, cache, max(row.room for row in (*coming, *self.waiting)))
            for entry in joining:
                entry.joined = True
        if all(entry.joined for entry in wave):
            self._wave, self._wave_cache = [], None
        return computed

    def _choose(self) -> None:
        """The next token of every row that has logits, and what becomes final with it."""
        rows, logits_BV = self.batch.rows, self.batch.logits_BV
        tokens = [row.reply.choose(token) for row, token in zip(rows, choose(rows, logits_BV), strict=True)]
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
                if row.sample == 0 and self.prefixes is not None:  # the last token is not in the cache
                    self.prefixes.keep([*row.tokens, *row.reply.ids[:-1]], self.batch.cache, seat)
        self.batch.leave(finished)
