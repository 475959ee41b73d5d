"""The rows that an engine answers, the generation in which they were submitted together, and what they produce."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from quern.generate.reply import Completion, Delta, Reply, Token
from quern.generate.sampling import Sampling


class Event(NamedTuple):
    """A piece of the reply, or the finished reply, of sample number `sample` of prompt number `prompt`.

    If log-probabilities were asked for, each token comes before the piece that it completes.
    """

    prompt: int
    sample: int
    value: Delta | Token | Completion


class Generation:
    """Rows that were submitted together. `events` holds what they have produced and nobody has taken yet."""

    def __init__(self, rows: int) -> None:
        self.events: deque[Event] = deque()
        self.unfinished = rows
        self.cancelled = False
        self.cached_tokens = 0
        """Prompt tokens that were not read again, of the first prompt."""

    def cancel(self) -> None:
        """The rows leave at the next step, without further events."""
        self.cancelled = True


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
