"""Streams the reply to one conversation as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quern.generate.engine import Engine
from quern.generate.reply import Completion, Delta
from quern.generate.sampling import Sampling
from quern.text.chat import Message, render_prompt
from quern.text.printable import printable


def ask(
    engine: Engine,
    messages: Sequence[Message],
    *,
    max_tokens: int,
    sampling: Sampling,
    seed: int,
    put: Callable[[str], None],
    logprobs: bool | int = False,
) -> Completion:
    """Streams the reply to `messages` through `put`, with tool calls and outputs in brackets, and returns it.

    Args:
        engine: Engine of the model that replies.
        messages: A conversation that ends with a question.
        max_tokens: The most tokens in the reply.
        sampling: How a token is chosen.
        seed: Seed of the sampling.
        put: Receives each piece as soon as it is final.
        logprobs: As in `Engine.submit`.

    Raises:
        ContextOverflow: The messages leave no room for a reply in the model's context.
    """
    prompt = render_prompt(engine.tokenizer, messages)
    kind = "text"
    options = {"max_tokens": max_tokens, "sampling": sampling, "seed": seed, "logprobs": logprobs}
    for event in engine.events([prompt], **options):
        if isinstance(event.value, Delta):
            put(_between(kind, event.value.kind) + printable(event.value.text))
            kind = event.value.kind
        elif isinstance(event.value, Completion):
            put(_between(kind, "text"))
            return event.value
    raise RuntimeError("the engine's events ended without a completion")


def _between(kind: str, following: str) -> str:
    """The brackets between two pieces of a reply; pieces of one kind belong to one part."""
    if kind == following:
        return ""
    return ("] " if kind != "text" else "") + (f"[{following}: " if following != "text" else "")
