"""The table of parameter groups: which rule updates which parameters, at which rate.

The model reports its parameters by kind (`parameter_groups()`), the recipe holds the rates and hands over the
table (`make_rules`): the one below, or its own, in which stand the betas and decays that nobody tunes. It moves no
tensors: `parallel/zero2.py` does.

Rates and constants: research on small models at width 768 and a batch of 2^19 tokens (the values that
nanochat tuned)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from quern.optim.adamw import AdamW, Scalar
from quern.optim.constants import adamw_groups, muon_rate
from quern.optim.muon import Muon
from quern.recipe import OptimRecipe


class Rule(Protocol):
    """An update rule with its constants; immutable. All that changes is in the tensors and scalars it is
    handed."""

    stacked: ClassVar[bool]
    """True: works on (N, R, C) stacks of matrices of one shape; False: elementwise, on one flat buffer."""

    def init_state(self, master: Tensor) -> dict[str, Tensor]:
        """Fresh state by name: each flat like the master, or a stack of N whose parts belong to the N
        matrices."""
        ...

    def scalars(self, step: int, lr: float, momentum: float, decay: float) -> dict[str, float]:
        """The scalars of one update. step: its index from 1; lr: the rate with its schedule; momentum, decay:
        of `schedule.Multipliers`."""
        ...

    def update_(
        self,
        master: Tensor,
        grad: Tensor,
        state: dict[str, Tensor],
        scalars: dict[str, Scalar],
        *,
        dtype: torch.dtype,
        out: Tensor | None,
    ) -> None:
        """One update in place. dtype: for matrix products; out: receives the master rounded to its dtype."""
        ...


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that share a rule and a peak learning rate; each comes with its logical name."""

    name: str
    rule: Rule
    parameters: tuple[tuple[str, Parameter], ...]
    lr: float


def make_groups(
    reported: Mapping[str, Sequence[tuple[str, Parameter]]],
    rules: Mapping[str, tuple[Rule, float]],
    all_parameters: Iterable[tuple[str, Parameter]],
) -> list[ParameterGroup]:
    """The groups of a model, empty ones left out.

    reported: `model.parameter_groups()`; rules: for each group its rule and peak rate, what the recipe's
    `make_rules` returns; all_parameters: `model.named_parameters()`, which must hold the same parameters.
    Raises ValueError naming what is missing, unknown or reported twice.
    """
    check_complete(reported, all_parameters)
    unknown = sorted(set(reported) - set(rules))
    if unknown:
        raise ValueError(f"no optimizer group is called {', '.join(unknown)}: use one of {', '.join(rules)}")
    groups = []
    for name, (rule, lr) in rules.items():
        parameters = tuple(reported.get(name, ()))
        for parameter_name, parameter in parameters:
            if rule.stacked and parameter.ndim < 2:
                raise ValueError(
                    f"'{parameter_name}' has {parameter.ndim} dimensions, but group '{name}' takes matrices: "
                    "report it under a group that AdamW updates"
                )
        if parameters:
            groups.append(ParameterGroup(name, rule, parameters, lr))
    return groups


def table(recipe: OptimRecipe) -> dict[str, tuple[Rule, float]]:
    """group → (rule, peak learning rate) of the `gpt` architecture. Unresolved scales (None) count as 1."""
    lr, decay = muon_rate(recipe)
    rules: dict[str, tuple[Rule, float]] = {"matrices": (Muon(recipe.muon_beta2, decay, recipe.muon_steps), lr)}
    for name, group in adamw_groups(recipe).items():
        rules[name] = AdamW((group.beta1, group.beta2), recipe.eps, group.weight_decay), group.lr
    return rules


def check_complete(
    reported: Mapping[str, Sequence[tuple[str, Parameter]]], all_parameters: Iterable[tuple[str, Parameter]]
) -> None:
    """Raises ValueError unless every parameter is in exactly one group, and no group holds anything else."""
    expected = {id(parameter): name for name, parameter in all_parameters}
    places: dict[int, list[str]] = {}
    names: dict[str, int] = {}
    problems = []
    for group, parameters in reported.items():
        for name, parameter in parameters:
            places.setdefault(id(parameter), []).append(f"{group}: {name}")
            if names.setdefault(name, id(parameter)) != id(parameter):
                problems.append(f"two parameters called {name}")
    missing = [name for key, name in expected.items() if key not in places]
    foreign = [where for key, wheres in places.items() if key not in expected for where in wheres]
    twice = [" and ".join(wheres) for wheres in places.values() if len(wheres) > 1]
    if missing:
        problems.append(f"in no group: {', '.join(missing)}")
    if twice:
        problems.append(f"reported more than once: {', '.join(twice)}")
    if foreign:
        problems.append(f"not among the model's parameters: {', '.join(foreign)}")
    if problems:
        raise ValueError(
            f"every parameter must be in exactly one optimizer group; {'; '.join(problems)}. "
            "Correct the model's parameter_groups()."
        )
