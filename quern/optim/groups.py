"""Parameter groups: which rule updates which parameters, at which rate and how often.

A model reports its parameters by kind (`parameter_groups()`). A recipe gives the rule of each kind (`make_rules`). The
table below is the default; its betas and decays are in constants.py. `parallel/zero2.py` moves the tensors.

Rates and constants: research on small models at width 768 and a batch of 2^19 tokens (the values that nanochat tuned).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from quern.optim.adamw import AdamW, Scalars, State
from quern.optim.constants import adamw_groups, muon_rate
from quern.optim.muon import Muon
from quern.recipe import Resolved


class Rule(Protocol):
    """An update rule with its constants. Immutable: everything that changes is in the tensors and scalars it gets."""

    stacked: ClassVar[bool]
    """Whether the rule takes (N, R, C) stacks of matrices of one shape; else it is elementwise, on one flat buffer."""

    def init_state(self, master: Tensor) -> State:
        """Returns fresh state by name: flat like the master, or a stack of N whose parts belong to the N matrices."""
        ...

    def scalars(self, step: int, lr: float, momentum: float, decay: float) -> dict[str, float]:
        """Returns the scalars of update number `step`, from 1, by its rate and `schedule.Multipliers`."""
        ...

    def update_(
        self, master: Tensor, grad: Tensor, state: State, scalars: Scalars, *, dtype: torch.dtype, out: Tensor | None
    ) -> None:
        """Updates the fp32 master and its state in place, by a gradient of any floating dtype.

        dtype: the dtype of matrix products; out: receives the new master, rounded to its own dtype.
        """
        ...


class GroupRule(NamedTuple):
    """A recipe's update of one group of parameters."""

    rule: Rule
    lr: float
    """Peak learning rate; the schedule multiplies it (`schedule.Multipliers`: `lr`, and `groups` by group name)."""
    every: int = 1
    """The group is updated on every n-th step only, from the mean gradient of n steps."""


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters, each with its logical name, that share a rule, a peak learning rate and a cadence (`GroupRule`)."""

    name: str
    rule: Rule
    parameters: tuple[tuple[str, Parameter], ...]
    lr: float
    every: int = 1


def make_groups(
    reported: Mapping[str, Sequence[tuple[str, Parameter]]],
    rules: Mapping[str, GroupRule],
    all_parameters: Iterable[tuple[str, Parameter]],
) -> list[ParameterGroup]:
    """Returns the groups of a model, without empty ones, by the rules that the recipe's `make_rules` gives.

    reported: `model.parameter_groups()`; all_parameters: `model.named_parameters()`. Raises ValueError if a parameter
    is missing, unknown or reported twice, or a rule does not fit its group.
    """
    found = Counter((name, id(p)) for parameters in reported.values() for name, p in parameters)
    expected = Counter((name, id(p)) for name, p in all_parameters)
    if wrong := sorted({name for name, _ in (found - expected) | (expected - found)}):
        told = f"{', '.join(wrong)}: missing, named twice, or not the model's"
        raise ValueError(f"every parameter must be in exactly one optimizer group; correct parameter_groups(): {told}")
    unknown = sorted(set(reported) - set(rules))
    if unknown:
        raise ValueError(f"no optimizer group is called {', '.join(unknown)}: use one of {', '.join(rules)}")
    groups = []
    for name, (rule, lr, every) in rules.items():
        if every < 1:
            raise ValueError(f"group '{name}' cannot be updated every {every} steps: every must be at least 1")
        parameters = tuple(reported.get(name, ()))
        for parameter_name, parameter in parameters:
            if rule.stacked and parameter.ndim < 2:
                told = f"'{parameter_name}' is no matrix, as group '{name}' takes"
                raise ValueError(f"{told}: report it under a group that AdamW updates")
        if parameters:
            groups.append(ParameterGroup(name, rule, parameters, lr, every))
    return groups


def dry_run(rule: Rule, masters: Tensor, dtype: torch.dtype) -> Callable[[], None]:
    """Returns a function that applies a rule to tensors without values, of the shape of `masters`, to see its costs."""
    masters = torch.empty_like(masters, dtype=torch.float32)
    grads, out, state = masters.to(dtype), torch.empty_like(masters, dtype=dtype), rule.init_state(masters)
    scalars: dict[str, Any] = dict(rule.scalars(1, 1.0, 0.9, 1.0))

    @torch.no_grad()
    def update() -> None:
        rule.update_(masters, grads, state, scalars, dtype=dtype, out=out)

    return update


def table(recipe: Resolved) -> dict[str, GroupRule]:
    """Returns the rules of the `gpt` architecture by group. Unresolved scales (None) count as 1."""
    optim = recipe.optim
    lr, decay = muon_rate(optim)
    rules = {"matrices": GroupRule(Muon(optim.muon_beta2, decay, optim.muon_steps), lr)}
    for name, group in adamw_groups(optim, recipe.depth).items():
        rules[name] = GroupRule(AdamW((group.beta1, group.beta2), optim.eps, group.weight_decay), group.lr)
    return rules
