"""`quern chat`: a streamed conversation in the terminal, or one question with `-p`. It can also continue texts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from quern.generate.engine import ContextOverflow, Engine
from quern.generate.reply import Completion, Delta
from quern.generate.sample import Sampling
from quern.stages.complete import complete
from quern.text.chat import Message, render_prompt
from quern.text.printable import printable

HELP = "Ask something. An empty line ends the chat; /new starts another one, /complete continues texts."
COMPLETING = "Begin a text, and the model continues it. An empty line ends this; /chat asks questions."


def ask(
    engine: Engine,
    messages: list[Message],
    *,
    max_tokens: int,
    sampling: Sampling,
    seed: int,
    put: Callable[[str], None],
) -> Message:
    """Streams the reply to `messages` through `put`, with tool calls and outputs in brackets, and returns it.

    Raises ContextOverflow if the messages leave no room for a reply in the model's context.
    """
    prompt = render_prompt(engine.tokenizer, messages)
    reply: Message = {"role": "assistant", "content": ""}
    kind = "text"
    for event in engine.events([prompt], max_tokens=max_tokens, sampling=sampling, seed=seed):
        if isinstance(event.value, Delta):
            put(_between(kind, event.value.kind) + printable(event.value.text))
            kind = event.value.kind
        elif isinstance(event.value, Completion):
            put(_between(kind, "text"))
            reply = {"role": "assistant", "content": list(event.value.parts)}
    return reply


def _between(kind: str, following: str) -> str:
    """The brackets between two pieces of a reply; pieces of one kind belong to one part."""
    if kind == following:
        return ""
    return ("] " if kind != "text" else "") + (f"[{following}: " if following != "text" else "")


def chat(
    engine: Engine,
    *,
    max_tokens: int,
    sampling: Sampling,
    seed: int,
    read: Callable[[], str],
    put: Callable[[str], None],
    completing: bool = False,
) -> None:
    """Reads lines until an empty line, the end of input or Ctrl-C; during a reply, Ctrl-C ends only the reply.

    A line is a question or, in completion mode, the beginning of a text. /complete and /chat switch the mode; the
    conversation is kept meanwhile. A conversation that exceeds the context starts over; a single line that exceeds
    the context gets no reply.

    Args:
        engine: Engine of the model that replies.
        max_tokens: The most tokens in a reply.
        sampling: How a token is chosen.
        seed: Seed of the first reply; each further reply adds 1.
        read: Returns the next line. Raises EOFError at the end of the input.
        put: Receives each piece as soon as it is final.
        completing: Start in completion mode.
    """
    options = {"max_tokens": max_tokens, "sampling": sampling, "put": put}
    put((COMPLETING if completing else HELP) + "\n")
    messages: list[Message] = []
    turn = 0
    while (line := _next(read, put)).strip():
        command = line.strip()
        if command in ("/complete", "/chat"):
            completing = command == "/complete"
            put((COMPLETING if completing else HELP) + "\n")
        elif command == "/new":
            messages = []
        elif completing:
            _continue(partial(complete, engine, line, seed=seed + turn, **options), put)
            turn += 1
        else:
            messages = _answer(engine, messages, command, partial(ask, seed=seed + turn, **options), put)
            turn += 1


def _answer(
    engine: Engine,
    messages: list[Message],
    question: str,
    ask: Callable[[Engine, list[Message]], Message],
    put: Callable[[str], None],
) -> list[Message]:
    """Asks one more question and returns the conversation, without the question if it got no reply."""
    asked: list[Message] = [*messages, {"role": "user", "content": question}]
    if messages and len(render_prompt(engine.tokenizer, asked)) >= engine.context:
        put(f"(the conversation is longer than the model's {engine.context} tokens: it starts over)\n")
        messages, asked = [], asked[-1:]
    try:
        messages = [*asked, ask(engine, asked)]
    except ContextOverflow as error:
        put(f"({error})")
    except KeyboardInterrupt:
        put(" (stopped; the question is dropped)")
    put("\n")
    return messages


def _continue(complete: Callable[[], None], put: Callable[[str], None]) -> None:
    """Continues one text. A prompt that is too long is reported; Ctrl-C ends only this text."""
    try:
        complete()
    except ContextOverflow as error:
        put(f"({error})\n")
    except KeyboardInterrupt:
        put("(stopped)\n")


def _next(read: Callable[[], str], put: Callable[[str], None]) -> str:
    try:
        return read()
    except (EOFError, KeyboardInterrupt):
        put("\n")  # ends the prompt's line
        return ""
