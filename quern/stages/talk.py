"""`quern chat`: a conversation in the terminal, streamed; one question with `-p`."""

from __future__ import annotations

from collections.abc import Callable

from quern.generate.engine import Engine
from quern.generate.reply import Delta
from quern.generate.sample import Sampling
from quern.text.chat import Message, render_prompt

HELP = "Ask something. An empty line ends the chat; /new begins another one."


def ask(
    engine: Engine,
    messages: list[Message],
    *,
    max_tokens: int,
    sampling: Sampling,
    seed: int,
    put: Callable[[str], None],
) -> Message:
    """Streams the reply to `messages` through `put` (tool calls in brackets) and returns it."""
    prompt = render_prompt(engine.tokenizer, messages)
    reply: Message = {"role": "assistant", "content": ""}
    for event in engine.events([prompt], max_tokens=max_tokens, sampling=sampling, seed=seed):
        if isinstance(event.value, Delta):
            put(event.value.text if event.value.kind == "text" else f"[{event.value.kind}: {event.value.text}] ")
        else:
            reply = {"role": "assistant", "content": list(event.value.parts)}
    return reply


def chat(
    engine: Engine,
    *,
    max_tokens: int,
    sampling: Sampling,
    seed: int,
    read: Callable[[], str],
    put: Callable[[str], None],
) -> None:
    """Reads questions until an empty line or the end of input. A conversation that outgrows the context begins anew."""
    put(HELP + "\n")
    messages: list[Message] = []
    turn = 0
    while question := _next(read):
        if question == "/new":
            messages = []
            continue
        messages.append({"role": "user", "content": question})
        if messages[:-1] and len(render_prompt(engine.tokenizer, messages)) >= engine.context:
            put(f"(the conversation is longer than the model's {engine.context} tokens: it begins anew)\n")
            messages = messages[-1:]
        messages.append(ask(engine, messages, max_tokens=max_tokens, sampling=sampling, seed=seed + turn, put=put))
        put("\n")
        turn += 1


def _next(read: Callable[[], str]) -> str:
    try:
        return read().strip()
    except (EOFError, KeyboardInterrupt):
        return ""
