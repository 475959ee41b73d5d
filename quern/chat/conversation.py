"""A conversation with one model: what was said, and how the next reply is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quern.generate.engine import Engine
from quern.generate.reply import Completion, Delta
from quern.generate.sampling import Sampling
from quern.generate.tools import spoken
from quern.stages.complete import complete
from quern.terminal import printable
from quern.text.chat import ContentPart, Message, render_prompt

TOP = 4
"""The likeliest tokens that are kept for each token of the last reply."""
NO_WORDS = "(no answer)"
"""Stands for a reply without words and without a sum that the calculator could do."""


def ask(
    engine: Engine,
    messages: Sequence[Message],
    put: Callable[[str], None],
    dim: Callable[[str], str] = str,
    **options: Any,
) -> Completion:
    """Streams the reply to `messages`, with sums and their results in brackets (`tools.spoken`), and returns it.

    dim: colours what is not the reply's own text; options: arguments of `Engine.submit`. Raises ValueError for messages
    that leave no room for a reply.
    """
    held: list[ContentPart] = []  # calls and outputs since the last words
    silent = True

    def show(text: str, style: Callable[[str], str] = str) -> None:
        nonlocal silent
        silent = silent and not text
        put(style(printable(text)))

    for event in engine.events([render_prompt(engine.tokenizer, messages)], **options):
        if isinstance(event.value, Delta) and event.value.kind != "text":
            if not held or held[-1]["type"] != event.value.kind:
                held.append({"type": event.value.kind, "text": ""})
            held[-1]["text"] += event.value.text
        elif isinstance(event.value, Delta | Completion):
            if sum_shown := spoken(held):
                show(sum_shown, dim)
            held = []
            if isinstance(event.value, Completion):
                put(NO_WORDS if silent else "")
                return event.value
            show(event.value.text)
    raise RuntimeError("the engine's events ended without a completion")


@dataclass
class Conversation:
    """A conversation in the terminal."""

    engine: Engine
    """Engine of the model that replies."""
    sampling: Sampling
    max_tokens: int
    """The most tokens in a reply."""
    seed: int
    """Seed of the next reply; each reply adds 1."""
    put: Callable[[str], None]
    """Receives each piece of output as soon as it is final."""
    dim: Callable[[str], str] = str
    """Colours what is not a reply's own text."""
    completing: bool = False
    """Entries are texts to continue, not questions."""
    system: str = ""
    """The system message; empty for none."""
    messages: list[Message] = field(default_factory=list)
    """Questions and replies in turn."""
    text: str | None = None
    """The last text that was continued."""
    last: Completion | None = None
    """The last reply or continuation; None if its messages are gone."""

    def note(self, text: str) -> None:
        """Shows a line that is no part of a reply."""
        self.put(self.dim(f"({text})") + "\n")

    def begin(self, messages: list[Message]) -> None:
        """Replaces the questions and replies."""
        self.messages, self.text, self.last = messages, None, None

    def with_system(self, messages: list[Message]) -> list[Message]:
        """The messages after the system message, if there is one."""
        return [{"role": "system", "content": self.system}, *messages] if self.system else messages

    def enter(self, text: str) -> None:
        """Asks a question or continues a text. Raises ValueError if it leaves no room for a token."""
        if self.completing:
            self._extend(text)
        else:
            self._answer(self.messages, {"role": "user", "content": text.strip()})

    def regenerate(self) -> None:
        """Answers the last question, or continues the last text, again. Raises ValueError if there is none."""
        if self.completing and self.text is not None:
            self._extend(self.text)
        elif not self.completing and self.messages:
            self._answer(self.messages[:-2], self.messages[-2])
        else:
            raise ValueError(f"there is no {'text' if self.completing else 'reply'} yet: enter something first")

    def _answer(self, earlier: list[Message], question: Message) -> None:
        """Asks a question after others, and keeps it with its reply. Without one, the conversation stays as it was.

        A conversation that exceeds the context starts over with this question. Ctrl-C ends only the reply.
        """
        asked = [*earlier, question]
        if earlier and not self._fits(asked):
            asked = [question]
            if self._fits(asked):
                most = self.engine.context
                self.note(f"the conversation is longer than the model's {most} tokens: it starts over")
        try:
            self.last = ask(self.engine, self.with_system(asked), dim=self.dim, **self._options())
            self.messages = [*asked, {"role": "assistant", "content": list(self.last.parts)}]
        except KeyboardInterrupt:
            self.put(self.dim(" (stopped; the conversation stays as it was before)"))
        self.put("\n")

    def _extend(self, text: str) -> None:
        """Continues a text. Ctrl-C ends only the continuation."""
        try:
            [self.last] = complete(self.engine, text, **self._options())
            self.text = text
        except KeyboardInterrupt:
            self.note("stopped")

    def _fits(self, messages: list[Message]) -> bool:
        return len(render_prompt(self.engine.tokenizer, self.with_system(messages))) < self.engine.context

    def _options(self) -> dict[str, Any]:
        """The arguments of the next reply; its seed is used up."""
        seed, self.seed = self.seed, self.seed + 1
        how = {"max_tokens": self.max_tokens, "sampling": self.sampling, "seed": seed}
        return {**how, "put": self.put, "logprobs": TOP}
