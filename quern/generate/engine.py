"""Batched generation: one prefill, then one token per row and step, with tools, stop strings and unequal lengths.

A row's tokens do not depend on the other rows of its batch: each row has its own cache and its own random numbers
(sample.py). Rows start together and leave when they finish; the batch shrinks when half of its rows have left.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quern import compiler
from quern.generate.cache import KVCache, decode
from quern.generate.compiled import SPAN, CompiledDecode
from quern.generate.reply import Completion, Delta, Reply
from quern.generate.sample import Sampling, draw, generator, sample
from quern.machine import Machine
from quern.model.base import LanguageModel
from quern.text.tokenizer import Tokenizer

PREFILL_TOKENS = 8192  # prompt tokens in one forward pass, padding included


class ContextOverflow(ValueError):
    """The prompt leaves no room for a reply."""

    def __init__(self, prompt_tokens: int, context: int):
        super().__init__(
            f"the prompt has {prompt_tokens} tokens and the model's context holds {context}, of which at "
            f"least one is for the answer: shorten the prompt to {context - 1} tokens or fewer"
        )
        self.prompt_tokens = prompt_tokens
        self.context = context


class Event(NamedTuple):
    """A piece of the reply, or the finished reply, of sample number `sample` of prompt number `prompt`."""

    prompt: int
    sample: int
    value: Delta | Completion


class Row(NamedTuple):
    prompt: int
    sample: int
    reply: Reply
    random: np.random.Generator


class Engine:
    """Generates with one model. Not thread-safe: the server runs it in a single thread (serve/worker.py)."""

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer, machine: Machine, max_rows: int = 64):
        """max_rows: The most rows in one batch; further rows wait for the next batch."""
        vocabulary = model.embedding.weight.size(0)
        if vocabulary < tokenizer.vocab_size:
            raise ValueError(
                f"the tokenizer has {tokenizer.vocab_size} tokens, the model {vocabulary}: they do not "
                "belong together; use the tokenizer.json of the model's run"
            )
        self.model = model
        self.tokenizer = tokenizer
        self.machine = machine
        self.max_rows = max_rows
        self.context = int(model.shape.context or 0)
        self._compiled = CompiledDecode(model, self.context) if machine.compile else None

    def warm_up(self, rows: Sequence[int] = (1,)) -> None:
        """Compiles the decode step for these numbers of rows; smaller batches are then padded to the next of them.

        Compilation pays off after some thousands of steps: in a server, not for a few questions. Does nothing on a
        machine without compilation.
        """
        if self._compiled is not None:
            for count in rows:
                self._compiled.warm_up(count)

    def generate(self, prompts: Sequence[Sequence[int]], *, samples: int = 1, **options: Any) -> list[list[Completion]]:
        """`samples` completions of each prompt. Arguments and errors are those of `events`."""
        done: list[list[Any]] = [[None] * samples for _ in prompts]
        for event in self.events(prompts, samples=samples, **options):
            if isinstance(event.value, Completion):
                done[event.prompt][event.sample] = event.value
        return done

    def stream(self, prompt: Sequence[int], **options: Any) -> Iterator[str]:
        """The assistant's text, piece by piece; joined, it is the text of `generate`."""
        for event in self.events([prompt], **options):
            if isinstance(event.value, Delta) and event.value.kind == "text":
                yield event.value.text

    def events(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        samples: int = 1,
        max_tokens: int = 256,
        sampling: Sampling | None = None,
        seed: int | Sequence[int] = 0,
        stop: Sequence[str] = (),
        plain: bool = False,
        logprobs: bool = False,
    ) -> Iterator[Event]:
        """Streams generation. The call checks the arguments; closing the iterator stops the work.

        Args:
            prompts: Token ids starting with BOS, each prompt shorter than the context.
            samples: Completions of each prompt.
            max_tokens: The most tokens in a completion; the context may end it earlier.
            sampling: How a token is chosen.
            seed: Seed of the random choice, one for all prompts or one for each.
            stop: A completion ends before any of these strings.
            plain: Continue each prompt as text. Any special token ends it, and no tool is called.
            logprobs: Also compute the log-probability of every token (`Completion.logprobs`).

        Returns:
            The final pieces of every sample; the last event of a sample is its `Completion`.

        Raises:
            ContextOverflow: A prompt leaves no room for one token.
            ValueError: A prompt or a stop string is empty, or a number is out of range.
        """
        if samples < 1 or max_tokens < 1:
            raise ValueError(f"samples ({samples}) and max_tokens ({max_tokens}) must be at least 1")
        for prompt in prompts:
            if not prompt:
                raise ValueError("a prompt is empty: begin it with the tokenizer's BOS")
            if len(prompt) >= self.context:
                raise ContextOverflow(len(prompt), self.context)
        rows = []
        seeds = [seed] * len(prompts) if isinstance(seed, int) else seed
        for p, prompt in enumerate(prompts):
            room = min(max_tokens, self.context - len(prompt))
            for s in range(samples):
                reply = Reply(self.tokenizer, len(prompt), room, stop, plain=plain)
                rows.append(Row(p, s, reply, generator(seeds[p], prompt, s)))
        return self._batches(prompts, rows, sampling or Sampling(), logprobs)

    def _batches(
        self, prompts: Sequence[Sequence[int]], rows: list[Row], sampling: Sampling, logprobs: bool
    ) -> Iterator[Event]:
        for first in range(0, len(rows), self.max_rows):
            yield from self._batch(prompts, rows[first : first + self.max_rows], sampling, logprobs)

    @torch.inference_mode()
    def _batch(
        self, prompts: Sequence[Sequence[int]], rows: list[Row], sampling: Sampling, logprobs: bool
    ) -> Iterator[Event]:
        if self._compiled is not None:
            self._compiled.refresh()
        device = self.model.embedding.weight.device
        cache, logits_BV = self._prefill(prompts, rows)
        while True:
            uniform_BN = None
            if sampling.temperature > 0:
                uniform_BN = draw([row.random for row in rows], logits_BV.size(-1)).to(device)
            picked = sample(logits_BV, sampling, uniform_BN).tolist()
            live = [row.reply.finish_reason is None for row in rows]
            tokens = [
                row.reply.choose(token) if on else token for row, token, on in zip(rows, picked, live, strict=True)
            ]
            told = _logprobs(logits_BV, tokens) if logprobs else []
            for number, row in enumerate(rows):
                if live[number]:
                    row.reply.logprobs += told[number : number + 1]
                    for delta in row.reply.push(tokens[number]):
                        yield Event(row.prompt, row.sample, delta)
                    if row.reply.finish_reason is not None:
                        yield Event(row.prompt, row.sample, row.reply.completion())
            left = [i for i, row in enumerate(rows) if row.reply.finish_reason is None]
            if not left:
                return
            if self._seats(len(left)) <= self._seats(len(rows)) // 2:
                cache = cache.take(self._filled_up(left, device))
                rows, tokens = [rows[i] for i in left], [tokens[i] for i in left]
            logits_BV = self._decode(cache, rows, tokens)

    def _decode(self, cache: KVCache, rows: list[Row], tokens: list[int]) -> Tensor:
        """Appends a token to every row; returns the next logits (len(rows), V)."""
        seats, device = len(cache.positions_B), cache.positions_B.device
        tokens_B = torch.tensor(tokens + [0] * (seats - len(rows)), device=device)
        # Finished rows may exceed this length: their logits are not used.
        longest = max(row.reply.prompt_tokens + len(row.reply.ids) for row in rows if not row.reply.finish_reason)
        slots_S = torch.arange(min(-(-longest // SPAN) * SPAN, cache.max_tokens), device=device)
        if self._compiled is not None and self._compiled.fits(cache):
            logits_BV = self._compiled(cache, tokens_B, slots_S)
        else:
            with compiler.eager():
                logits_BV = decode(self.model, cache, tokens_B, slots_S)
        return self._own(logits_BV[: len(rows)])

    def _seats(self, rows: int) -> int:
        """The number of rows that the decode step computes for this number of live rows."""
        seats = None if self._compiled is None else self._compiled.seats(rows)
        return rows if seats is None else seats

    def _filled_up(self, rows: list[int], device: torch.device) -> Tensor:
        """Row numbers, padded with the first one up to the number of seats."""
        return torch.tensor(rows + rows[:1] * (self._seats(len(rows)) - len(rows)), device=device)

    def _prefill(self, prompts: Sequence[Sequence[int]], rows: list[Row]) -> tuple[KVCache, Tensor]:
        """Reads each prompt once for all its samples; returns the rows' cache and first logits."""
        if self._compiled is not None and self._compiled.rows:
            capacity = self._compiled.max_tokens
        else:
            capacity = max(row.reply.prompt_tokens + row.reply.max_tokens for row in rows)
        needed = sorted({row.prompt for row in rows})
        group_rows = max(1, PREFILL_TOKENS // max(len(prompts[p]) for p in needed))
        caches, hidden = [], []
        for first in range(0, len(needed), group_rows):
            group = [prompts[p] for p in needed[first : first + group_rows]]
            cache = KVCache.for_model(self.model, len(group), capacity)
            with compiler.eager():  # a model in training is compiled for its training shape
                padded = pad(group, self.tokenizer.bos, cache.positions_B.device)
                hidden.append(cache.prefill(self.model, *padded, self.machine.attention))
            caches.append(cache)
        cache, x_BD = KVCache.join(caches), torch.cat(hidden)
        order = [needed.index(row.prompt) for row in rows]
        taken_B = self._filled_up(order, x_BD.device)
        if taken_B.tolist() != list(range(len(needed))):
            cache = cache.take(taken_B)
        return cache, self._own(self.model.logits(x_BD[torch.tensor(order, device=x_BD.device)]))

    def _own(self, logits_BV: Tensor) -> Tensor:
        """The logits of the tokenizer's tokens; the model's vocabulary may be padded."""
        return logits_BV[:, : self.tokenizer.vocab_size]


def _logprobs(logits_BV: Tensor, tokens: Sequence[int]) -> list[float]:
    """The log-probability of each row's token at temperature 1."""
    tokens_B1 = torch.tensor(tokens, device=logits_BV.device).unsqueeze(-1)
    return logits_BV.float().log_softmax(-1).gather(-1, tokens_B1).squeeze(-1).tolist()


def pad(prompts: Sequence[Sequence[int]], filler: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Pads prompts on the right. Returns tokens (B, T) and lengths (B,), int64."""
    lengths = [len(prompt) for prompt in prompts]
    tokens = np.full((len(prompts), max(lengths)), filler, dtype=np.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    return torch.from_numpy(tokens).to(device), torch.tensor(lengths, device=device)
