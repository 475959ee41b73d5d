"""Buckets: parameters that lie in one buffer, travel together, and share an update rule; who owns which part.

A bucket's buffer is cut into one equal region for each rank of the data group. Gradients are reduced so that each
region's sum ends up on its rank, the owners update their fp32 masters, and the regions are gathered back.

- Rows: parameters of an elementwise rule, one after the other, cut at multiples of a row, so that what a rank owns of
  a parameter is a rectangle of it. A region's rank owns it.
- Stacks: matrices of one shape, each owned whole. Where their number divides by the ranks, a region is those that its
  rank owns. Else regions end within matrices, and the parts travel to the owners and back (all-to-all); who they are
  follows the work that the ranks have (ownership.py). Under tensor parallelism a rank holds parts of matrices: the
  shards of a replica exchange those they own, so that each has whole ones to update, and back (stacks.py).
- Small: what is too little to cut; summed in one all-reduce with all other small ones and updated on every rank.

On one process a region is the whole buffer and nothing travels. Memory per parameter and rank of n, in bytes, with
bf16 parameters and AdamW: 2 + 2 + 12/n (ZeRO stage 2, arXiv 1910.02054).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from quern.mesh import Mesh, Pending
from quern.optim.groups import ParameterGroup, Rule
from quern.parallel.ownership import Ownership, share_out
from quern.parallel.sharding import Slice, sharding_of, sliced
from quern.parallel.stacks import Stack

ALIGNMENT = 64
"""Elements: a parameter in a small bucket starts at a multiple, since fast matmuls need aligned operands."""

Named = list[tuple[str, Parameter]]


@dataclass
class Bucket:
    """Its parameters are views into `params`, their gradients into `grads`; `masters` and `state` are this rank's."""

    rule: Rule
    lr: float
    parameters: Named
    params: Tensor
    grads: Tensor
    param_views: list[Tensor]
    grad_views: list[Tensor]
    masters: Tensor
    """fp32; of what this rank owns; (N, R, C) for a rule on stacks. Parameters in fp32 are their own, in its region."""
    state: dict[str, Tensor]
    update: Callable[..., None]
    mesh: Mesh
    begin: int
    """The region is params[begin:end]."""
    end: int
    small: bool
    stack: Stack | None = None
    """Where the rule works on stacks: who owns the matrices, and how they get there."""
    pending: Pending | None = field(default=None, repr=False)
    travelling: Tensor | None = field(default=None, repr=False)
    """Parts of matrices on the way between regions and owner."""

    @property
    def region_grads(self) -> Tensor:
        return self.grads[self.begin : self.end]

    @property
    def region_params(self) -> Tensor:
        return self.params[self.begin : self.end]

    @property
    def replicated(self) -> bool:
        """Whether every shard of the replica holds the same."""
        return sharding_of(self.parameters[0][1]) is None

    @property
    def moves(self) -> bool:
        """Whether owners are elsewhere than the regions."""
        return self.stack is not None and self.stack.moves

    @property
    def exchange(self) -> bool:
        """Whether an owner must put matrices together, out of the shards' parts."""
        return self.stack is not None and self.stack.exchange is not None

    def reduce(self) -> None:
        """Starts to sum the region's gradients over the data group; in place."""
        self.pending = self.mesh.data.reduce_scatter(self.region_grads, self.grads)

    def fetch(self) -> None:
        """Starts to bring the gradients of the matrices that this replica owns, where they are not in its region."""
        if self.stack is not None and self.moves:
            self.travelling, self.pending = self.stack.fetch(self.region_grads)

    def apply(self, scalars: dict[str, Tensor] | dict[str, float]) -> None:
        """Updates what is owned, after `fetch`, and starts to bring the parameters back: to the regions where they are
        elsewhere, and `gather` remains to be called; else to all."""
        come = self.travelling
        self.wait()
        if self.stack is not None and (self.moves or self.exchange):
            parts = self.stack.of_replica(self.grads) if come is None else come
            whole = self.stack.put_together(parts)
            rounded = torch.empty_like(whole)
            if len(whole):
                self.update(self.masters, whole, self.state, scalars, out=rounded)
            self._send_back(self.stack, rounded)
        elif len(self.masters):
            self.update(self.masters, self.region_grads.view_as(self.masters), self.state, scalars, out=self._out())
        if not self.moves:
            self.gather()

    def gather(self) -> None:
        """Starts to collect every rank's region of the parameters; `pending` when it is under way."""
        self.wait()
        if not self.small and self.mesh.data.size > 1:
            self.pending = self.mesh.data.all_gather(self.params, self.region_params)

    def round_masters(self) -> None:
        """Parameters from the masters, which were loaded."""
        if self.stack is not None and (self.moves or self.exchange):
            self._send_back(self.stack, self.masters.to(self.params.dtype))
        elif (out := self._out()) is not None:
            out.copy_(self.masters)
        self.gather()

    def wait(self) -> None:
        if self.pending is not None:
            self.pending.wait()
            self.pending = self.travelling = None

    def _send_back(self, stack: Stack, whole: Tensor) -> None:
        """Whole matrices to the regions; where these are elsewhere, starts to."""
        parts = stack.take_apart(whole)
        if stack.moves:
            self.travelling, self.pending = parts, stack.send_back(parts, self.region_params)
        else:
            self.region_params.copy_(parts.view(-1))

    def slices(self) -> dict[str, Slice]:
        """What this rank holds of masters and state, by logical name ("master.<parameter>", "m.<parameter>")."""
        found = {}
        for kind, buffer in {"master": self.masters, **self.state}.items():
            for name, part in self._slices(buffer):
                found[f"{kind}.{name}"] = part
        return found

    def _slices(self, buffer: Tensor) -> list[tuple[str, Slice]]:
        return self._row_slices(buffer) if self.stack is None else self._stack_slices(self.stack, buffer)

    def _stack_slices(self, stack: Stack, buffer: Tensor) -> list[tuple[str, Slice]]:
        """Whole parameters, each one matrix or several."""
        parts = buffer.view(len(stack.units), *stack.shape[:-2], *buffer.shape[1:])
        saved = self.exchange or self.mesh.model.rank == 0
        return [
            (self.parameters[unit][0], Slice(part, (0,) * part.ndim, tuple(part.shape), saved))
            for unit, part in zip(stack.units, parts, strict=True)
        ]

    def _row_slices(self, buffer: Tensor) -> list[tuple[str, Slice]]:
        """Of each parameter the rows that lie in the region."""
        found = []
        saved = (not self.small or self.mesh.data.rank == 0) and (not self.replicated or self.mesh.model.rank == 0)
        for (name, parameter), view in zip(self.parameters, self.param_views, strict=True):
            start = view.storage_offset() - self.params.storage_offset()
            width = parameter[0].numel() if parameter.ndim > 1 else 1
            rows = parameter.numel() // width
            low = max(0, -(-(self.begin - start) // width))
            high = min(rows, (self.end - start) // width)
            if low >= high:
                continue
            at = start + low * width - self.begin
            part = buffer[at : at + (high - low) * width].view(high - low, *parameter.shape[1:])
            if (whole := sliced(part, sharding_of(parameter), low, rows, saved=saved)) is not None:
                found.append((name, whole))
        return found

    def _out(self) -> Tensor | None:
        same = self.masters.data_ptr() == self.region_params.data_ptr()
        return None if same else self.region_params.view_as(self.masters)


# Making them ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """dtype_ns: of Muon's matrix products; compile: run the rules through torch.compile."""

    mesh: Mesh
    dtype_ns: torch.dtype
    compile: bool


SMALL_ELEMENTS = 16_384
"""A bucket of an elementwise rule with fewer is not cut."""
MOST_ELEMENTS = 2**24
LEAST_ELEMENTS = 2**18
"""A stack is split into buckets of an eighth of all parameters, within these bounds: large enough for a link's
bandwidth, small enough that the first leave early in the backward pass."""
LEAST_REGION = 2**19
"""Many replicas have larger buckets, of as much for each: with less, a ring waits longer than it sends."""


def make_buckets(groups: Sequence[ParameterGroup], settings: Settings) -> list[Bucket]:
    """With several replicas, the last layers' first."""
    data, model = settings.mesh.data.size, settings.mesh.model.size
    total = sum(p.numel() for group in groups for _, p in group.parameters)
    eighth = max(LEAST_ELEMENTS, total // 8)
    most = min(max(MOST_ELEMENTS, data * LEAST_REGION), eighth) if data > 1 else total
    parts: list[tuple[ParameterGroup, Named]] = []
    for group in groups:
        kinds: dict[tuple, Named] = {}
        for name, parameter in group.parameters:
            kinds.setdefault(_kind(group, parameter, data), []).append((name, parameter))
        for parameters in kinds.values():
            stacks = _parts(parameters, most, 2 * eighth, data * model) if group.rule.stacked else [parameters]
            parts += [(group, stack) for stack in stacks]
    owned = _shared_out([part for group, part in parts if group.rule.stacked], data, model)
    buckets = [
        _stack(group, part, settings, owned[part[0][0]])
        if group.rule.stacked
        else _small(group, part, settings)
        if data == 1 or sum(p.numel() for _, p in part) < SMALL_ELEMENTS
        else _rows(group, part, settings)
        for group, part in parts
    ]
    return buckets[::-1] if data > 1 else buckets


def _kind(group: ParameterGroup, parameter: Parameter, data: int) -> tuple:
    """Parameters of one kind can lie in one bucket."""
    sharding = sharding_of(parameter)
    common = (parameter.device, parameter.dtype, sharding is not None)
    if group.rule.stacked:
        return (*common, sharding and sharding.dim, *parameter.shape)
    return (*common, parameter[0].numel() if data > 1 and parameter.ndim > 1 else 1)


def _parts(parameters: Named, most: int, largest: int, ranks: int) -> list[Named]:
    """Consecutive parameters with at most `most` elements; as many as divide by the ranks, so that none has to move,
    where that takes no more than `largest`."""
    size, count = parameters[0][1].numel(), max(1, most // parameters[0][1].numel())
    if ranks <= len(parameters) and ranks * size <= largest:
        count = max(ranks, count // ranks * ranks)
    else:
        count = -(-len(parameters) // -(-len(parameters) // count))  # all much the same
    return [parameters[i : i + count] for i in range(0, len(parameters), count)]


def _shared_out(stacks: Sequence[Named], replicas: int, shards: int) -> dict[str, Ownership]:
    """By the name of a stack's first parameter. A unit costs what the products of its matrices do."""
    work = [[0] * shards for _ in range(replicas)]
    costs = {stack[0][0]: _cost(stack[0][1], shards) for stack in stacks}
    owned = {}
    for stack in sorted(stacks, key=lambda stack: costs[stack[0][0]], reverse=True):
        (name, first), units = stack[0], len(stack)
        region = units // replicas * first.numel()
        if units % replicas:
            region = _padded(-(-units * first.numel() // replicas), ALIGNMENT)
        cuts = share_out(units, costs[name], work, whole=sharding_of(first) is None)
        owned[name] = Ownership(first.numel(), region, cuts, replicas)
    return owned


def _cost(parameter: Parameter, shards: int) -> int:
    """Multiplications in the Gram matrices of whole matrices."""
    sharding, shape = sharding_of(parameter), list(parameter.shape)
    if sharding is not None:
        shape[sharding.dim] *= shards
    return math.prod(shape) * min(shape[-2:])


def _stack(group: ParameterGroup, parameters: Named, settings: Settings, ownership: Ownership) -> Bucket:
    first, mesh, whole = parameters[0][1], settings.mesh, len(parameters) * parameters[0][1].numel()
    sharding = sharding_of(first)
    exchange = sharding.dim - first.ndim + 3 if sharding is not None else None  # of (N, R, C)
    params = first.new_zeros(ownership.replicas * ownership.region)
    begin = mesh.data.rank * ownership.region
    stack = Stack(ownership, first.shape, exchange, mesh)

    def views(buffer: Tensor) -> list[Tensor]:
        return list(buffer[:whole].view(len(parameters), *first.shape))

    return _bucket(group, parameters, settings, params, views, begin, begin + ownership.region, stack)


def _rows(group: ParameterGroup, parameters: Named, settings: Settings) -> Bucket:
    first, ranks = parameters[0][1], settings.mesh.data.size
    width = first[0].numel() if first.ndim > 1 else 1
    total = sum(p.numel() for _, p in parameters)
    region = -(-total // (width * ranks)) * width
    params = first.new_zeros(ranks * region)
    begin = settings.mesh.data.rank * region
    views = partial(_unflatten, shapes=[p.shape for _, p in parameters], alignment=1)
    return _bucket(group, parameters, settings, params, views, begin, begin + region)


def _small(group: ParameterGroup, parameters: Named, settings: Settings) -> Bucket:
    shapes = [p.shape for _, p in parameters]
    params = parameters[0][1].new_zeros(sum(_padded(shape.numel(), ALIGNMENT) for shape in shapes))
    views = partial(_unflatten, shapes=shapes, alignment=ALIGNMENT)
    return _bucket(group, parameters, settings, params, views, 0, len(params), small=True)


@torch.no_grad()
def _bucket(
    group: ParameterGroup,
    parameters: Named,
    settings: Settings,
    params: Tensor,
    views: Callable[[Tensor], list[Tensor]],
    begin: int,
    end: int,
    stack: Stack | None = None,
    small: bool = False,
) -> Bucket:
    """Moves the parameters into `params`, and makes masters and state of what this rank owns."""
    param_views = views(params)
    for (_, parameter), view in zip(parameters, param_views, strict=True):
        view.copy_(parameter)
        parameter.data = view
    owned = params[begin:end] if stack is None else stack.put_together(stack.of_replica(params))
    apart = stack is not None and stack.moves  # what a rank owns is not its region
    masters = owned.to(_master_dtype(params.dtype), copy=apart)
    update = partial(group.rule.update_, dtype=settings.dtype_ns)
    # Rules on stacks are mostly matrix products: compiled they save a CPU little time in a step and cost it more at
    # the start than that comes to in an hour. dynamic: one compilation serves all sizes.
    if settings.compile and not (group.rule.stacked and params.device.type == "cpu"):
        update = torch.compile(update, dynamic=True)
    grads = torch.zeros_like(params)
    return Bucket(
        group.rule,
        group.lr,
        parameters,
        params,
        grads,
        param_views,
        views(grads),
        masters,
        group.rule.init_state(masters),
        update,
        settings.mesh,
        begin,
        end,
        small,
        stack,
    )


def _master_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def _unflatten(buffer: Tensor, shapes: Sequence[torch.Size], alignment: int) -> list[Tensor]:
    views, at = [], 0
    for shape in shapes:
        views.append(buffer[at : at + shape.numel()].view(shape))
        at += _padded(shape.numel(), alignment)
    return views


def _padded(count: int, alignment: int) -> int:
    return -(-count // alignment) * alignment
