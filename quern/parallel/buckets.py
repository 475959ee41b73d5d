"""Buckets: parameters that lie in one buffer, travel together, and share an update rule; who owns which part.

A bucket's buffer is cut into one equal region for each rank of the data group. Gradients are reduced so that each
region's sum ends up on its owner, the owner updates that region's fp32 masters, and the regions are gathered back.

- Rows: parameters of an elementwise rule, one after the other, cut at multiples of a row, so that what a rank owns of
  a parameter is a rectangle of it.
- Stacks: matrices of one shape, a whole one never cut. Which ranks have one more, where their number does not divide,
  follows the work that they were given before. Under tensor parallelism a rank holds parts of matrices: the shards
  of a replica exchange those they own, so that each has whole ones to update, and back (all-to-all).
- Small: what is too little to cut; summed in one all-reduce with all other small ones and updated on every rank.

On one process a region is the whole buffer and nothing travels. Memory per parameter and rank of n, in bytes, with
bf16 parameters and AdamW: 2 + 2 + 12/n (ZeRO stage 2, arXiv 1910.02054).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from quern.mesh import Mesh, Pending
from quern.optim.groups import Group, Rule
from quern.parallel.sharding import Slice, sharding_of, sliced

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
    """fp32; of what this rank owns. Parameters in fp32 are their own."""
    state: dict[str, Tensor]
    update: Callable[..., None]
    mesh: Mesh
    begin: int
    """The owned region is params[begin:end], along the first dimension."""
    end: int
    small: bool
    exchange: int | None = None
    """The dimension of the stack that is cut, where their owner must put matrices together first."""
    pending: Pending | None = field(default=None, repr=False)

    @property
    def owned_grads(self) -> Tensor:
        return self.grads[self.begin : self.end]

    @property
    def owned_params(self) -> Tensor:
        return self.params[self.begin : self.end]

    @property
    def replicated(self) -> bool:
        """Whether every shard of the replica holds the same."""
        return sharding_of(self.parameters[0][1]) is None

    def reduce(self) -> None:
        """Starts to sum the owned region's gradients over the data group; in place."""
        region = len(self.grads) // self.mesh.data.size
        own = self.grads[self.mesh.data.rank * region : (self.mesh.data.rank + 1) * region]
        self.pending = self.mesh.data.reduce_scatter(own, self.grads)

    def apply(self, scalars: dict[str, Tensor] | dict[str, float]) -> None:
        """Updates what is owned, and starts to gather the parameters back."""
        if self.exchange is not None:
            whole = _put_together(self.owned_grads, self.exchange, self.mesh)
            rounded = torch.empty_like(whole)
            self.update(self.masters, whole, self.state, scalars, out=rounded)
            _take_apart(rounded, self.owned_params, self.exchange, self.mesh)
        elif self.end > self.begin:
            self.update(self.masters, self.owned_grads, self.state, scalars, out=self._out())
        self.gather()

    def gather(self) -> None:
        """Starts to collect every rank's region of the parameters; `pending` when it is under way."""
        if not self.small and self.mesh.data.size > 1:
            region = len(self.params) // self.mesh.data.size
            own = self.params[self.mesh.data.rank * region : (self.mesh.data.rank + 1) * region]
            self.pending = self.mesh.data.all_gather(self.params, own)

    def round_masters(self) -> None:
        """Owned parameters from the masters, which were loaded."""
        if self.exchange is not None:
            _take_apart(self.masters.to(self.params.dtype), self.owned_params, self.exchange, self.mesh)
        elif (out := self._out()) is not None:
            out.copy_(self.masters)
        self.gather()

    def wait(self) -> None:
        if self.pending is not None:
            self.pending.wait()
            self.pending = None

    def slices(self) -> dict[str, Slice]:
        """What this rank holds of masters and state, by logical name ("master.<parameter>", "m.<parameter>")."""
        found = {}
        for kind, buffer in {"master": self.masters, **self.state}.items():
            for name, part in self._slices(buffer):
                found[f"{kind}.{name}"] = part
        return found

    def _slices(self, buffer: Tensor) -> list[tuple[str, Slice]]:
        return self._stack_slices(buffer) if self.rule.stacked else self._row_slices(buffer)

    def _stack_slices(self, buffer: Tensor) -> list[tuple[str, Slice]]:
        """Whole parameters, each one matrix or `several`."""
        if not len(buffer):
            return []
        several = self.parameters[0][1].shape[:-2]
        first, saved = self.begin // several.numel(), not self.replicated or self.mesh.model.rank == 0
        if self.exchange is not None:
            first, saved = first + self.mesh.model.rank * (len(buffer) // several.numel()), True
        names = self._slots()[first : first + len(buffer) // several.numel()]
        parts = buffer.view(len(names), *several, *buffer.shape[1:])
        return [
            (name, Slice(part, (0,) * part.ndim, tuple(part.shape), saved))
            for name, part in zip(names, parts, strict=True)
            if name is not None
        ]

    def _slots(self) -> list[str | None]:
        """The parameter in each place of the stack; None is padding."""
        size = self.params[0].numel() * self.parameters[0][1].shape[:-2].numel()
        slots: list[str | None] = [None] * (self.params.numel() // size)
        for (name, _), view in zip(self.parameters, self.param_views, strict=True):
            slots[(view.storage_offset() - self.params.storage_offset()) // size] = name
        return slots

    def _row_slices(self, buffer: Tensor) -> list[tuple[str, Slice]]:
        """Of each parameter the rows that lie in the owned region."""
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
        same = self.masters.data_ptr() == self.owned_params.data_ptr()
        return None if same else self.owned_params


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


def make_buckets(groups: Sequence[Group], settings: Settings) -> list[Bucket]:
    """In the order in which a backward pass completes them, roughly: the last layers' first."""
    data = settings.mesh.data.size
    total = sum(p.numel() for group in groups for _, p in group.parameters)
    most = min(MOST_ELEMENTS, max(LEAST_ELEMENTS, total // 8)) if data > 1 else total
    work = [0] * data
    buckets = []
    for group in groups:
        kinds: dict[tuple, Named] = {}
        for name, parameter in group.parameters:
            kinds.setdefault(_kind(group, parameter, data), []).append((name, parameter))
        for parameters in kinds.values():
            if group.rule.stacked:
                for part in _parts(parameters, most, data * settings.mesh.model.size):
                    buckets.append(_stack(group, part, settings, work))
            elif data == 1 or sum(p.numel() for _, p in parameters) < SMALL_ELEMENTS:
                buckets.append(_small(group, parameters, settings))
            else:
                buckets.append(_rows(group, parameters, settings))
    return buckets[::-1] if data > 1 else buckets


def _kind(group: Group, parameter: Parameter, data: int) -> tuple:
    """Parameters of one kind can lie in one bucket."""
    sharding = sharding_of(parameter)
    common = (parameter.device, parameter.dtype, sharding is not None)
    if group.rule.stacked:
        return (*common, sharding and sharding.dim, *parameter.shape)
    return (*common, parameter[0].numel() if data > 1 and parameter.ndim > 1 else 1)


def _parts(parameters: Named, most: int, multiple: int) -> list[Named]:
    """Consecutive parameters with at most `most` elements, and where possible a multiple of `multiple` of them."""
    fitting = max(1, most // parameters[0][1].numel())
    count = max(multiple, fitting // multiple * multiple)
    return [parameters[i : i + count] for i in range(0, len(parameters), count)]


def _stack(group: Group, parameters: Named, settings: Settings, work: list[int]) -> Bucket:
    first, mesh = parameters[0][1], settings.mesh
    several, (R, C) = first.shape[:-2].numel(), first.shape[-2:]
    sharding = sharding_of(first)
    exchange = sharding.dim - first.ndim + 3 if sharding is not None else None  # of (N, R, C)
    ranks = mesh.data.size
    counts = _counts(len(parameters), ranks, several * R * C * min(R, C), work)
    slots = max(counts)
    if exchange is not None:
        slots = -(-slots // mesh.model.size) * mesh.model.size
    params = first.new_zeros(ranks * slots * several, R, C)
    places = [rank * slots + i for rank, count in enumerate(counts) for i in range(count)]
    begin = mesh.data.rank * slots * several
    filled = slots if exchange is not None else counts[mesh.data.rank]

    def views(buffer: Tensor) -> list[Tensor]:
        units = buffer.view(ranks * slots, *first.shape)
        return [units[place] for place in places]

    return _bucket(group, parameters, settings, params, views, begin, begin + filled * several, False, exchange)


def _counts(matrices: int, ranks: int, cost: int, work: list[int]) -> list[int]:
    """How many each rank owns; what does not divide goes to those with the least work so far."""
    counts = [matrices // ranks] * ranks
    for rank in sorted(range(ranks), key=lambda rank: work[rank])[: matrices % ranks]:
        counts[rank] += 1
    for rank in range(ranks):
        work[rank] += counts[rank] * cost
    return counts


def _rows(group: Group, parameters: Named, settings: Settings) -> Bucket:
    first, ranks = parameters[0][1], settings.mesh.data.size
    width = first[0].numel() if first.ndim > 1 else 1
    total = sum(p.numel() for _, p in parameters)
    region = -(-total // (width * ranks)) * width
    params = first.new_zeros(ranks * region)
    begin = settings.mesh.data.rank * region
    views = partial(_unflatten, shapes=[p.shape for _, p in parameters], alignment=1)
    return _bucket(group, parameters, settings, params, views, begin, begin + region, False)


def _small(group: Group, parameters: Named, settings: Settings) -> Bucket:
    shapes = [p.shape for _, p in parameters]
    params = parameters[0][1].new_zeros(sum(_padded(shape.numel(), ALIGNMENT) for shape in shapes))
    views = partial(_unflatten, shapes=shapes, alignment=ALIGNMENT)
    return _bucket(group, parameters, settings, params, views, 0, len(params), True)


@torch.no_grad()
def _bucket(
    group: Group,
    parameters: Named,
    settings: Settings,
    params: Tensor,
    views: Callable[[Tensor], list[Tensor]],
    begin: int,
    end: int,
    small: bool,
    exchange: int | None = None,
) -> Bucket:
    """Moves the parameters into `params`, and makes masters and state of what this rank owns."""
    param_views = views(params)
    for (_, parameter), view in zip(parameters, param_views, strict=True):
        view.copy_(parameter)
        parameter.data = view
    owned = params[begin:end]
    if exchange is not None:
        masters = _put_together(owned, exchange, settings.mesh).to(_master_dtype(params.dtype))
    else:
        masters = owned.to(_master_dtype(params.dtype))
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
        exchange,
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


# Whole matrices out of the shards' parts ---------------------------------------------------------------------


def _put_together(parts: Tensor, dim: int, mesh: Mesh) -> Tensor:
    """(n, r, c) parts of n matrices, cut along `dim`, on each shard → (n / shards, R, C) whole ones, others on each."""
    shards = mesh.model.size
    received = torch.empty_like(parts)
    mesh.model.all_to_all(received, parts.contiguous()).wait()
    pieces = received.view(shards, len(parts) // shards, *parts.shape[1:])
    return torch.cat(list(pieces), dim=dim)


def _take_apart(whole: Tensor, parts: Tensor, dim: int, mesh: Mesh) -> None:
    """The inverse, into `parts`."""
    pieces = torch.cat(whole.chunk(mesh.model.size, dim=dim))
    received = torch.empty_like(pieces)
    mesh.model.all_to_all(received, pieces).wait()
    parts.copy_(received)
