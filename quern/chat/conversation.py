"""A conversation with one model: what was said, and how the next reply is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from quern.chat.ask import ask
from quern.generate.engine import Engine
from quern.generate.reply import Completion
from quern.generate.sampling import Sampling
from quern.stages.complete import complete
from quern.text.chat import Message, render_prompt

TOP = 4
"""The likeliest tokens that are kept for each token of the last reply."""


@dataclass
class Conversation:
    """A conversation in the terminal.

    Args:
        engine: Engine of the model that replies.
        sampling: How a token is chosen.
        max_tokens: The most tokens in a reply.
        seed: Seed of the next reply; each reply adds 1.
        put: Receives each piece of output as soon as it is final.
        completing: Entries are texts to continue, not questions.
        system: The system message; empty for none.
        messages: Questions and replies in turn.
        text: The last text that was continued.
        last: The last reply or continuation; None if its messages are gone.
    """

    engine: Engine
    sampling: Sampling
    max_tokens: int
    seed: int
    put: Callable[[str], None]
    completing: bool = False
    system: str = ""
    messages: list[Message] = field(default_factory=list)
    text: str | None = None
    last: Completion | None = None

    def begin(self, messages: list[Message]) -> None:
        """Replaces the questions and replies."""
        self.messages, self.text, self.last = messages, None, None

    def with_system(self, messages: list[Message]) -> list[Message]:
        """The messages after the system message, if there is one."""
        return [{"role": "system", "content": self.system}, *messages] if self.system else messages

    def enter(self, text: str) -> None:
        """Asks a question or continues a text. Arguments and errors are those of `answer`."""
        if self.completing:
            self.extend(text)
        else:
            self.answer(self.messages, {"role": "user", "content": text.strip()})

    def answer(self, earlier: list[Message], question: Message) -> None:
        """Asks a question and keeps it with its reply. Without a reply, the conversation stays as it was.

        A conversation that exceeds the context starts over with this question. Ctrl-C ends only the reply.

        Args:
            earlier: The questions and replies before the question.
            question: The question.

        Raises:
            ContextOverflow: The question alone leaves no room for a reply.
        """
        asked = [*earlier, question]
        if earlier and not self._fits(asked):
            asked = [question]
            if self._fits(asked):
                self.put(
                    f"(the conversation is longer than the model's {self.engine.context} tokens: it starts over)\n"
                )
        try:
            self.last = ask(self.engine, self.with_system(asked), **self._options())
            self.messages = [*asked, {"role": "assistant", "content": list(self.last.parts)}]
        except KeyboardInterrupt:
            self.put(" (stopped; the conversation stays as it was before)")
        self.put("\n")

    def extend(self, text: str) -> None:
        """Continues a text. Ctrl-C ends only the continuation.

        Raises:
            ContextOverflow: The text leaves no room for a token.
        """
        try:
            [self.last] = complete(self.engine, text, **self._options())
            self.text = text
        except KeyboardInterrupt:
            self.put("(stopped)\n")

    def regenerate(self) -> None:
        """Answers the last question, or continues the last text, again.

        Raises:
            ValueError: There is none.
        """
        if self.completing and self.text is not None:
            self.extend(self.text)
        elif not self.completing and self.messages:
            self.answer(self.messages[:-2], self.messages[-2])
        else:
            raise ValueError(f"there is no {'text' if self.completing else 'reply'} yet: enter something first")

    def _fits(self, messages: list[Message]) -> bool:
        return len(render_prompt(self.engine.tokenizer, self.with_system(messages))) < self.engine.context

    def _options(self) -> dict[str, Any]:
        """How the next reply is made."""
        seed, self.seed = self.seed, self.seed + 1
        return {
            "max_tokens": self.max_tokens,
            "sampling": self.sampling,
            "seed": seed,
            "put": self.put,
            "logprobs": TOP,
        }
