"""Shows the tokens of a reply with their probabilities, and the likeliest other tokens in their place."""

from __future__ import annotations

import json
import math

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from quern.generate.reply import Completion
from quern.text.printable import printable
from quern.text.tokenizer import Tokenizer

OTHERS = 3
LIKELY, UNLIKELY = 0.5, 0.1
HEAD = ("token", "probability", "likeliest other tokens")


def xray(tokenizer: Tokenizer, reply: Completion) -> str:
    """A table with a line for each token, in colours if stdout is a terminal. Probabilities are at
    temperature 1."""
    if not reply.logprobs:
        raise ValueError("the reply has no probabilities")
    names = [token_name(tokenizer, token) for token in reply.ids]
    width = max(cell_len(name) for name in (*names, HEAD[0]))
    lines = [Text(f"{HEAD[0]}{' ' * (width - len(HEAD[0]))}  {HEAD[1]}  {HEAD[2]}", style="bold")]
    rows = zip(reply.ids, names, reply.sampled, reply.logprobs, reply.top_logprobs, strict=True)
    for token, name, sampled, value, top in rows:
        others = [f"{token_name(tokenizer, id)} {_percent(other)}" for id, other in top if id != token]
        line = Text(f"{name}{' ' * (width - cell_len(name))}  ")
        if sampled:
            line.append(f"{_percent(value):>{len(HEAD[1])}}", style=_colour(math.exp(value)))
            line.append(f"  {', '.join(others[:OTHERS])}", style="dim")
        else:
            line.append(f"{'given':>{len(HEAD[1])}}  by the tool", style="dim")
        lines.append(line)
    console = Console(highlight=False)
    with console.capture() as captured:
        console.print(Text("\n").join(lines), soft_wrap=True)
    return captured.get()


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


def _colour(probability: float) -> str:
    return "green" if probability >= LIKELY else "yellow" if probability >= UNLIKELY else "red"
