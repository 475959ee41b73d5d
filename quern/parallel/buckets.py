"""Buckets: parameters that share one buffer and one update rule, and are communicated together.

A buffer is cut into one equal region per rank of the data group; on one process a region is the whole buffer. Its kinds
are in docs/parallelism.md, "Who holds what": rows of elementwise rules, stacks of matrices, and small buckets, which
are not cut. A group that is updated every n-th step (`GroupRule.every`) adds its gradients to `held` on the other
steps, without communication. Where replicas share the parameters (zero3.py), `Share` holds their regions, and buffers
have memory only while a block computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from quern.mesh import Mesh, Pending
from quern.optim.groups import ParameterGroup, Rule
from quern.parallel.sharding import Ownership, Stack, sharding_of, share_out, units_together

ALIGNMENT = 64
"""A parameter of a small bucket starts at a multiple of so many elements: fast matmuls need aligned operands."""

Named = list[tuple[str, Parameter]]


@dataclass
class Share:
    """This replica's region of parameters and gradients that no replica holds whole.

    part: which module the parameters belong to; arrived: places of parameters whose gradients are in the bucket's
    buffer; summed: `grads` has gradients of this step.
    """

    params: Tensor
    grads: Tensor
    part: int
    arrived: set[int] = field(default_factory=set)
    summed: bool = False


@dataclass
class Bucket:
    """Parameters of one group. They are views into `params`, their gradients into `grads`; `masters` and `state` are
    the part that this rank owns."""

    group: ParameterGroup
    parameters: Named
    params: Tensor
    grads: Tensor
    param_views: list[Tensor]
    grad_views: list[Tensor]
    masters: Tensor
    """fp32; (N, R, C) for a rule on stacks. fp32 parameters are their own masters, in this rank's region,
    unless they are exchanged, put together, or kept on the CPU."""
    state: dict[str, Tensor]
    update: Callable[..., None]
    mesh: Mesh
    begin: int
    """The region is params[begin:end]."""
    end: int
    small: bool
    stack: Stack | None = None
    """The owners of the matrices of a rule on stacks, and how the matrices travel."""
    share: Share | None = None
    visits: bool = False
    """Masters and state are kept on the CPU, and copied to the device of the parameters for the update."""
    pending: Pending | None = field(default=None, repr=False)
    travelling: Tensor | None = field(default=None, repr=False)
    """Parts of matrices that travel between regions and owners."""
    held: Tensor | None = field(default=None, repr=False)
    """The sum of this rank's gradients of `held_steps` steps, in a group that is updated every n-th step."""
    held_steps: int = 0

    @property
    def rule(self) -> Rule:
        return self.group.rule

    @property
    def due(self) -> bool:
        """Whether the current step updates this bucket."""
        return self.held_steps + 1 >= self.group.every

    @property
    def region_grads(self) -> Tensor:
        return self.grads[self.begin : self.end] if self.share is None else self.share.grads

    @property
    def region_params(self) -> Tensor:
        return self.params[self.begin : self.end] if self.share is None else self.share.params

    @property
    def replicated(self) -> bool:
        """Whether every shard of the replica holds the same parameters."""
        return sharding_of(self.parameters[0][1]) is None

    @property
    def first_copy(self) -> bool:
        """Whether this rank's region is saved and enters the norm; of several equal copies one is and does."""
        return (not self.small or self.mesh.data.rank == 0) and (not self.replicated or self.mesh.model.rank == 0)

    @property
    def moves(self) -> bool:
        """Whether some matrices are owned outside their region."""
        return self.stack is not None and self.stack.ownership.moves

    @property
    def exchange(self) -> bool:
        """Whether an owner must assemble whole matrices from the parts of the shards."""
        return self.stack is not None and self.stack.exchange is not None

    def hold(self) -> None:
        """Keeps the gradients of this step for a later update."""
        self.held = self.grads.clone() if self.held is None else self.held.add_(self.grads)
        self.held_steps += 1

    def add_held(self) -> None:
        """Replaces the gradients by the mean over this step and the held ones."""
        if self.held is not None:
            self.grads.add_(self.held).div_(self.held_steps + 1)

    def reduce(self) -> None:
        """Starts to sum the gradients of the region over the data group, in place."""
        self.add_held()
        self.pending = self.mesh.data.reduce_scatter(self.region_grads, self.grads)

    def fetch(self) -> None:
        """Starts to fetch the gradients of the matrices that this replica owns outside its region."""
        if self.stack is not None and self.moves:
            self.travelling, self.pending = self.stack.fetch(self.region_grads)

    def apply(self, scalars: dict[str, Tensor] | dict[str, float]) -> None:
        """Updates what this rank owns, after `fetch`, and starts to send the parameters back.

        Where the bucket `moves`, they go to their regions, and the caller must call `gather`. Otherwise they go to all.
        """
        self.held, self.held_steps = None, 0
        fetched = self.travelling
        self.wait()
        if self.stack is not None and (self.moves or self.exchange):
            whole = self.stack.put_together(
                self.stack.of_replica(self.region_grads, self.begin) if fetched is None else fetched
            )
            rounded = torch.empty_like(whole, dtype=self.params.dtype)
            if len(whole):
                self._update_owned(whole, scalars, rounded)
            self._send_back(self.stack, rounded)
        elif len(self.masters):
            self._update_owned(self._owned(self.region_grads), scalars, self._out())
        if not self.moves:
            self.gather()

    def _update_owned(self, grads: Tensor, scalars: dict[str, Tensor] | dict[str, float], out: Tensor | None) -> None:
        if not self.visits:
            self.update(self.masters, grads, self.state, scalars, out=out)
            return
        kept = [self.masters, *self.state.values()]
        masters, *state = here = [tensor.to(grads.device, non_blocking=True, copy=True) for tensor in kept]
        self.update(masters, grads, dict(zip(self.state, state, strict=True)), scalars, out=out)
        for tensor, changed in zip(kept, here, strict=True):
            tensor.copy_(changed, non_blocking=True)  # `Zero2.slices` waits for it

    def gather(self) -> None:
        """Starts to collect the parameters from all regions, unless they stay there; `pending` is the collective."""
        self.wait()
        if self.share is None and not self.small and self.mesh.data.size > 1:
            self.pending = self.mesh.data.all_gather(self.params, self.region_params)

    def round_masters(self) -> None:
        """Sets the parameters from the masters, which were loaded."""
        if self.stack is not None and (self.moves or self.exchange):
            self._send_back(self.stack, self.masters.to(self.params))
        elif (out := self._out()) is not None:
            out.copy_(self.masters)
        self.gather()

    def wait(self) -> None:
        if self.pending is not None:
            self.pending.wait()
            self.pending = self.travelling = None

    def _send_back(self, stack: Stack, whole: Tensor) -> None:
        """Returns whole matrices to the regions; where the bucket `moves`, only starts to."""
        parts = stack.take_apart(whole)
        if self.moves:
            self.travelling, self.pending = parts, stack.send_back(parts, self.region_params)
        else:
            self.region_params.copy_(parts.view(-1))

    def _out(self) -> Tensor | None:
        same = self.masters.data_ptr() == self.region_params.data_ptr()
        return None if same else self._owned(self.region_params)

    def _owned(self, region: Tensor) -> Tensor:
        """The part of a region that belongs to the masters; the region of a tiny matrix is longer, for alignment."""
        return region[: self.masters.numel()].view_as(self.masters)


# Construction -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """dtype_ns: dtype of Muon's matrix products; compile: run the rules through torch.compile; fp32_gradients: sum
    gradients in fp32 rather than in the parameters' dtype; parts: the number of the module of each parameter that
    replicas may share; on_cpu: keep masters and state there."""

    mesh: Mesh
    dtype_ns: torch.dtype = torch.float32
    compile: bool = False
    fp32_gradients: bool = False
    parts: Mapping[str, int] = field(default_factory=dict)
    on_cpu: bool = False


SMALL_ELEMENTS = 16_384
"""A bucket of an elementwise rule with fewer elements is not cut."""
MOST_ELEMENTS = 2**24
LEAST_ELEMENTS = 2**18
"""A group is split into buckets of an eighth of all parameters, within these bounds: large enough for the bandwidth of
a link, small enough that the first buckets are reduced early in the backward pass."""
LEAST_REGION = 2**19
"""The fewest elements of a replica's region: with smaller ones, a ring waits longer than it sends."""


def make_buckets(groups: Sequence[ParameterGroup], settings: Settings) -> list[Bucket]:
    """The buckets of all groups. With several replicas, the buckets of the last layers come first."""
    data, model = settings.mesh.data.size, settings.mesh.model.size
    total = sum(p.numel() for group in groups for _, p in group.parameters)
    eighth = max(LEAST_ELEMENTS, total // 8)
    apart = data > 1 or settings.on_cpu  # else larger buckets are updated faster
    most = min(max(MOST_ELEMENTS, data * LEAST_REGION), eighth) if apart else total
    parts: list[tuple[ParameterGroup, Named]] = []
    for group in groups:
        kinds: dict[tuple, Named] = {}
        for name, parameter in group.parameters:
            part = _shared_part(group, name, parameter, settings)
            kinds.setdefault((part, *_kind(group, parameter, data)), []).append((name, parameter))
        for parameters in kinds.values():
            size, room = parameters[0][1].numel(), most
            if group.rule.stacked:
                room = size * units_together(len(parameters), size, most, 2 * eighth, data * model)
            parts += [(group, part) for part in _split(parameters, room)]
    owned = _shared_out([part for group, part in parts if group.rule.stacked], data, model)
    buckets = [
        _stack(group, part, settings, owned[part[0][0]]) if group.rule.stacked else _flat(group, part, settings)
        for group, part in parts
    ]
    return buckets[::-1] if data > 1 else buckets


def _shared_part(group: ParameterGroup, name: str, parameter: Parameter, settings: Settings) -> int | None:
    """The module with which replicas share a parameter. Small parameters stay whole, and so do groups that hold the
    gradients of several steps."""
    large = parameter.ndim > 1 and (group.rule.stacked or parameter.numel() >= SMALL_ELEMENTS)
    return settings.parts.get(name) if large and group.every == 1 and settings.mesh.data.size > 1 else None


def _kind(group: ParameterGroup, parameter: Parameter, data: int) -> tuple:
    """Parameters of one kind can share a bucket."""
    sharding = sharding_of(parameter)
    common = (parameter.device, parameter.dtype, sharding is not None)
    if group.rule.stacked:
        return (*common, sharding and sharding.dim, *parameter.shape)
    return (*common, parameter[0].numel() if data > 1 and parameter.ndim > 1 else 1)


def _split(parameters: Named, most: int) -> list[Named]:
    """Splits parameters into consecutive parts of at most `most` elements, or of one parameter that is larger. They are
    in the model's order, so the backward pass completes the last part first."""
    parts: list[Named] = []
    for name, parameter in parameters:
        if not parts or sum(p.numel() for _, p in parts[-1]) + parameter.numel() > most:
            parts.append([])
        parts[-1].append((name, parameter))
    return parts


def _shared_out(stacks: Sequence[Named], replicas: int, shards: int) -> dict[str, Ownership]:
    """Ownership by the name of a stack's first parameter. A unit costs as much as its matrix products."""
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
    """Multiplications in the Gram matrices of the whole matrices."""
    sharding, shape = sharding_of(parameter), list(parameter.shape)
    if sharding is not None:
        shape[sharding.dim] *= shards
    return math.prod(shape) * min(shape[-2:])


def _stack(group: ParameterGroup, parameters: Named, settings: Settings, ownership: Ownership) -> Bucket:
    first = parameters[0][1]
    sharding = sharding_of(first)
    exchange = sharding.dim - first.ndim + 3 if sharding is not None else None  # a dim of (N, R, C)
    stack = Stack(ownership, first.shape, exchange, settings.mesh)
    return _bucket(group, parameters, settings, ownership.region, stack)


def _flat(group: ParameterGroup, parameters: Named, settings: Settings) -> Bucket:
    """A bucket of an elementwise rule: small, or cut into regions of whole rows."""
    first, replicas = parameters[0][1], settings.mesh.data.size
    small = replicas == 1 or sum(p.numel() for _, p in parameters) < SMALL_ELEMENTS
    alignment, width = (ALIGNMENT, 1) if small else (1, first[0].numel() if first.ndim > 1 else 1)
    elements = sum(_padded(p.numel(), alignment) for _, p in parameters)
    return _bucket(group, parameters, settings, _padded(-(-elements // (1 if small else replicas)), width), small=small)


@torch.no_grad()
def _bucket(
    group: ParameterGroup,
    parameters: Named,
    settings: Settings,
    region_elements: int,
    stack: Stack | None = None,
    small: bool = False,
) -> Bucket:
    """Moves the parameters into one buffer; makes masters and state for the part that this rank owns."""
    data = settings.mesh.data
    params = parameters[0][1].new_zeros(region_elements * (1 if small else data.size))
    begin = 0 if small else data.rank * region_elements
    end = begin + region_elements
    param_views = views_of(params, parameters, small)
    for (_, parameter), view in zip(parameters, param_views, strict=True):
        view.copy_(parameter)
        parameter.data = view
    part = _shared_part(group, *parameters[0], settings)
    region = params[begin:end] if part is None else params[begin:end].clone()
    apart = stack is not None and stack.ownership.moves  # a rank owns more than its region
    own = region if stack is None or apart else stack.of_replica(region, begin)
    owned = own if stack is None else stack.put_together(stack.of_replica(params) if apart else own)
    master_dtype = torch.promote_types(params.dtype, torch.float32)
    masters = owned.to(master_dtype, copy=apart or settings.on_cpu)
    update = partial(group.rule.update_, dtype=settings.dtype_ns)
    # Rules on stacks are mostly matrix products. On a CPU, compiling them saves less time in an hour of training than
    # it costs at the start. dynamic: one compilation serves all sizes.
    if settings.compile and not (group.rule.stacked and params.device.type == "cpu"):
        update = torch.compile(update, dynamic=True)
    grads = torch.zeros_like(params, dtype=master_dtype if settings.fp32_gradients else params.dtype)
    for _, parameter in parameters:
        parameter.grad_dtype = grads.dtype  # autograd accumulates in it
    grad_views = views_of(grads, parameters, small)
    share = None if part is None else Share(region, torch.zeros_like(region, dtype=grads.dtype), part)
    for buffer in (params, grads) if share else ():
        buffer.untyped_storage().resize_(0)
    state = group.rule.init_state(masters)
    if settings.on_cpu and params.device.type == "cuda":
        masters, state = masters.cpu().pin_memory(), {name: one.cpu().pin_memory() for name, one in state.items()}
    tensors = params, grads, param_views, grad_views, masters, state
    return Bucket(
        group, parameters, *tensors, update, settings.mesh, begin, end, small, stack, share, visits=settings.on_cpu
    )


def views_of(buffer: Tensor, parameters: Named, small: bool) -> list[Tensor]:
    """The parts of a bucket's buffer that belong to its parameters."""
    views, at = [], 0
    for _, parameter in parameters:
        views.append(buffer[at : at + parameter.numel()].view(parameter.shape))
        at += _padded(parameter.numel(), ALIGNMENT if small else 1)
    return views


def _padded(count: int, alignment: int) -> int:
    return -(-count // alignment) * alignment
