"""Generation with one model, for everyone who needs replies: evaluation, reinforcement learning, chat, the server."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from quern import compiler
from quern.generate.cache import KVCache, PrefixCache
from quern.generate.compiled import CompiledDecode
from quern.generate.grammar import Grammar, GrammarError, Grammars
from quern.generate.reply import Completion, Event, Generation, Reply, Row, Token
from quern.generate.sample import generator, log_probabilities
from quern.generate.sampling import Sampling
from quern.generate.scheduler import INTERLEAVED_TOKENS, Scheduler
from quern.machine import Machine
from quern.model.base import LanguageModel
from quern.text.tokenizer import Tokenizer


class ContextOverflow(ValueError):
    """The prompt leaves no room for a reply."""

    def __init__(self, prompt_tokens: int, context: int):
        super().__init__(
            f"the prompt has {prompt_tokens} tokens and the model's context holds {context}, of which at "
            f"least one is for the answer: shorten the prompt to {context - 1} tokens or fewer"
        )


class Engine:
    """Generates with one model. Not thread-safe: the server runs it in a single thread (serve/models.py).

    All requests share one running batch (scheduler.py). Callers that wait for their replies iterate over `events`; a
    server submits requests and calls `step` itself. Weights may change while no request is open.

    Args:
        max_rows: The most rows in one batch; further rows wait until one of them leaves.
        prefix_megabytes: Memory for the states of prompts that were read, for later prompts that begin alike. With 0,
            every prompt is read in full. Call `prefixes.clear` after the weights have changed.
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
        self.model, self.tokenizer, self.machine = model, tokenizer, machine
        self.context = model.shape.context
        self._compiled = CompiledDecode(model, self.context) if machine.compile else None
        self.prefixes = PrefixCache(int(prefix_megabytes * 1e6)) if prefix_megabytes else None
        self.scheduler = Scheduler(
            model, machine, tokenizer.vocab_size, tokenizer.bos, max_rows, self._compiled, self.prefixes
        )

    @cached_property
    def grammars(self) -> Grammars:
        """Compiles the forms that replies can be bound to."""
        return Grammars(self.tokenizer)

    def warm_up(self, rows: Sequence[int]) -> None:
        """Compiles the decode step for these numbers of rows, to which smaller batches are padded, if the machine
        compiles.

        It pays off after some thousands of steps: in a server, not for a few questions.
        """
        if self._compiled is not None:
            for count in rows:
                self._compiled.warm_up(count)

    def generate(self, prompts: Sequence[Sequence[int]], *, samples: int = 1, **options: Any) -> list[list[Completion]]:
        """`samples` completions of each prompt. Arguments and errors are those of `submit`."""
        done: list[list[Any]] = [[None] * samples for _ in prompts]
        for event in self.events(prompts, samples=samples, **options):
            if isinstance(event.value, Completion):
                done[event.prompt][event.sample] = event.value
        return done

    def events(self, prompts: Sequence[Sequence[int]], **options: Any) -> Iterator[Event]:
        """Yields the final pieces of every sample, each sample's `Completion` last; closing the iterator stops the
        work.

        Arguments and errors are those of `submit`.
        """
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
                generation.cancel()

        return produced()

    def step(self, prefill_tokens: int | None = None) -> None:
        """One token for every running row of every generation. Arguments are those of `Scheduler.step`.

        If it fails, all rows are lost, and the engine can be used again.
        """
        try:
            self.scheduler.step(prefill_tokens)
        except BaseException:
            self.scheduler.reset()
            raise

    def read(self, prompt: Sequence[int], top: int = 0, part: int = INTERLEAVED_TOKENS) -> Iterator[list[Token]]:
        """Yields the tokens of a text after its first one with their log-probabilities, and `top` likeliest ones each.

        part: tokens read at a time, between two steps of other work. Raises ContextOverflow for a text that is too
        long.
        """
        if len(prompt) > self.context:
            raise ContextOverflow(len(prompt), self.context)
        cache = KVCache(self.model, 1, len(prompt))
        for start in range(0, len(prompt) - 1, part):
            tokens = prompt[start : start + part + 1]
            with torch.inference_mode(), compiler.eager():
                tokens_BT = torch.tensor([tokens[:-1]], device=cache.positions_B.device)
                lengths_B = torch.tensor([len(tokens) - 1], device=cache.positions_B.device)
                x_BTD = cache.append(self.model, tokens_BT, lengths_B, self.machine.attention)
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
        logprobs: bool | int = False,
        bias: Mapping[int, float] | None = None,
        form: Grammar | None = None,
        calls: Grammar | None = None,
        must_call: bool = False,
    ) -> Generation:
        """Queues prompts. Their rows join the running batch as seats are free, in the order of arrival.

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
                likeliest tokens in its place (`Completion.top_logprobs`).
            bias: Added to the logits of these tokens; -inf forbids one.
            form: The form of each text, from `grammars`; special tokens cannot occur in it.
            calls: The form of a call of the caller's tools, from `grammars`; they replace the calculator.
            must_call: Begin with a call.

        Returns:
            The open generation; `step` adds its events.

        Raises:
            ContextOverflow: A prompt leaves no room for one token.
            GrammarError: No text of the form is short enough.
            ValueError: A prompt or a stop string is empty, or a number is out of range.
        """
        if must_call and calls is None:
            raise ValueError("must_call needs the form of a call: give calls as well")
        self._refuse(prompts, samples, max_tokens, [*stop_ids, *(bias or {})])
        seeds = [seed] * len(prompts) if isinstance(seed, int) else seed
        generation, rows = Generation(len(prompts) * samples), list[Row]()
        top = {False: None, True: 0}[logprobs] if isinstance(logprobs, bool) else logprobs
        for p, prompt in enumerate(prompts):
            room = min(max_tokens, self.context - len(prompt))
            _require_ending(form, "text", room)
            if must_call:
                _require_ending(calls, "call", room - 1)
            for s in range(samples):
                reply = Reply(self.tokenizer, len(prompt), room, stop, plain, stop_ids, form, calls, must_call)
                random = generator(seeds[p], prompt, s)
                rows.append(Row(generation, p, s, prompt, reply, random, sampling or Sampling(), bias or {}, top))
        self.scheduler.waiting.extend(rows)
        return generation

    def _refuse(self, prompts: Sequence[Sequence[int]], samples: int, max_tokens: int, tokens: Sequence[int]) -> None:
        """Refuses numbers below 1, prompts that are empty or too long, and ids that are no tokens."""
        if samples < 1 or max_tokens < 1:
            raise ValueError(f"samples ({samples}) and max_tokens ({max_tokens}) must be at least 1")
        for prompt in prompts:
            if not prompt:
                raise ValueError("a prompt is empty: begin it with the tokenizer's BOS")
            if len(prompt) >= self.context:
                raise ContextOverflow(len(prompt), self.context)
        for token in tokens:
            if not 0 <= token < self.tokenizer.vocab_size:
                raise ValueError(f"{token} is no token: ids are 0 to {self.tokenizer.vocab_size - 1}")


def _require_ending(form: Grammar | None, what: str, room: int) -> None:
    """Raises GrammarError unless a text of the form that ends within `room` tokens is found."""
    if form is not None and form.shortest(room) is None:
        raise GrammarError(f"no {what} of the form that ends within {room} tokens was found")
