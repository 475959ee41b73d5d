"""`quern complete`: continues a text with a run's base model, as plain text without the chat format."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO

import numpy as np

from quern.data.shards import Corpus
from quern.generate.engine import Engine
from quern.generate.reply import Completion, Delta, Event
from quern.generate.sampling import Sampling
from quern.recipe import Resolved
from quern.terminal import printable
from quern.text.chat import render_text
from quern.text.tokenizer import Tokenizer, well_formed

BETWEEN = "---\n"
OPENINGS = ("Once upon a time", "The river", "My favourite", "In the morning", "Question:")
GOES_ON = "▸"  # marks where a continuation begins
OPENING = re.compile(r"\S[^\r\n]{0,70}(?=\s)")  # a beginning of a line, to the end of a word
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=\w)|\n+")
OPENING_TOKENS = 160


def complete(
    engine: Engine, prompt: str, *, put: Callable[[str], None], samples: int = 1, **how: Any
) -> list[Completion]:
    """Streams the prompt and its continuation, and ends with a newline. Returns the completions.

    Args:
        prompt: The beginning of a text; empty for the beginning of a document.
        put: Receives each piece as soon as it is final.
        samples: Completions of the prompt, separated by a line `---`.
        how: Further arguments of `Engine.events`, whose errors are raised before anything is printed.
    """
    events = engine.events([render_text(engine.tokenizer, prompt)], samples=samples, plain=True, **how)
    done: list[Completion] = []
    shown_prompt = printable(well_formed(prompt))
    put(shown_prompt)
    try:
        for sample, piece in _in_order(events, samples):
            if isinstance(piece, str):
                put(piece)
            else:
                done.append(piece)
                put("\n" if sample == samples - 1 else f"\n{BETWEEN}{shown_prompt}")
    except KeyboardInterrupt:
        put("\n")
        raise
    return done


def _in_order(events: Iterable[Event], samples: int) -> Iterator[tuple[int, str | Completion]]:
    """Yields (sample, piece of its text), and (sample, its completion) at its end, in the order of the samples, which
    are generated together: pieces of the first unfinished sample pass, and pieces of later samples wait."""
    waiting = [deque[str | Completion]() for _ in range(samples + 1)]
    current = 0
    for event in events:
        if isinstance(event.value, Delta):
            waiting[event.sample].append(printable(event.value.text))
        elif isinstance(event.value, Completion):
            waiting[event.sample].append(event.value)
        while waiting[current]:
            piece = waiting[current].popleft()
            yield current, piece
            current += isinstance(piece, Completion)


def continuations(engine: Engine, recipe: Resolved, val: Corpus, count: int = len(OPENINGS)) -> list[tuple[str, str]]:
    """Openings that fit the context, of held-out text where it is one's own, and what the model writes after each."""
    built_in = recipe.data == "tinyworld"
    begun = OPENINGS[:count] if built_in else held_out_openings(val, engine.tokenizer, count)
    ids = {text: render_text(engine.tokenizer, text) for text in begun}
    prompts = {text: prompt for text, prompt in ids.items() if len(prompt) < engine.context}
    how = {"sampling": Sampling(0.8, 50), "max_tokens": 64 if built_in else 100, "seed": recipe.seed}
    done = engine.generate(list(prompts.values()), **how, plain=True)
    return [(prompt, row[0].text) for prompt, row in zip(prompts, done, strict=True)]


def continued(prompt: str, text: str) -> list[str]:
    """A text and its continuation as lines for the terminal."""
    return [f"  {line}" for line in printable(f"{prompt}{GOES_ON}{text}").split("\n") if line.strip()]


def held_out_openings(corpus: Corpus, tokenizer: Tokenizer, count: int) -> list[str]:
    """Openings of held-out text, from places that are evenly spaced over it: the beginning of a document, or where
    documents are few, of a line or a sentence."""
    ends, found = np.cumsum(corpus.lengths), list[str]()
    for at in (np.arange(count) + 0.5) / count * ends[-1]:
        number = int(np.searchsorted(ends, at, side="right"))
        inside = int(at - ends[number] + corpus.lengths[number]) if corpus.num_documents < 2 * count else 0
        tokens = corpus.gather(number, inside)[:OPENING_TOKENS].tolist()
        text = tokenizer.decode(token for token in tokens if token != tokenizer.bos)
        pieces = SENTENCE.split(text, maxsplit=1)[-1:] if inside else [text]
        found += [match[0] for piece in pieces if (match := OPENING.search(piece))]
    return list(dict.fromkeys(found))


def read_prompt(prompt: str | None, stdin: TextIO | None) -> str:
    """Returns the given prompt, or reads it from standard input.

    Args:
        prompt: The value of -p; None or "-" reads `stdin`.
        stdin: Standard input, in UTF-8; None if it is closed. One newline at its end (from `echo`) is removed. A
            terminal is read for "-" only.

    Raises:
        ValueError: There is no prompt, or `stdin` is not UTF-8.
    """
    if prompt is not None and prompt != "-":
        return prompt
    if stdin is None or (prompt is None and stdin.isatty()):
        raise ValueError('there is no prompt: give one with -p "Once upon", or pipe one in')
    try:
        text = stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"the prompt on standard input is not UTF-8 ({error}): convert it, as with iconv") from error
    return re.sub(r"\r?\n\Z", "", text, count=1)
