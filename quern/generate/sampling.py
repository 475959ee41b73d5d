"""`Sampling`: the parameters of the choice of a token. sample.py chooses."""

from dataclasses import dataclass, fields
from typing import Annotated

from annotated_types import Interval

from quern.field_types import Share, annotations_of, refuse_outside


@dataclass(frozen=True)
class Sampling:
    """The choice of the next token. Raises ValueError for a field outside its range.

    The command line's flags and the HTTP API's fields are derived from these fields.
    """

    temperature: Annotated[float, Interval(ge=0, le=100)] = 1.0
    """0 always picks the most likely token."""
    top_k: Annotated[int, Interval(ge=0, le=2**24)] = 0
    """Choose among this many of the most likely tokens; 0 for all."""
    top_p: Share = 1.0
    """Choose among the most likely tokens that together have this probability; 1 for all, 0 for the most likely one."""
    min_p: Share = 0.0
    """Choose among the tokens with at least this share of the most likely token's probability; 0 for all."""
    presence_penalty: Annotated[float, Interval(ge=-2, le=2)] = 0.0
    """Subtract this from the logit of each token that is in the reply already."""
    frequency_penalty: Annotated[float, Interval(ge=-2, le=2)] = 0.0
    """Subtract this from a token's logit for each time that it is in the reply."""
    repetition_penalty: Annotated[float, Interval(ge=0.01, le=100)] = 1.0
    """Logits of tokens of the prompt and the reply are divided by it, negative ones multiplied; 1 is none."""

    def __post_init__(self) -> None:
        for f in fields(self):
            refuse_outside(annotations_of(Sampling)[f.name], getattr(self, f.name), f.name)

    @property
    def penalises(self) -> bool:
        """Whether logits depend on the tokens before them in other ways than through the model."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


GREEDY = Sampling(temperature=0.0)
CHAT = Sampling(temperature=0.7, top_k=50)
"""How a chat begins, in the terminal and on the page."""
