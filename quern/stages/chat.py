"""`quern chat`: a conversation in the terminal, streamed; one question with `-p`. It can also continue texts."""

from __future__ import annotations

from collections.abc import Callable

from quern.generate.engine import ContextOverflow, Engine
from quern.generate.reply import Delta
from quern.generate.sample import Sampling
from quern.stages.complete import complete
from quern.text.chat import Message, render_prompt
from quern.text.printable import printable

HELP = "Ask something. An empty line ends the chat; /new begins another one, /complete continues texts."
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
    completing: bool = False,
) -> None:
    """Reads lines until an empty one, the end of input or Ctrl-C; during a reply, Ctrl-C ends only the reply.

    A line is a question or, in completion mode, the beginning of a text. /complete and /chat switch the mode, and the
    conversation waits meanwhile. A conversation that outgrows the context begins anew; a line that does so by itself
    gets no reply.

    Args:
        engine: of the model that replies.
        max_tokens: tokens of a reply at most.
        sampling: how a token is chosen.
        seed: of the choice in the first reply; each further reply adds 1.
        read: returns the next line. Raises EOFError at the end of the input.
        put: receives each piece as soon as it is certain.
        completing: begin in completion mode.
    """
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
            _continue(engine, line, max_tokens=max_tokens, sampling=sampling, seed=seed + turn, put=put)
            turn += 1
        else:
            messages = _answer(
                engine, messages, command, max_tokens=max_tokens, sampling=sampling, seed=seed + turn, put=put
            )
            turn += 1


def _answer(
    engine: Engine,
    messages: list[Message],
    question: str,
    *,
    max_tokens: int,
    sampling: Sampling,
    seed: int,
    put: Callable[[str], None],
) -> list[Message]:
    """Asks one more question and returns the conversation, without the question if it got no reply."""
    asked: list[Message] = [*messages, {"role": "user", "content": question}]
    if messages and len(render_prompt(engine.tokenizer, asked)) >= engine.context:
        put(f"(the conversation is longer than the model's {engine.context} tokens: it begins anew)\n")
        messages, asked = [], asked[-1:]
    try:
        reply = ask(engine, asked, max_tokens=max_tokens, sampling=sampling, seed=seed, put=put)
        messages = [*asked, reply]
    except ContextOverflow as error:
        put(f"({error})")
    except KeyboardInterrupt:
        put(" (stopped; as if it had not been asked)")
    put("\n")
    return messages


def _continue(
    engine: Engine, prompt: str, *, max_tokens: int, sampling: Sampling, seed: int, put: Callable[[str], None]
) -> None:
    """Continues one text. A prompt that is too long is reported; Ctrl-C ends only this text."""
    try:
        complete(engine, prompt, max_tokens=max_tokens, sampling=sampling, seed=seed, put=put)
    except ContextOverflow as error:
        put(f"({error})\n")
    except KeyboardInterrupt:
        put("(stopped)\n")


def _next(read: Callable[[], str], put: Callable[[str], None]) -> str:
    try:
        return read()
    except (EOFError, KeyboardInterrupt):
        put("\n")  # the prompt's line ends here
        return ""
