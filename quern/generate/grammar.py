"""Replies in a given form: JSON of a schema, a regular expression, one of several texts.

llguidance (https://github.com/guidance-ai/llguidance) says which tokens may come next. It does not know how long the
reply may become, so a weak model would be cut off in the middle of a string. Here a reply also ends in its form. If no
ending that fits into the tokens that are left is found behind a token, the first token of a known ending replaces it.
The search for an ending is greedy, a byte at a time. `Engine.submit` refuses a form for which it finds no ending.
"""

from __future__ import annotations

import json
import re
import threading
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from quern import process
from quern.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

LEXER_FUEL = 20_000
"""The limit of llguidance's work on one mask, about 50 ms. A form that needs more fails, and so does the reply."""
FORM_FUEL, MOST_STATES = 100_000, 25_000
"""Limits of llguidance: its work to read a form, and the states of the form's automaton (about 10 MB), which grows with
each reply. With its default limits, one expression holds up all other threads for half a second."""
MOST_CHARACTERS = 1 << 16
"""The length limit of a grammar. A long one holds up all other threads while its bytes are searched."""
KEPT = 64  # compiled grammars
QUOTE, COMMA = ord('"'), ord(",")
# Bytes that end what is open come first. In a string, that is the quote alone.
IN_STRING = b'"'
BETWEEN = b'}]",0:'
OTHERS = bytes([*range(32, 127), *range(32), *range(127, 256)])  # printable ones first
OFTEN = 8  # times in a row that a byte did not fit: from then on it is tried last
MOST_TRIES = 4000
"""Bytes that one search may try, some milliseconds: all other rows wait meanwhile. No clock, so that a reply does not
depend on the load."""

OPTION = re.compile(r"\. Enable 'coerce_one_of'.*")
"""llguidance's advice about oneOf: an option that a client of the server cannot set."""


class CostlyError(ValueError):
    """A form is too long, or takes too long to compile."""


class Grammars:
    """Compiles forms for one tokenizer and keeps the last ones. Several threads may use it.

    Its methods raise ValueError, with the reason, or RecursionError for a form that cannot be followed.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise ImportError("replies in a given form need llguidance: pip install llguidance") from error
        self.tokenizer = tokenizer
        self._matcher = llguidance.LLMatcher
        self._limits = llguidance.LLParserLimits(
            initial_lexer_fuel=FORM_FUEL, step_lexer_fuel=LEXER_FUEL, max_lexer_states=MOST_STATES, verbose_errors=False
        )
        self._tokens = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Vocabulary(tokenizer)))
        self._known = lru_cache(KEPT)(self._make)
        self._lock, self._running = threading.Lock(), ExitStack()  # for the child that compiles on trial
        self._child: process.Child | None = None
        weakref.finalize(self, self._running.close)

    def json(self, schema: Mapping[str, Any]) -> Grammar:
        """JSON that fits a schema, without white space between its parts."""
        text = json.dumps(schema, allow_nan=False)
        grammar = self._matcher.grammar_from_json_schema(text, defaults={"whitespace_flexible": False})
        return self._compile(grammar, trial=True)

    def regex(self, pattern: str) -> Grammar:
        """Text that a regular expression matches as a whole."""
        return self._compile(self._matcher.grammar_from_regex(pattern))

    def choice(self, texts: Sequence[str]) -> Grammar:
        """One of several texts."""
        return self._compile(self._matcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, texts))))

    def calls(self, tools: Mapping[str, Mapping[str, Any]]) -> Grammar:
        """A call of one of several tools, by the schemas of their arguments."""
        rules = ["start: " + " | ".join(f"call{number}" for number in range(len(tools)))]
        for number, (name, schema) in enumerate(tools.items()):
            head = json.dumps(f'{{"name":{json.dumps(name)},"arguments":')
            own = json.dumps({**schema, "x-guidance": {"whitespace_flexible": False}})
            rules += [f'call{number}: {head} arguments{number} "}}"', f"arguments{number}: %json {own}"]
        return self._compile(self._matcher.grammar_from_lark("\n".join(rules)), trial=True)

    def _compile(self, grammar: str, trial: bool = False) -> Grammar:
        found = self._known(grammar, trial)
        if found.worn:  # perhaps by the states of all its replies together
            found.matcher, found.worn = self._read(grammar), False
        return found

    def _read(self, grammar: str) -> LLMatcher:
        return self._matcher(self._tokens, grammar, log_level=0, limits=self._limits)

    def _make(self, grammar: str, trial: bool) -> Grammar:
        """trial: a child process compiles it first, which the system can end."""
        if len(grammar) > MOST_CHARACTERS:
            raise CostlyError(f"it has {len(grammar):,} characters, {MOST_CHARACTERS:,} at most: simplify it")
        if trial:
            self._try(grammar)
        made = self._read(grammar)
        if made.is_error():
            lines = made.get_error().strip().splitlines()
            reason = " ".join(lines[:1] + [line for line in lines[1:] if line.startswith("error:")])
            raise ValueError(OPTION.sub(" for alternatives that overlap: use anyOf", reason))
        return Grammar(made, self.tokenizer)

    def _try(self, grammar: str) -> None:
        """Raises CostlyError if the child does not compile the grammar in time."""
        with self._lock:
            if self._child is None:
                self._child = self._running.enter_context(process.start("quern.generate.trial", "grammar", {}))
            try:
                self._child.ask(grammar)
            except RuntimeError:
                code, self._child = self._child.process.returncode, None
                self._running.close()
                if code is None or code >= 0:  # no signal ended it: an error of the child itself
                    raise
                raise CostlyError("it takes too long to compile: simplify it") from None


class _Vocabulary:
    """The tokenizer as llguidance reads it. It knows one end token, BOS; `Constraint` puts its own in its place.

    llguidance's own reader of a tiktoken vocabulary takes twice the time, in which no other thread runs.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.eos_token_id = self.bos_token_id = tokenizer.bos
        self.tokens = [tokenizer.decode_bytes([id]) for id in range(256)]
        self.tokens += [*tokenizer.merges, *(name.encode("utf-8") for name in tokenizer.special_tokens)]
        self.special_token_ids = list(tokenizer.special_ids.values())
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))


class Grammar:
    """A compiled form. `start` makes the state of one reply."""

    def __init__(self, matcher: LLMatcher, tokenizer: Tokenizer) -> None:
        self.matcher, self._tokenizer = matcher, tokenizer
        self._least: int | None = None
        self._none_within = 0
        self.worn = False
        """Whether a reply became too complex to follow. All replies share the matcher's automaton, which grows."""

    def shortest(self, most: int) -> int | None:
        """Tokens of the shortest reply that is found, its end token included; None if it has more than `most`."""
        if most > self._none_within and (self._least is None or self._least > most):
            if (ending := _ending(self.matcher, self._tokenizer, most)) is None:
                self._none_within = most
            else:
                self._least = len(ending) + 1
        return self._least if self._least is not None and self._least <= most else None

    def start(self, end: int) -> Constraint:
        """end: the token that ends the reply."""
        return Constraint(self, self._tokenizer, end)


class Constraint:
    """The state of one reply in its form. For each token `allowed`, then `choose`, then `push`."""

    def __init__(self, form: Grammar, tokenizer: Tokenizer, end: int) -> None:
        self._form, self._matcher, self._tokenizer, self._end = form, form.matcher.deep_copy(), tokenizer, end
        self._ending: list[int] | None = None  # known tokens that complete the form from here on
        self.failed = False
        """Whether the form became too complex to follow further. Another thread may ask, while the matcher computes."""

    def allowed(self) -> np.ndarray:
        """The tokens that may come next: bool (vocabulary,)."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._note_failure()
        allowed_V = np.unpackbits(bits, count=self._tokenizer.vocab_size, bitorder="little").astype(bool)
        may_end = allowed_V[self._tokenizer.bos]  # llguidance knows no other end
        allowed_V[self._tokenizer.bos] = False
        allowed_V[self._end] = may_end or not allowed_V.any()
        return allowed_V

    def choose(self, token: int, left: int) -> int:
        """An allowed token itself, or the first one of the shortest ending. left: tokens that may still come."""
        if token == self._end:
            return token
        after, ending = self._matcher.deep_copy(), self._ending
        after.consume_token(token)
        if ending and ending[0] == token:
            ending = ending[1:]
        elif ending is None or len(ending) >= left - 1 or not _completes(after, ending):
            ending = _ending(after, self._tokenizer, left - 1)
        if ending is None:  # nothing that fits is behind the token
            if self._ending is None:
                self._ending = _ending(self._matcher, self._tokenizer, left)
            if self._ending is None:
                return token
            token, *ending = [*self._ending, self._end]
            ending = ending[:-1]
        self._ending = ending
        return token

    def push(self, token: int) -> None:
        if token != self._end:
            self._matcher.consume_token(token)
            self._note_failure()

    def _note_failure(self) -> None:
        if self._matcher.is_error():
            self.failed = self._form.worn = True


def _completes(matcher: LLMatcher, ending: list[int]) -> bool:
    after = matcher.deep_copy()
    return (not ending or after.consume_tokens(ending)) and after.is_accepting()


def _ending(matcher: LLMatcher, tokenizer: Tokenizer, most: int) -> list[int] | None:
    """Tokens that complete the form, without the end token; None if none are found, or `most` or more."""
    for spread in (False, True):
        found = _greedy(matcher.deep_copy(), tokenizer, tokenizer.most_bytes * most, spread)
        if found is not None:
            tokens = _tokens(found, tokenizer)
            if matcher.deep_copy().validate_tokens(tokens) < len(tokens):
                tokens = [tokenizer.single_bytes.index(byte) for byte in found]
            return tokens if len(tokens) < most else None
    return None


def _tokens(text: bytes, tokenizer: Tokenizer) -> list[int]:
    """Tokens of bytes, whose first ones may complete a character."""
    start = next((at for at, byte in enumerate(text) if byte & 0xC0 != 0x80), len(text))
    front = [tokenizer.single_bytes.index(byte) for byte in text[:start]]
    return front + tokenizer.encode(text[start:].decode("utf-8", "replace"))


def _greedy(matcher: LLMatcher, tokenizer: Tokenizer, most: int, spread: bool) -> bytes | None:
    """Bytes that complete the form, each the one that closes most, otherwise (spread: always) another one each time."""
    found = bytearray()
    others, tries, misfits = list(OTHERS), 0, Counter[int]()
    id_of = tokenizer.single_bytes.index  # ids 0 to 255 are the single bytes

    def fits(byte: int) -> bool:  # far cheaper than the mask of the whole vocabulary
        nonlocal tries
        tries += 1
        misfits[byte] = 0 if (right := matcher.validate_tokens([id_of(byte)]) == 1) else misfits[byte] + 1
        return right

    while not (matcher.is_accepting() or matcher.is_error()):
        forced = matcher.compute_ff_bytes()  # each of them alone can follow
        if len(found) + max(1, len(forced)) > most or tries > MOST_TRIES:
            return None
        if forced:
            found += forced
            matcher.consume_tokens(list(map(id_of, forced)))
            continue
        order = b"" if spread else IN_STRING if fits(QUOTE) and fits(COMMA) else BETWEEN
        byte = next(filter(fits, order), None)
        if byte is None:
            byte = next(filter(fits, others), None)
            if byte is None:
                return None
            others.remove(byte)
            others.append(byte)
            others.sort(key=lambda one: misfits[one] >= OFTEN)
        found.append(byte)
        matcher.consume_token(id_of(byte))
    return None if matcher.is_error() else bytes(found)
