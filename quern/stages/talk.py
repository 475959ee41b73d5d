"""`quern chat`: a conversation in the terminal, streamed; one question with `-p`."""

from __future__ import annotations

from collections.abc import Callable

from quern.generate.engine import ContextOverflow, Engine
from quern.generate.reply import Delta
from quern.generate.sample import Sampling
from quern.stages.printable import printable
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
    """Streams the reply to `messages` through `put` (each tool call and output in brackets) and returns it.

    Raises ValueError when the messages leave no room for an answer in the model's context.
    """
    prompt = render_prompt(engine.tokenizer, messages)
    reply: Message = {"role": "assistant", "content": ""}
    kind = "text"
    for event in engine.events([prompt], max_tokens=max_tokens, sampling=sampling, seed=seed):
        if isinstance(event.value, Delta):
            put(_between(kind, event.value.kind) + printable(event.value.text))
            kind = event.value.kind
        else:
            put(_between(kind, "text"))
            reply = {"role": "assistant", "content": list(event.value.parts)}
    return reply


def _between(kind: str, following: str) -> str:
    """The brackets that end one part and begin another; a part comes in as many pieces as it has tokens."""
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
) -> None:
    """Reads questions until an empty line, the end of input or Ctrl-C; during a reply, Ctrl-C ends only the reply.

    A conversation that outgrows the context begins anew; a question that does so by itself is not asked.
    """
    put(HELP + "\n")
    messages: list[Message] = []
    turn = 0
    while question := _next(read, put):
        if question == "/new":
            messages = []
            continue
        asked: list[Message] = [*messages, {"role": "user", "content": question}]
        if messages and len(render_prompt(engine.tokenizer, asked)) >= engine.context:
            put(f"(the conversation is longer than the model's {engine.context} tokens: it begins anew)\n")
            messages, asked = [], asked[-1:]
        try:
            reply = ask(engine, asked, max_tokens=max_tokens, sampling=sampling, seed=seed + turn, put=put)
            messages = [*asked, reply]
        except ContextOverflow as error:
            put(f"({error})")
        except KeyboardInterrupt:
            put(" (stopped; as if it had not been asked)")
        put("\n")
        turn += 1


def _next(read: Callable[[], str], put: Callable[[str], None]) -> str:
    try:
        return read().strip()
    except (EOFError, KeyboardInterrupt):
        put("\n")  # the prompt's line ends here
        return ""
