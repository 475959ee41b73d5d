"""The loop of `quern chat`: reads an entry, runs a command or asks the model, and reports errors.

The commands are one table from a name to a function and a line of help.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from os.path import expanduser
from pathlib import Path
from typing import Any, NamedTuple, get_args

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from quern.chat.conversation import Conversation, ask
from quern.chat.lines import DIM, PLAIN, QUOTES, Read, Screen, Terminal, next_entry, of_pipe
from quern.field_types import Count, Seed, annotations_of, refuse_outside
from quern.flags.check_flags import read_value
from quern.generate.engine import Engine
from quern.generate.sampling import Sampling
from quern.mixture.sources import to_messages
from quern.records import read_regular
from quern.stages.complete import complete
from quern.temporaries import plainly, write_whole
from quern.terminal import listed, printable
from quern.text.chat import parts
from quern.text.tokenizer import Tokenizer, well_formed
from quern.validate import nearest

ENDS = ("", "exit", "quit", "/exit", "/quit")
HELP = "Ask something. exit or an empty line ends the chat; /help lists the commands."
COMPLETING = "Begin a text, and the model continues it. exit or an empty line ends this; /help lists the commands."
ENTRIES = f"""\
A line that ends with \\ continues on the next line. Lines between {QUOTES} and {QUOTES} are one text, never a command.
Tab completes commands and the names of files. Ctrl-C ends a reply, or at the prompt the chat."""
BASE_MODEL = "This base model was never taught the chat format: it continues texts. `quern sft` teaches it to answer."
NO_SYSTEM = '""'
OTHERS = 3
LIKELY, UNLIKELY = 0.5, 0.1
HEAD = ("token", "probability", "likeliest other tokens")


def run(
    engine: Engine,
    stage: str,
    prompt: str | None,
    completing: bool,
    history: Path,
    log: Callable[[str], None],
    **how: Any,
) -> None:
    """Asks the question `prompt`, or without one talks with the terminal or a pipe. how: sampling, max_tokens, seed.

    completing: continue texts, also if the model can answer; history: the file that keeps the lines of a terminal.
    """
    console = Console()
    coloured = console.color_system is not None and not console.no_color
    write = partial(print, end="", flush=True)
    put = Screen(write) if console.is_terminal and not console.is_dumb_terminal else write
    if stage == "pretrain" and not completing:
        completing = True
        log(BASE_MODEL)
    dim = f"{DIM}{{}}{PLAIN}".format if coloured else str
    if prompt is None:
        interactive = sys.stdin is not None and sys.stdin.isatty()
        read = Terminal(history, log, [*COMMANDS, *filter(None, ENDS)], coloured) if interactive else of_pipe(sys.stdin)
        talk(Conversation(engine, **how, put=put, dim=dim, completing=completing), read, interactive)
    elif completing:
        complete(engine, prompt, put=put, **how)
    else:
        ask(engine, [{"role": "user", "content": prompt}], put, dim, **how)
        put("\n")


def talk(conversation: Conversation, read: Read, interactive: bool) -> None:
    """Handles entries until exit, an empty line, the end of input or Ctrl-C, which during a reply ends only that.

    interactive: There is a terminal: print a greeting, and end the last prompt's line.
    """
    put = conversation.put
    if interactive:
        put(greeting(conversation))
    while True:
        try:
            text, quoted = next_entry(read)
        except (EOFError, KeyboardInterrupt):
            if interactive:
                put("\n")
            return
        if text.strip() in ENDS and not quoted:
            return
        try:
            if not quoted and text.lstrip().startswith("/"):
                run_command(conversation, text.strip())
            elif text.strip():
                conversation.enter(text)
        except (ValueError, OSError) as error:
            conversation.note(printable(plainly(error)))


class Command(NamedTuple):
    """run: called with the conversation and the text after the command's name. takes: that text, for the help."""

    run: Callable[[Conversation, str], None]
    takes: str
    help: str


def run_command(conversation: Conversation, line: str) -> None:
    """Runs a line that begins with "/". Raises ValueError or OSError where it cannot."""
    name, *rest = line.split(maxsplit=1)
    text = rest[0] if rest else ""
    command = COMMANDS.get(name.replace("-", "_"))
    if command is None:
        raise ValueError(
            f"there is no command {name}{nearest(name, COMMANDS)}; /help lists all; a question that begins with / goes "
            f"between {QUOTES} and {QUOTES}"
        )
    if text and not command.takes:
        raise ValueError(f"{name} takes nothing after it")
    command.run(conversation, text)


def greeting(conversation: Conversation) -> str:
    return (COMPLETING if conversation.completing else HELP) + "\n"


def show_help(conversation: Conversation, text: str) -> None:
    texts = {f"{name} {command.takes}": command.help for name, command in COMMANDS.items() if command.help}
    texts[f"/{SETTINGS[0]} NUMBER"] = "changes how replies are made; shows all settings without NUMBER"
    others = f"  Likewise {', '.join(f'/{name}' for name in SETTINGS[1:])}."
    conversation.put("\n".join([listed(texts), others, ENTRIES, ""]))


def complete_or_chat(conversation: Conversation, text: str, completing: bool) -> None:
    conversation.completing = completing
    conversation.put(greeting(conversation))


def new(conversation: Conversation, text: str) -> None:
    conversation.begin([])
    conversation.note("a new conversation")


def system(conversation: Conversation, text: str) -> None:
    if text:
        conversation.system = "" if text == NO_SYSTEM else text
    shown = printable(conversation.system) if conversation.system else "none"
    conversation.note(f"system message: {shown}")


def regenerate(conversation: Conversation, text: str) -> None:
    conversation.regenerate()
    if conversation.sampling.temperature == 0:
        conversation.note("at temperature 0 the reply is always the same: set another one with /temperature")


def undo(conversation: Conversation, text: str) -> None:
    if not conversation.messages:
        raise ValueError("there is nothing to undo: no question has a reply")
    conversation.begin(conversation.messages[:-2])
    conversation.note(f"the last question and its reply are gone; left: {_count(conversation)}")


def save(conversation: Conversation, text: str) -> None:
    path = _path(text, "/save")
    if not conversation.messages:
        raise ValueError("there is nothing to save: no question has a reply")
    if path.exists():
        raise ValueError(f"{path} exists: choose another name, or remove it first")
    messages = conversation.with_system(conversation.messages)
    write_whole(path, well_formed(json.dumps({"messages": messages}, ensure_ascii=False, indent=1)) + "\n")
    conversation.note(f"saved in {printable(str(path))}: {_count(conversation)}")


def load(conversation: Conversation, text: str) -> None:
    path = _path(text, "/load")
    try:
        messages = to_messages(json.loads(read_regular(path)))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not a conversation, one JSON object as /save writes it: {error}") from error
    if messages[-1]["role"] != "assistant":
        raise ValueError(f"{path} ends with a question: add its reply, or remove the question and ask it here")
    heads = [message for message in messages if message["role"] == "system"]
    conversation.system = "".join(part["text"] for message in heads for part in parts(message))
    conversation.begin(messages[len(heads) :])
    conversation.note(f"loaded: {_count(conversation)}")


def xray(conversation: Conversation, text: str) -> None:
    """Shows a table with a line for each token of the last reply, in colours if stdout is a terminal.

    Probabilities are at temperature 1.
    """
    tokenizer, reply = conversation.engine.tokenizer, conversation.last
    if reply is None or not reply.logprobs:
        raise ValueError("there is no reply to show: enter something first")
    names = [token_name(tokenizer, token) for token in reply.ids]
    width = max(cell_len(name) for name in (*names, HEAD[0]))
    lines = [Text(f"{HEAD[0]}{' ' * (width - len(HEAD[0]))}  {HEAD[1]}  {HEAD[2]}", style="bold")]
    rows = zip(reply.ids, names, reply.sampled, reply.logprobs, reply.top_logprobs, strict=True)
    for token, name, sampled, value, top in rows:
        others = [f"{token_name(tokenizer, id)} {_percent(other)}" for id, other in top if id != token]
        line = Text(f"{name}{' ' * (width - cell_len(name))}  ")
        if sampled:
            colour = "green" if math.exp(value) >= LIKELY else "yellow" if math.exp(value) >= UNLIKELY else "red"
            line.append(f"{_percent(value):>{len(HEAD[1])}}", style=colour)
            line.append(f"  {', '.join(others[:OTHERS])}", style="dim")
        else:
            line.append(f"{'given':>{len(HEAD[1])}}  by the tool", style="dim")
        lines.append(line)
    console = Console(highlight=False)
    with console.capture() as captured:
        console.print(Text("\n").join(lines), soft_wrap=True)
    conversation.put(captured.get())


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """A token as shown: its text as a JSON string, a special token's name, or the bytes of a part of a character."""
    raw = tokenizer.decode_bytes([token])
    if token in tokenizer.special_ids.values():
        return raw.decode("utf-8")
    try:
        return printable(json.dumps(raw.decode("utf-8"), ensure_ascii=False))
    except UnicodeDecodeError:
        return repr(raw)


def _percent(logprob: float) -> str:
    return f"{100 * math.exp(logprob):.1f} %"


def change(conversation: Conversation, text: str, name: str) -> None:
    """Sets a number, if there is one, and shows all numbers that can be set."""
    if text:
        annotation, value = OF_CONVERSATION.get(name, annotations_of(Sampling).get(name)), text
        with suppress(ValueError):  # refused below, unless it is a number
            value = read_value(get_args(annotation)[0], text)
        refuse_outside(annotation, value, name)
        if name in OF_SAMPLING:
            conversation.sampling = replace(conversation.sampling, **{name: value})
        else:
            setattr(conversation, name, value)
    values = [(n, getattr(conversation.sampling, n)) for n in OF_SAMPLING]
    values += [(n, getattr(conversation, n)) for n in OF_CONVERSATION]
    conversation.note(f"{', '.join(f'{n} {v:g}' if isinstance(v, float) else f'{n} {v}' for n, v in values)}")


def _path(text: str, command: str) -> Path:
    if not text:
        raise ValueError(f"name a file: {command} FILE")
    return Path(expanduser(text))


def _count(conversation: Conversation) -> str:
    count = len(conversation.messages) // 2
    return f"{count} {'question and its reply' if count == 1 else 'questions and their replies'}"


OF_SAMPLING = tuple(f.name for f in fields(Sampling))
OF_CONVERSATION = {"max_tokens": Count, "seed": Seed}
SETTINGS = (*OF_SAMPLING, *OF_CONVERSATION)
COMMANDS: dict[str, Command] = {
    "/help": Command(show_help, "", "lists the commands"),
    "/new": Command(new, "", "starts another conversation with the same system message"),
    "/chat": Command(partial(complete_or_chat, completing=False), "", "asks questions; the conversation goes on"),
    "/complete": Command(partial(complete_or_chat, completing=True), "", "continues texts instead"),
    "/system": Command(system, "TEXT", f"sets the system message; {NO_SYSTEM} removes it; shows it without TEXT"),
    "/regenerate": Command(regenerate, "", "answers the last question again, with the next seed"),
    "/undo": Command(undo, "", "removes the last question and its reply"),
    "/xray": Command(xray, "", "shows the tokens of the last reply with their probabilities"),
    "/save": Command(save, "FILE", "writes the conversation to a new file, as JSON"),
    "/load": Command(load, "FILE", "goes on with a conversation from a file"),
    **{f"/{name}": Command(partial(change, name=name), "NUMBER", "") for name in SETTINGS},
}
"""The help explains all settings in one line."""
