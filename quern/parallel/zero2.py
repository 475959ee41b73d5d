"""The optimizer's driver: fp32 masters sharded over the data group, and the communication between them and the model.

During the backward pass of the last micro-batch, each bucket's gradients are reduced as soon as they are complete. The
parameters of a bucket are gathered while the next one is updated. A group that is updated every n-th step keeps its
gradients on the other steps; the gradient norm covers the groups that the step updates. This is no
torch.optim.Optimizer: schedules come in as numbers. Every rank makes the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter

from quern.mesh import Mesh, alone
from quern.optim.groups import ParameterGroup
from quern.optim.schedule import Multipliers
from quern.parallel.buckets import Bucket, Settings, make_buckets, views_of
from quern.parallel.sharding import Slice, Stack, sharding_of, sliced


class Zero2:
    """Updates the parameters of `groups`, which become views into this object's buffers.

    Load weights, move the model to its device and shard it (parallel/plan.py) before the construction. Afterwards
    change weights in place only, and through `load_state_tensors`.

    Args:
        groups: The result of `make_groups`.
        mesh: The ranks; None is this process alone.
        options: The other fields of `buckets.Settings`.
    """

    fetched_ahead: ClassVar[int] = 1
    """Number of buckets whose matrices are on their way to their owners while a bucket is updated."""

    def __init__(self, groups: Sequence[ParameterGroup], mesh: Mesh | None = None, **options: Any) -> None:
        settings = Settings(mesh or alone(), **options)
        self.mesh, self.compile = settings.mesh, settings.compile
        self.buckets = make_buckets(groups, settings)
        if not self.buckets:
            raise ValueError("there is nothing to optimize: the groups hold no parameters")
        self._reduced = False
        self._left: list[int] = []
        """During the last backward pass: for each bucket, how many parameters have no gradient yet."""
        self._next = 0
        self._order = [
            number for number, bucket in enumerate(self.buckets) if not bucket.small and bucket.share is None
        ]
        """The order in which buckets are reduced."""
        self._completed: list[int] | None = []
        """The order in which this rank's first backward pass completes buckets; None once `_order` is rank 0's."""
        self._small = _share_memory([bucket for bucket in self.buckets if bucket.small])
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, number, place))
            for number, bucket in enumerate(self.buckets if self.mesh.data.size > 1 else [])
            for place, (_, parameter) in enumerate(bucket.parameters)
        ]

    def close(self) -> None:
        """Releases the parameters, so that another optimizer can take them."""
        for hook in self._hooks:
            hook.remove()

    # Gradients ------------------------------------------------------------------------------------------------

    def drop_grads(self) -> None:
        """Drops the gradients of this step; the next backward pass then hands over its own instead of adding."""
        for bucket in self.buckets:
            for _, parameter in bucket.parameters:
                parameter.grad = None
        self._reduced = False

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        """Wraps the backward pass that completes the gradients: complete buckets are reduced at once."""
        self._left, self._next = [len(bucket.parameters) for bucket in self.buckets], 0
        if self._completed is not None:
            self._completed = []
        try:
            yield
        finally:
            self._left = []

    def _arrived(self, number: int, place: int, parameter: Parameter) -> None:
        """Autograd's hook: moves a gradient into its buffer, and reduces the buckets that are complete."""
        view = self.buckets[number].grad_views[place]
        if parameter.grad is not view:
            assert parameter.grad is not None
            view.copy_(parameter.grad)
            parameter.grad = view
        if self._left:
            self._left[number] -= 1
            if self._completed is not None and not self._left[number] and not self.buckets[number].small:
                self._completed.append(number)
            self._launch()

    def _launch(self) -> None:
        """Reduces buckets in their order, whatever the order of completion, so that all ranks agree."""
        while self._next < len(self._order) and not self._left[self._order[self._next]]:
            bucket = self.buckets[self._order[self._next]]
            if bucket.due:
                bucket.reduce()
            self._next += 1

    def _agree(self) -> None:
        """Adopts the order in which rank 0 completed its buckets, if it did: then no complete bucket waits for a later
        one. The order changes no number."""
        if self._completed is not None:
            complete = len(self._completed) == len(self._order)
            order = self.mesh.world.broadcast_object(self._completed if complete else None)
            if order is not None:
                self._order, self._completed = order, None

    def _reduce(self) -> None:
        """Sums the gradients that are due over the data group. Raises ValueError naming parameters without one."""
        if self._reduced:
            return
        self._gather_grads()
        alone = self.mesh.data.size == 1
        for bucket in self.buckets:
            if bucket.due and (bucket.small or alone):
                bucket.add_held()
        if not alone:
            small = [self.mesh.data.all_reduce(buffer) for buffer, bucket in self._small if bucket.due]
            for number in self._order[self._next :]:
                if self.buckets[number].due:
                    self.buckets[number].reduce()
            for pending in (*small, *self.buckets):
                pending.wait()
            self._agree()
        self._next = 0
        self._reduced = True

    def _gather_grads(self) -> None:
        """Makes every `.grad` the view of its buffer; copies gradients that autograd put elsewhere."""
        buckets = [bucket for bucket in self.buckets if bucket.share is None]
        refuse_silent([name for bucket in buckets for name, p in bucket.parameters if p.grad is None])
        for bucket in buckets:
            for (_, parameter), view in zip(bucket.parameters, bucket.grad_views, strict=True):
                grad = parameter.grad
                if grad is not None and grad is not view:
                    view.copy_(grad)
                    parameter.grad = view

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """The global 2-norm of the gradients that this step uses: fp32, 0-dim.

        Not finite when any gradient is not, on any rank, also gradients of groups that this step does not update.
        """
        self._reduce()
        norms = []
        for bucket in self.buckets:
            if not bucket.due:  # adds 0, or NaN
                norms.append(0 * torch.linalg.vector_norm(bucket.grads, dtype=torch.float32))
            elif bucket.first_copy:
                norms.append(torch.linalg.vector_norm(bucket.region_grads, dtype=torch.float32))
        norm = torch.linalg.vector_norm(torch.stack(norms or [torch.zeros((), device=self.buckets[0].params.device)]))
        if self.mesh.world.size == 1:
            return norm
        square = norm.square()
        self.mesh.world.all_reduce(square).wait()
        return square.sqrt()

    @torch.no_grad()
    def clip_grads(self, max_norm: float, norm: Tensor) -> None:
        """Scales the gradients that this step uses from their global norm, of `grad_norm()`, to at most `max_norm`."""
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for bucket in self.buckets:
            if bucket.due:
                bucket.region_grads.mul_(scale)

    # Updates --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, step: int, multipliers: Multipliers) -> None:
        """Updates the groups that are due, after `step` updates, and holds the gradients of the others.

        The gradients are used up: drop them before the next backward pass. Raises ValueError for a multiplier of a
        group that does not exist.
        """
        factors = multipliers.groups or {}
        if unknown := factors.keys() - (names := {bucket.group.name for bucket in self.buckets}):
            raise ValueError(f"the schedule has factors for {sorted(unknown)}: the model's groups are {sorted(names)}")
        self._reduce()
        self._reduced = False
        due = [bucket for bucket in self.buckets if bucket.due]
        for bucket in self.buckets:
            if not bucket.due:
                bucket.hold()
        before: Bucket | None = None
        for bucket in due[: self.fetched_ahead]:
            bucket.fetch()
        for number, bucket in enumerate(due, start=self.fetched_ahead):
            for following in due[number : number + 1]:
                following.fetch()
            group = bucket.group
            lr = group.lr * multipliers.lr * factors.get(group.name, 1.0)
            scalars = group.rule.scalars(step // group.every + 1, lr, multipliers.momentum, multipliers.decay)
            if self.compile:  # as tensors: a changed Python number would compile the update again
                bucket.apply({name: torch.tensor(value, dtype=torch.float64) for name, value in scalars.items()})
            else:
                bucket.apply(scalars)
            if before is not None:
                before.gather()
            # The next bucket is updated while the matrices of this one travel.
            before = bucket if bucket.moves and bucket.share is None else None
        if before is not None:
            before.gather()
        for bucket in due:
            bucket.wait()

    # State ----------------------------------------------------------------------------------------------------

    def slices(self) -> dict[str, Slice]:
        """The masters and state that this rank holds, by logical name ("master.<parameter>", "m.<parameter>").

        Over all ranks, a resume needs no more. The tensors are views of the live buffers; copy what must outlive the
        next step.
        """
        device = self.buckets[0].params.device
        if device.type == "cuda" and any(bucket.visits for bucket in self.buckets):
            torch.cuda.current_stream(device).synchronize()  # masters and state on their way to the CPU
        return {name: part for bucket in self.buckets for name, part in _slices_of(bucket).items()}

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, Tensor], *, weights_alone: bool = False) -> None:
        """Restores this rank's part of whole logical tensors, bit for bit, and sets the parameters from the masters.

        Held gradients of another number of replicas are summed. weights_alone: restores the masters only; held
        gradients are dropped, and the other state begins anew. Every rank calls this. If a tensor is missing, unknown
        or of another shape, every rank raises ValueError and changes nothing.
        """
        kinds = "master." if weights_alone else ""
        held = [(bucket.held, bucket.held_steps) for bucket in self.buckets]
        for bucket in self.buckets:
            count = None if weights_alone else tensors.get(f"held_steps.{bucket.parameters[0][0]}")
            bucket.held_steps = 0 if count is None else int(count)
            bucket.held = None if count is None else torch.zeros_like(bucket.grads)
        tensors = {
            name: _of_replicas(tensor, self.mesh.data.size) if name.startswith("held.") else tensor
            for name, tensor in tensors.items()
            if name.startswith(kinds)
        }
        expected = {name for bucket in self.buckets for name in _names_of(bucket) if name.startswith(kinds)}
        own = {name: part for name, part in self.slices().items() if name in expected}
        problems = [f"missing: {name}" for name in expected - tensors.keys()]
        problems += [f"unknown: {name}" for name in tensors.keys() - expected]
        for name in own.keys() & tensors.keys():
            if own[name].whole != tuple(tensors[name].shape):
                problems.append(f"{name} is {tuple(tensors[name].shape)}, not {own[name].whole}")
        # A rank checks the shapes of what it owns, and all must raise: one that went on would wait for the others.
        problems = sorted({problem for several in self.mesh.world.gather_objects(problems) for problem in several})
        if problems:
            for bucket, before in zip(self.buckets, held, strict=True):
                bucket.held, bucket.held_steps = before
            more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise ValueError(
                f"the optimizer state does not fit this model ({'; '.join(problems[:5])}{more}): "
                "resume with the recipe that wrote it"
            )
        for name, part in own.items():
            part.tensor.copy_(part.of(tensors[name]))
        for bucket in self.buckets:
            if weights_alone:
                for name, fresh in bucket.rule.init_state(bucket.masters).items():  # may be of the weights, as MuonH's
                    bucket.state[name].copy_(fresh)
            bucket.round_masters()
        for bucket in self.buckets:
            bucket.wait()


def refuse_silent(names: Sequence[str]) -> None:
    """Raises ValueError naming parameters without a gradient."""
    if names:
        raise ValueError(f"no gradient reached {', '.join(names)}: run backward first, or remove them if unused")


def _of_replicas(sums: Tensor, replicas: int) -> Tensor:
    """Held gradients, one sum for each replica along the first dim, for another number of replicas."""
    if len(sums) == replicas:
        return sums
    return torch.cat([sums.sum(0, keepdim=True), sums.new_zeros(replicas - 1, *sums.shape[1:])])


def _share_memory(buckets: Sequence[Bucket]) -> list[tuple[Tensor, Bucket]]:
    """Moves the gradients of small buckets into few buffers, which one all-reduce each sums; one of its buckets stands
    for the dtype, device and cadence of a buffer."""
    kinds: dict[tuple, list[Bucket]] = {}
    for bucket in buckets:
        kinds.setdefault((bucket.grads.dtype, bucket.grads.device, bucket.group.every), []).append(bucket)
    shared = []
    for members in kinds.values():
        buffer = torch.cat([bucket.grads for bucket in members])
        for bucket, part in zip(members, buffer.split([len(b.grads) for b in members]), strict=True):
            bucket.grads, bucket.grad_views = part, views_of(part, bucket.parameters, small=True)
        shared.append((buffer, members[0]))
    return shared


# The part of a bucket's state that a rank holds, as slices of logical tensors -------------------------------------


def _slices_of(bucket: Bucket) -> dict[str, Slice]:
    """This rank's slices of masters and state, by logical name. Held gradients are in "held.<parameter>", with one
    entry per replica along the first dim, and their number in "held_steps.<parameter>"."""
    found = {} if bucket.held is None else _held_slices(bucket, bucket.held)
    for kind, buffer in {"master": bucket.masters, **bucket.state}.items():
        parts = _row_slices(bucket, buffer) if bucket.stack is None else _stack_slices(bucket, bucket.stack, buffer)
        found |= {f"{kind}.{name}": part for name, part in parts}
    return found


def _names_of(bucket: Bucket) -> list[str]:
    """The logical names of a bucket's tensors, of all ranks."""
    kinds = ["master", *bucket.state, *(() if bucket.held is None else ("held", "held_steps"))]
    return [f"{kind}.{name}" for kind in kinds for name, _ in bucket.parameters]


def _held_slices(bucket: Bucket, held: Tensor) -> dict[str, Slice]:
    """Each replica's own sum, so that a resumed run adds the same numbers in the same order."""
    data, found = bucket.mesh.data, {}
    for (name, parameter), view in zip(bucket.parameters, bucket.param_views, strict=True):
        own = held.as_strided(view.shape, view.stride(), view.storage_offset())
        saved = not bucket.replicated or bucket.mesh.model.rank == 0
        part = sliced(own, sharding_of(parameter), 0, len(own), saved=saved)
        found[f"held_steps.{name}"] = Slice(torch.tensor([bucket.held_steps]), (0,), (1,), bucket.mesh.main)
        if part is not None:
            offsets, whole = (data.rank, *part.offsets), (data.size, *part.whole)
            found[f"held.{name}"] = replace(part, tensor=part.tensor[None], offsets=offsets, whole=whole)
    return found


def _stack_slices(bucket: Bucket, stack: Stack, buffer: Tensor) -> list[tuple[str, Slice]]:
    """Whole parameters; each is one matrix or several."""
    parts = buffer.view(len(stack.units), *stack.shape[:-2], *buffer.shape[1:])
    return [
        (bucket.parameters[unit][0], Slice(part, (0,) * part.ndim, tuple(part.shape), bucket.first_copy))
        for unit, part in zip(stack.units, parts, strict=True)
    ]


def _row_slices(bucket: Bucket, buffer: Tensor) -> list[tuple[str, Slice]]:
    """The rows of each parameter that are in the region."""
    found = []
    for (name, parameter), view in zip(bucket.parameters, bucket.param_views, strict=True):
        start = view.storage_offset() - bucket.params.storage_offset()
        width = parameter.shape[1:].numel()
        rows = parameter.numel() // width
        low = max(0, -(-(bucket.begin - start) // width))
        high = min(rows, (bucket.end - start) // width)
        if low >= high:
            continue
        at = start + low * width - bucket.begin
        part = buffer[at : at + (high - low) * width].view(high - low, *parameter.shape[1:])
        if (whole := sliced(part, sharding_of(parameter), low, rows, saved=bucket.first_copy)) is not None:
            found.append((name, whole))
    return found
