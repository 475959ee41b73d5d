"""The optimizer's driver: fp32 masters, sharded over the data group, and the bytes between them and the model.

An update rule sees tensors only; how they lie in memory, and who owns what, is decided in buckets.py. Gradients leave
for their owners while the backward pass of the last micro-batch still runs, one bucket after the other; the parameters
come back while the next bucket is updated. Parameters stay in the compute dtype; where that is not fp32 the masters
exist once more in fp32, else a parameter is its own master. On one process nothing travels.

Not a torch.optim.Optimizer: schedules come in as numbers. Every rank makes the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from quern.mesh import Mesh, Pending, alone
from quern.optim.groups import ParameterGroup
from quern.optim.schedule import Multipliers
from quern.parallel.buckets import Bucket, Settings, make_buckets
from quern.parallel.sharding import Slice


class Zero2:
    """Updates the parameters of `groups`, which become views into this object's buffers.

    Load weights, move the model to its device and cut it (parallel/plan.py) before this is made; afterwards change
    weights in place only, and through `load_state_tensors`. dtype_ns: dtype of Muon's matrix products (the machine's
    compute dtype). compile: run the update rules through torch.compile.
    """

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        *,
        dtype_ns: torch.dtype = torch.float32,
        compile: bool = False,
        mesh: Mesh | None = None,
    ) -> None:
        self.mesh = mesh or alone()
        self.compile = compile
        self.buckets = make_buckets(groups, Settings(self.mesh, dtype_ns, compile))
        if not self.buckets:
            raise ValueError("there is nothing to optimize: the groups hold no parameters")
        self._reduced = False
        self._left: list[int] = []
        """While the last micro-batch's backward runs: for each bucket, the parameters still without a gradient."""
        self._next = 0
        self._order = [number for number, bucket in enumerate(self.buckets) if not bucket.small]
        """In which buckets leave."""
        self._completed: list[int] | None = []
        """In which this rank's first backward pass completes them; None once the order is rank 0's."""
        self._small = _share_memory([bucket for bucket in self.buckets if bucket.small])
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, number, place))
            for number, bucket in enumerate(self.buckets if self.mesh.data.size > 1 else [])
            for place, (_, parameter) in enumerate(bucket.parameters)
        ]

    def close(self) -> None:
        """Lets go of the parameters, so that another optimizer can take them over."""
        for hook in self._hooks:
            hook.remove()

    # Gradients ------------------------------------------------------------------------------------------------

    def drop_grads(self) -> None:
        """Forgets all gradients, so that the next backward pass hands over its own instead of adding to zeros."""
        for bucket in self.buckets:
            for _, parameter in bucket.parameters:
                parameter.grad = None
        self._reduced = False

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        """Around the backward pass that completes the gradients: what is complete leaves at once for its owner."""
        self._left, self._next = [len(bucket.parameters) for bucket in self.buckets], 0
        if self._completed is not None:
            self._completed = []
        try:
            yield
        finally:
            self._left = []

    def _arrived(self, number: int, place: int, parameter: Parameter) -> None:
        """Autograd has accumulated a gradient: it moves into its buffer, and completes a bucket perhaps."""
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
        """Buckets leave in their order, whatever order they are completed in, so that all ranks agree."""
        while self._next < len(self._order) and not self._left[self._order[self._next]]:
            self.buckets[self._order[self._next]].reduce()
            self._next += 1

    def _agree(self) -> None:
        """Takes over the order in which rank 0 has completed buckets, if it has, so that from now on none waits for one
        that comes later. Which order it is changes no number."""
        if self._completed is not None:
            complete = len(self._completed) == len(self._order)
            order = self.mesh.world.broadcast_object(self._completed if complete else None)
            if order is not None:
                self._order, self._completed = order, None

    def _reduce(self) -> None:
        """All gradients summed over the data group, each at its owner. Raises ValueError naming silent parameters."""
        if self._reduced:
            return
        self._gather_grads()
        if self.mesh.data.size > 1:
            small = [self.mesh.data.all_reduce(buffer) for buffer in self._small]
            for number in self._order[self._next :]:
                self.buckets[number].reduce()
            _wait(small)
            for bucket in self.buckets:
                bucket.wait()
            self._agree()
        self._next = 0
        self._reduced = True

    def _gather_grads(self) -> None:
        """Makes every `.grad` the view of its buffer, copying what autograd put elsewhere."""
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

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """The global 2-norm of all gradients: fp32, 0-dim; not finite when any of them is not, on any rank."""
        self._reduce()
        norms = [
            torch.linalg.vector_norm(bucket.region_grads, dtype=torch.float32)
            for bucket in self.buckets
            if self._counts(bucket)
        ]
        norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
        if self.mesh.world.size == 1:
            return norm
        square = norm.square().to(self.buckets[0].params.device)
        self.mesh.world.all_reduce(square).wait()
        return square.sqrt()

    def _counts(self, bucket: Bucket) -> bool:
        """Whether this rank's copy is the one of several equal ones that enters the norm."""
        first_copy = not bucket.small or self.mesh.data.rank == 0
        return first_copy and (not bucket.replicated or self.mesh.model.rank == 0)

    @torch.no_grad()
    def clip_grads(self, max_norm: float, norm: Tensor | None = None) -> Tensor:
        """Scales all gradients so that their global norm is at most max_norm; returns the norm from before.

        norm: `grad_norm()`'s result, if it was already computed for these gradients.
        """
        norm = self.grad_norm() if norm is None else norm
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for bucket in self.buckets:
            bucket.region_grads.mul_(scale)
        return norm

    # Updates --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, step: int, multipliers: Multipliers) -> None:
        """One update from the gradients at hand, which are used up: drop them before the next backward pass.

        step: how many updates were made before this one.
        """
        self._reduce()
        self._reduced = False
        before: Bucket | None = None
        self.buckets[0].fetch()
        for number, bucket in enumerate(self.buckets, start=1):
            if number < len(self.buckets):
                self.buckets[number].fetch()
            scalars = bucket.rule.scalars(step + 1, bucket.lr * multipliers.lr, multipliers.momentum, multipliers.decay)
            if self.compile:  # as tensors: a changed Python number would compile the update anew
                bucket.apply({name: torch.tensor(value, dtype=torch.float64) for name, value in scalars.items()})
            else:
                bucket.apply(scalars)
            if before is not None:
                before.gather()
            before = bucket if bucket.moves else None  # while its matrices travel, the next ones are updated
        if before is not None:
            before.gather()
        for bucket in self.buckets:
            bucket.wait()

    # State ----------------------------------------------------------------------------------------------------

    def slices(self) -> dict[str, Slice]:
        """Masters and state that this rank holds, by logical name ("master.<parameter>", "m.<parameter>"): over all
        ranks, all that a resume needs.

        The tensors are views of the live buffers: copy what must outlive the next step. The parameters themselves are
        the masters rounded to their dtype.
        """
        return {name: part for bucket in self.buckets for name, part in bucket.slices().items()}

    def state_tensors(self) -> dict[str, Tensor]:
        """`slices` as whole tensors. Raises ValueError unless one process holds everything."""
        slices = self.slices()
        cut = [name for name, part in slices.items() if part.tensor.shape != part.whole]
        if cut or self.mesh.world.size > 1:
            raise ValueError("the state is spread over several processes: read it by `slices`")
        return {name: part.tensor for name, part in slices.items()}

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores whole logical tensors, bit for bit, each rank its slices, and the parameters from the masters.

        Raises ValueError, before anything is changed, when a tensor is missing, has another shape or is one
        too many."""
        own = self.slices()
        problems = [f"missing: {name}" for name in own if name not in tensors]
        if self.mesh.world.size == 1:
            problems += [f"unknown: {name}" for name in tensors if name not in own]
        for name in own.keys() & tensors.keys():
            if own[name].whole != tuple(tensors[name].shape):
                problems.append(f"{name} is {tuple(tensors[name].shape)}, not {own[name].whole}")
        if problems:
            more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise ValueError(
                f"the optimizer state does not fit this model ({'; '.join(sorted(problems)[:5])}{more}): "
                "resume with the recipe that wrote it"
            )
        for name, part in own.items():
            part.tensor.copy_(part.of(tensors[name]))
        for bucket in self.buckets:
            bucket.round_masters()
        for bucket in self.buckets:
            bucket.wait()


def _share_memory(buckets: Sequence[Bucket]) -> list[Tensor]:
    """Moves the small buckets' gradients into one buffer for each dtype and device, which travels in one call."""
    kinds: dict[tuple, list[Bucket]] = {}
    for bucket in buckets:
        kinds.setdefault((bucket.grads.dtype, bucket.grads.device), []).append(bucket)
    shared = []
    for members in kinds.values():
        buffer = torch.cat([bucket.grads for bucket in members])
        for bucket, part in zip(members, buffer.split([len(b.grads) for b in members]), strict=True):
            views = [view.storage_offset() - bucket.params.storage_offset() for view in bucket.param_views]
            bucket.grads = part
            bucket.grad_views = [
                part[at : at + view.numel()].view(view.shape)
                for at, view in zip(views, bucket.param_views, strict=True)
            ]
        shared.append(buffer)
    return shared


def _wait(pending: Sequence[Pending]) -> None:
    for one in pending:
        one.wait()
