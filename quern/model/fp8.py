"""Makes a model train in FP8: replaces linear layers, the multiplication of merged ones (layers.py) and the head's
products in the loss; the head called by itself computes as before.

Parameters stay the same objects. FP8 is used where gradients are recorded, and only there: evaluation and generation
record no graph, so they compute in the parameters' dtype with the same module. No mode has to be switched around an
evaluation during training. kernels/fp8.py has the arithmetic.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quern.kernels.fp8 import MULTIPLE, HeadProducts, fp8_linear, has_fast_product
from quern.kernels.softcap import has_kernel
from quern.model.layers import Merged


def multiply(x: Tensor, weight_OD: Tensor, emulated: bool) -> Tensor:
    """F.linear whose three products run in FP8 with dynamic scales where gradients are recorded: x (…, D) → (…, O) in
    x's dtype."""
    if not torch.is_grad_enabled():
        return F.linear(x, weight_OD)
    return fp8_linear(x.flatten(0, -2), weight_OD, emulated).view(*x.shape[:-1], -1)


class Fp8Linear(nn.Linear):
    """nn.Linear that multiplies in FP8."""

    emulated: bool

    def forward(self, x: Tensor) -> Tensor:
        return multiply(x, self.weight, self.emulated)


@dataclass(frozen=True)
class Fp8Report:
    """Names of the layers with dynamic scales, with static scales, and of the skipped ones, each with the reason. A
    merged product has the name of its parameter."""

    dynamic: tuple[str, ...]
    static: tuple[str, ...]
    skipped: dict[str, str]
    emulated: bool

    def __str__(self) -> str:
        """Returns one line for the user."""
        parts = [f"fp8: {len(self.dynamic)} layers at dynamic scales, {len(self.static)} at static ones"]
        if self.emulated and self.dynamic + self.static:
            parts.append("emulated, since this device has no fast FP8 product: the same numbers, slower")
        alone: dict[str, str] = {}
        for name, reason in self.skipped.items():
            alone[re.sub(r"\.\d+\.", ".*.", name)] = reason
        if alone:
            parts.append("left alone: " + ", ".join(f"{name} ({reason})" for name, reason in alone.items()))
        return "; ".join(parts)


def use_fp8(model: Any, *, head_only: bool = False) -> Fp8Report:
    """Makes the linear layers and merged products of a `LanguageModel`, or its head alone, multiply in FP8, in place.

    Call it on the device that trains, before compilation; loading weights and making the optimizer may come before or
    after. Layers that the hardware cannot multiply in FP8 keep their dtype; the report names them.
    """
    device, context = model.head.weight.device, model.shape.context
    emulated = not has_fast_product(device)
    absent = f"this {device.type} device has no FP8 product" if emulated and device.type != "cpu" else None
    dynamic, static, skipped = [], [], {}
    for name, module in list(model.named_modules()):
        if not isinstance(module, (nn.Linear, Merged)) or (head_only and module is not model.head):
            continue
        if isinstance(module, Merged):
            name = f"{name}.{module.stacked}"
        reason = absent or _obstacle(module, context)
        if module is model.head and not has_kernel(model.cap):
            reason = "the loss has no kernel for this cap of the logits"
        if reason is not None:
            skipped[name] = reason
        elif isinstance(module, Merged):
            module.multiply = partial(multiply, emulated=emulated)
            dynamic.append(name)
        elif module is model.head:
            model.products = partial(HeadProducts, emulated=emulated)
            static.append(name)
        else:
            outputs, inputs = module.weight.shape  # sizes of this shard
            replaced = Fp8Linear(inputs, outputs, bias=False, device="meta")
            replaced.weight, replaced.emulated = module.weight, emulated  # the same parameter
            model.set_submodule(name, replaced.train(module.training))
            dynamic.append(name)
    return Fp8Report(tuple(dynamic), tuple(static), skipped, emulated)


def _obstacle(module: nn.Linear | Merged, context: int) -> str | None:
    """The reason why this layer cannot be multiplied in FP8; None if it can."""
    if isinstance(module, Merged):
        if getattr(module.multiply, "func", None) is multiply:
            return "it is multiplied in FP8 already"
        matrices, each, inputs = module.stacked_weight().shape
        outputs = matrices * each
    elif type(module) is not nn.Linear:
        return f"it is a {type(module).__name__} already"
    elif module.bias is not None:
        return "it has a bias"
    else:
        outputs, inputs = module.weight.shape
    sides = {"inputs": inputs, "outputs": outputs, "tokens in a row": context}
    return next((f"{size} {side}, no multiple of {MULTIPLE}" for side, size in sides.items() if size % MULTIPLE), None)
