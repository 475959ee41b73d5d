"""The optimizer's driver: fp32 masters, flat and stacked buffers, and the bytes between them and the model.

An update rule sees tensors only; this file decides how they lie in memory. Parameters of an elementwise rule
become views into one flat buffer, matrices of one shape become views into one (N, R, C) stack, and so do
their gradients: zeroing, clipping and writing back are one call per buffer. Parameters stay in the compute
dtype; where that is not fp32 the masters exist once more in fp32, else the parameter is its own master.

One process for now: the whole state is here. Not a torch.optim.Optimizer: schedules come in as numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from quern.optim.groups import Group, Rule
from quern.optim.schedule import Multipliers

ALIGNMENT = 64
"""Elements: a parameter in a flat buffer starts at a multiple, since fast matmuls need aligned operands."""


@dataclass
class Bucket:
    """The parameters of one group that lie in one buffer, and everything an update of them needs."""

    rule: Rule
    lr: float
    parameters: list[tuple[str, Parameter]]
    views: Callable[[Tensor], list[Tensor]]
    """Cuts a buffer laid out like `params` into the parameters' parts, in their shapes."""
    params: Tensor
    grads: Tensor
    grad_views: list[Tensor]
    masters: Tensor
    state: dict[str, Tensor]
    update: Callable[..., None]

    @property
    def out(self) -> Tensor | None:
        return None if self.masters is self.params else self.params


class Zero2:
    """Updates the parameters of `groups`, which become views into this object's buffers.

    Load weights and move the model to its device before this is made; afterwards change weights in place
    only, and through `load_state_tensors`. dtype_ns: dtype of Muon's matrix products (the machine's compute
    dtype). compile: run the update rules through torch.compile.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        *,
        dtype_ns: torch.dtype = torch.float32,
        compile: bool = False,
        mesh: None = None,
    ) -> None:
        self.dtype_ns = dtype_ns
        self.compile = compile
        self.buckets = [bucket for group in groups for bucket in _buckets(group, dtype_ns, compile)]
        if not self.buckets:
            raise ValueError("there is nothing to optimize: the groups hold no parameters")

    @torch.no_grad()
    def step(self, step: int, multipliers: Multipliers) -> None:
        """One update from the gradients at hand. step: how many updates were made before this one."""
        self._gather_grads()
        for bucket in self.buckets:
            scalars = bucket.rule.scalars(step + 1, bucket.lr * multipliers.lr, multipliers.momentum, multipliers.decay)
            if self.compile:  # as tensors: a changed Python number would compile the update anew
                scalars = {name: torch.tensor(value, dtype=torch.float64) for name, value in scalars.items()}
            bucket.update(bucket.masters, bucket.grads, bucket.state, scalars, out=bucket.out)

    @torch.no_grad()
    def zero_grad(self) -> None:
        """All gradients to zero, in place. (Setting them to None instead is allowed, and costs a copy.)"""
        for bucket in self.buckets:
            bucket.grads.zero_()

    def drop_grads(self) -> None:
        """Forgets all gradients, so that the next backward pass hands over its own instead of adding to zeros."""
        for bucket in self.buckets:
            for _, parameter in bucket.parameters:
                parameter.grad = None

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """The global 2-norm of all gradients: fp32, 0-dim, one pass; not finite when any of them is not."""
        self._gather_grads()
        norms = [torch.linalg.vector_norm(bucket.grads, dtype=torch.float32) for bucket in self.buckets]
        return torch.linalg.vector_norm(torch.stack(norms))

    def finite(self) -> Tensor:
        """0-dim bool: whether every gradient is finite. With `grad_norm` at hand, ask that instead."""
        return torch.isfinite(self.grad_norm())

    @torch.no_grad()
    def clip_grads(self, max_norm: float, norm: Tensor | None = None) -> Tensor:
        """Scales all gradients so that their global norm is at most max_norm; returns the norm from before.

        norm: `grad_norm()`'s result, if it was already computed for these gradients.
        """
        norm = self.grad_norm() if norm is None else norm
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for bucket in self.buckets:
            bucket.grads.mul_(scale)
        return norm

    def state_tensors(self) -> dict[str, Tensor]:
        """Masters and state by logical name ("master.<parameter>", "m.<parameter>"): all a resume needs.

        The tensors are views of the live buffers: copy what must outlive the next step. The parameters
        themselves are the masters rounded to their dtype."""
        tensors = {}
        for bucket in self.buckets:
            for kind, buffer in {"master": bucket.masters, **bucket.state}.items():
                for (name, _), view in zip(bucket.parameters, bucket.views(buffer), strict=True):
                    tensors[f"{kind}.{name}"] = view
        return tensors

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores what `state_tensors` gave, bit for bit, and the parameters from the masters.

        Raises ValueError, before anything is changed, when a tensor is missing, has another shape or is one
        too many."""
        own = self.state_tensors()
        problems = [f"missing: {name}" for name in own if name not in tensors]
        problems += [f"unknown: {name}" for name in tensors if name not in own]
        for name in own.keys() & tensors.keys():
            if own[name].shape != tensors[name].shape:
                problems.append(f"{name} is {tuple(tensors[name].shape)}, not {tuple(own[name].shape)}")
        if problems:
            more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise ValueError(
                f"the optimizer state does not fit this model ({'; '.join(sorted(problems)[:5])}{more}): "
                "resume with the recipe that wrote it"
            )
        for name, view in own.items():
            view.copy_(tensors[name])
        for bucket in self.buckets:
            if bucket.out is not None:
                bucket.out.copy_(bucket.masters)

    def _gather_grads(self) -> None:
        """Makes every `.grad` the view of its buffer, copying what autograd put elsewhere (the first backward
        does).

        Raises ValueError naming parameters that received no gradient at all.
        """
        silent = [name for bucket in self.buckets for name, p in bucket.parameters if p.grad is None]
        if silent:
            raise ValueError(
                f"no gradient reached {', '.join(silent)}: run backward first; "
                "if it ran, the model does not use these parameters, so remove them"
            )
        for bucket in self.buckets:
            for (_, parameter), view in zip(bucket.parameters, bucket.grad_views, strict=True):
                grad = parameter.grad
                if grad is not None and grad is not view:
                    view.copy_(grad)
                    parameter.grad = view


def _buckets(group: Group, dtype_ns: torch.dtype, compile: bool) -> list[Bucket]:
    """Stacks of equal shape for a stacked rule, else one flat buffer; one for each dtype and device."""
    kinds: dict[tuple, list[tuple[str, Parameter]]] = {}
    for name, parameter in group.parameters:
        shape = tuple(parameter.shape) if group.rule.stacked else ()
        kinds.setdefault((parameter.device, parameter.dtype, *shape), []).append((name, parameter))
    return [_bucket(group, parameters, dtype_ns, compile) for parameters in kinds.values()]


@torch.no_grad()
def _bucket(group: Group, parameters: list[tuple[str, Parameter]], dtype_ns: torch.dtype, compile: bool) -> Bucket:
    first = parameters[0][1]
    if group.rule.stacked:
        several = first.shape[:-2]  # a parameter may itself be a stack: so many matrices of it
        params = first.new_empty(len(parameters) * several.numel(), *first.shape[-2:])
        views = partial(_unstack, count=len(parameters), several=several)
    else:
        shapes = [p.shape for _, p in parameters]
        params = first.new_zeros(sum(_padded(shape.numel()) for shape in shapes))
        views = partial(_unflatten, shapes=shapes)
    for (_, parameter), view in zip(parameters, views(params), strict=True):
        view.copy_(parameter)
        parameter.data = view
    grads = torch.zeros_like(params)
    masters = params if params.dtype in (torch.float32, torch.float64) else params.float()
    update = partial(group.rule.update_, dtype=dtype_ns)
    # Rules on stacks are mostly matrix products: compiled they save a CPU little time in a step and cost it more at
    # the start than that comes to in an hour. dynamic: one compilation serves all sizes.
    if compile and not (group.rule.stacked and params.device.type == "cpu"):
        update = torch.compile(update, dynamic=True)
    state = group.rule.init_state(masters)
    return Bucket(group.rule, group.lr, parameters, views, params, grads, views(grads), masters, state, update)


def _unstack(buffer: Tensor, count: int, several: torch.Size) -> list[Tensor]:
    return list(buffer.view(count, *several, *buffer.shape[1:]).unbind(0))


def _unflatten(buffer: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    parts = buffer.split([_padded(shape.numel()) for shape in shapes])
    return [part[: shape.numel()].view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _padded(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT
