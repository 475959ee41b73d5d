"""AdamW on one flat buffer: an elementwise update rule without modules, process groups or state.

Method: Kingma & Ba 2014 (arXiv 1412.6980) with decoupled decay, Loshchilov & Hutter 2017 (arXiv 1711.05101). The bias
correction comes before epsilon, as in torch.optim.AdamW, the oracle of its law.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

Scalar = float | Tensor
"""A Python number, or a 0-dim tensor so that a compiled caller does not recompile when the value changes."""


State = dict[str, Tensor]
"""The tensors that a rule keeps for its parameters, by name."""
Scalars = dict[str, Scalar]
"""The numbers of one update, by name."""


@dataclass(frozen=True)
class AdamW:
    """AdamW with its constants, as the rule of a parameter group (see `groups.Rule`)."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-10
    weight_decay: float = 0.0
    """Share of the weights that decays at a rate of 1; only the rate scales it."""

    stacked: ClassVar[bool] = False

    def init_state(self, master: Tensor) -> State:
        return {"m": torch.zeros_like(master), "v": torch.zeros_like(master)}

    def scalars(self, step: int, lr: float, momentum: float, decay: float) -> dict[str, float]:
        """Precomputes the scalars of a step; a compiled loop would compute the powers again for every vector."""
        beta1, beta2 = self.betas
        return {
            "beta1": beta1,
            "beta2": beta2,
            "eps": self.eps,
            "step_size": lr / (1 - beta1**step),
            "bias_correction2_sqrt": (1 - beta2**step) ** 0.5,
            "kept": 1 - lr * self.weight_decay,
        }

    def update_(
        self, master: Tensor, grad: Tensor, state: State, scalars: Scalars, *, dtype: torch.dtype, out: Tensor | None
    ) -> None:
        """Updates in fp32, elementwise, so that the function can be compiled whole, with dynamic shapes."""
        grad, m, v = grad.to(master.dtype), state["m"], state["v"]
        m.lerp_(grad, 1 - scalars["beta1"])
        v.lerp_(grad.square(), 1 - scalars["beta2"])
        denominator = v.sqrt().div_(scalars["bias_correction2_sqrt"]).add_(scalars["eps"])
        master.mul_(scalars["kept"])
        master.sub_(torch.div(m, denominator).mul_(scalars["step_size"]))
        if out is not None:
            out.copy_(master)
