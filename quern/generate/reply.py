"""A row's reply: takes tokens, returns text, tool calls and outputs as soon as they are final.

Text is withheld only while it may still change: the bytes of an incomplete character, and characters that may begin a
stop string. Bytes that cannot become valid UTF-8 are dropped, so a replacement character appears only if the model
wrote one. Stop strings are searched in text, not in tool calls; the reply ends before them.

A reply in the chat format may call tools, and STOP_TOKENS end it. A plain reply continues a text: any special token
ends it, and no tool is called. A reply can be bound to a form (grammar.py), and so can the calls in it, which are then
tools of the caller: the first call ends the reply. With both, the reply is a text of the form or a call.
"""

import codecs
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from quern.generate.grammar import Grammar
from quern.generate.sampling import Sampling
from quern.generate.tools import Kind, ToolState
from quern.text.chat import ContentPart
from quern.text.tokenizer import Tokenizer

STOP_TOKENS = ("<|assistant_end|>", "<|bos|>")
FinishReason = Literal["stop", "length", "tool_calls", "error"]


class Delta(NamedTuple):
    """A piece of a reply; consecutive pieces of one kind form one part."""

    kind: Kind
    text: str


class Token(NamedTuple):
    """A token of a reply, with its log-probability and the likeliest tokens in its place, with theirs.

    logprob: None for the first token of a text; start: where its characters begin in the assistant's text; None if they
    belong to a call, its output, or no part.
    """

    id: int
    logprob: float | None
    top: list[tuple[int, float]]
    start: int | None


@dataclass(frozen=True)
class Completion:
    """A finished reply."""

    ids: list[int]
    """All tokens of the reply, including forced tokens and the end token."""
    text: str
    """The assistant's text, without tool calls and outputs; `parts` has them too."""
    finish_reason: FinishReason
    """"stop" for an end token or a stop string, "length" for max_tokens or the end of the context, also where no call
    fits any more, "tool_calls" for a call of the caller's tools, "error" for a form that became too complex."""
    parts: list[ContentPart]
    prompt_tokens: int
    sampled: list[bool] = field(default_factory=list)
    """Whether the model chose each token: a tool's output is forced, and where a form must end, so is its ending."""
    logprobs: list[float] = field(default_factory=list)
    """The log of each token's probability at temperature 1; empty unless asked for."""
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    """The likeliest tokens in the place of each token, with theirs."""
    cached_tokens: int | None = field(default=None, compare=False)
    """Tokens of the prompt that were found in the prefix cache and not read again; None without such a cache. The
    reply does not depend on it, except where bf16 rounds otherwise."""


class Event(NamedTuple):
    """A piece of the reply, or the finished reply, of sample number `sample` of prompt number `prompt`.

    If log-probabilities were asked for, each token comes before the piece that it completes.
    """

    prompt: int
    sample: int
    value: Delta | Token | Completion


@dataclass(eq=False)
class Generation:
    """Rows that were submitted together."""

    unfinished: int  # rows
    cancelled: bool = False  # the rows leave at the next step, without further events
    events: deque[Event] = field(default_factory=deque[Event])  # what they have produced and nobody has taken yet


class Reply:
    """Takes the tokens of a row one at a time, until `finish_reason` is set."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_tokens: int,
        max_tokens: int,
        stop: Sequence[str] = (),
        plain: bool = False,
        stop_ids: Sequence[int] = (),
        form: Grammar | None = None,
        calls: Grammar | None = None,
        must_call: bool = False,
    ):
        """Starts an empty reply. Arguments as in `Engine.submit`."""
        if any(not text for text in stop):
            raise ValueError("a stop string is empty: leave it out")
        self.ids: list[int] = []
        self.sampled: list[bool] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[list[tuple[int, float]]] = []
        self.finish_reason: FinishReason | None = None
        self._tokenizer = tokenizer
        self.prompt_tokens = prompt_tokens
        self.cached_tokens: int | None = None
        self.max_tokens = max_tokens
        self._stop = tuple(stop)
        self._specials = set(tokenizer.special_ids.values())
        ends = self._specials if plain else {tokenizer.special(name) for name in STOP_TOKENS}
        self._ends = ends | set(stop_ids)
        self._tools = ToolState(tokenizer, plain=plain, of_caller=calls is not None)
        self._calls = calls
        self._constraint = form.start(tokenizer.bos if plain else tokenizer.special(STOP_TOKENS[0])) if form else None
        self._forced: deque[int] = deque([self._tools.tool_start] if must_call else [])
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="ignore")
        self._withheld = ""
        self._characters = 0  # characters of the assistant's text, withheld ones included
        self._parts: list[ContentPart] = []

    def allowed(self) -> np.ndarray | None:
        """The tokens that may be sampled next, bool (vocabulary,); None for all."""
        if self._forced or self._constraint is None:
            return None
        allowed_V = self._constraint.allowed()
        if self._may_call:
            allowed_V[self._tools.tool_start] = True
        return allowed_V

    def choose(self, sampled: int) -> int:
        """The row's next token: the next token of a tool's answer, the sampled one, or one that ends the form."""
        if self._forced:
            self.sampled.append(False)
            return self._forced.popleft()
        token = sampled
        if self._constraint is not None and not (self._may_call and sampled == self._tools.tool_start):
            token = self._constraint.choose(sampled, self.max_tokens - len(self.ids))
        self.sampled.append(token == sampled)
        return token

    def start(self, token: int) -> int | None:
        """`Token.start` of the next token, if it is this one."""
        is_text = self._tools.kind == "text" and token not in self._specials and token not in self._ends
        return self._characters if is_text else None

    def push(self, token: int) -> list[Delta]:
        """Takes the row's next token; returns the pieces that became final."""
        self.ids.append(token)
        deltas: list[Delta] = []
        if token in self._ends:
            self.finish_reason = "stop"
        elif token in self._specials:
            deltas = self._release()
            self._forced.extend(self._tools.push(token))
            if self._tools.called:
                self.finish_reason = "tool_calls"
            elif self._calls is not None and self._tools.kind == "tool":
                self._constraint = self._calls.start(self._tokenizer.special("<|tool_end|>"))
                if self._calls.shortest(self.max_tokens - len(self.ids)) is None:  # no call fits any more
                    self.finish_reason = "length"
        else:
            self._tools.push(token)
            if self._constraint is not None:
                self._constraint.push(token)
            deltas = self._add(self._decoder.decode(self._tokenizer.decode_bytes([token])))
        if self._constraint is not None and self._constraint.failed:  # the end token, too, is then of no form
            self.finish_reason = "error"
        if self.finish_reason is None and len(self.ids) >= self.max_tokens:
            self.finish_reason = "length"
        if self.finish_reason is not None:
            deltas = [*deltas, *self._release()]
        for kind, text in deltas:
            if self._parts and self._parts[-1]["type"] == kind:
                self._parts[-1]["text"] += text
            else:
                self._parts.append({"type": kind, "text": text})
        return deltas

    @property
    def _may_call(self) -> bool:
        """Whether a call may take the place of a text of the form: at its begin, if a call fits."""
        return not self.ids and self._calls is not None and self._calls.shortest(self.max_tokens - 1) is not None

    def completion(self) -> Completion:
        """The finished reply."""
        assert self.finish_reason is not None
        text = "".join(part["text"] for part in self._parts if part["type"] == "text")
        told = self.sampled, self.logprobs, self.top_logprobs, self.cached_tokens
        return Completion(self.ids, text, self.finish_reason, self._parts, self.prompt_tokens, *told)

    def _add(self, text: str) -> list[Delta]:
        """Takes decoded characters of the current part; returns the final pieces."""
        kind = self._tools.kind
        self._characters += len(text) if kind == "text" else 0
        if kind == "text" and self._stop:
            text = self._withheld + text
            found = [place for stop in self._stop if (place := text.find(stop)) >= 0]
            if found:
                self.finish_reason, self._withheld = "stop", ""
                text = text[: min(found)]
            else:
                kept = max(_overlap(text, stop) for stop in self._stop)
                self._withheld = text[len(text) - kept :]
                text = text[: len(text) - kept]
        return [Delta(kind, text)] if text else []

    def _release(self) -> list[Delta]:
        """Returns the withheld text at the end of a part, where no stop string can follow."""
        self._decoder.reset()
        text, self._withheld = self._withheld, ""
        return [Delta("text", text)] if text else []


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(eq=False)
class Row:
    """One reply in the making. prompt, sample: its place in its generation; tokens: its prompt's ids."""

    generation: Generation
    prompt: int
    sample: int
    tokens: Sequence[int]
    reply: Reply
    random: np.random.Generator
    sampling: Sampling
    bias: Mapping[int, float]
    logprobs: int | None

    @property
    def room(self) -> int:
        """The most tokens that the row can have, prompt included."""
        return len(self.tokens) + self.reply.max_tokens
