"""ZeRO, stage 3: replicas share parameters and gradients too, and gather a module's parameters when it computes.

docs/parallelism.md, "When each byte moves", shows a pass. The modules are the blocks, the tables of embeddings and the
head (`parts_of`); the rest is as in zero2.py. Gradients of micro-batches add up in the region. The calls of one pass
predict the calls of the next; in the first pass nothing is gathered ahead. An autograd graph refers to the memory of
parameters, not to their numbers: it is freed and allocated again under the tensors (as in FSDP, arXiv 2304.11277). All
replicas must run equally many passes. Before the update, matrices travel to their owners all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

from quern.kernels.softcap import has_kernel
from quern.mesh import Pending
from quern.model.base import wrap_calls
from quern.model.layers import Embedding
from quern.optim.groups import ParameterGroup
from quern.parallel.buckets import Bucket
from quern.parallel.plan import refuse_tied
from quern.parallel.tensor import VocabularyEmbedding
from quern.parallel.zero2 import Zero2, refuse_silent


class Part:
    """A module whose parameters are gathered together, and are whole from `gather` to `free`. again: its backward pass
    needs them too."""

    def __init__(self, name: str, module: nn.Module, again: bool) -> None:
        self.name, self.module, self.again = name, module, again
        self.buckets: list[Bucket] = []
        self._pending: list[Pending] | None = None
        self.in_backward = False
        self.without_gradient = 0
        """Number of parameters that have no gradient yet in a backward pass."""

    def gather(self) -> None:
        """Starts to gather, unless the parameters are there."""
        if self._pending is None:
            self._pending = []
            for bucket in self.buckets:
                allocate(bucket.params)
                self._pending.append(bucket.mesh.data.all_gather(bucket.params, bucket.region_params))

    def wait(self) -> None:
        for pending in self._pending or ():
            pending.wait()

    def free(self) -> None:
        self.wait()  # gathered ahead, and not used
        for bucket in self.buckets:
            bucket.params.untyped_storage().resize_(0)
        self._pending, self.in_backward = None, False
        self.without_gradient = sum(len(bucket.parameters) for bucket in self.buckets)


def parts_of(model: Any) -> list[Part]:
    """The blocks, the tables outside of them, and the head last."""
    blocks = [Part(f"blocks.{layer}", block, True) for layer, block in enumerate(model.blocks)]
    tables = [
        Part(name, module, False)
        for name, module in model.named_modules()
        if isinstance(module, Embedding | VocabularyEmbedding) and not name.startswith("blocks.")
    ]
    return [*blocks, *tables, Part("head", model.head, False)]


def numbers_of(parts: Sequence[Part]) -> dict[str, int]:
    """Returns the number of its part for each parameter of the parts."""
    return {
        f"{part.name}.{name}": number for number, part in enumerate(parts) for name, _ in part.module.named_parameters()
    }


def allocate(buffer: Tensor) -> None:
    buffer.untyped_storage().resize_(buffer.numel() * buffer.itemsize)


class Zero3(Zero2):
    """Updates the parameters of `groups`, and wraps the modules of `model`, which is compiled already, to gather
    theirs. Raises ValueError for a cap without a kernel, whose loss keeps the head for its backward pass, and for
    modules that share a parameter."""

    fetched_ahead = 1_000_000  # all

    def __init__(self, model: Any, groups: Sequence[ParameterGroup], **options: Any) -> None:
        refuse_tied(model, "--zero 2")
        if not has_kernel(model.cap):
            raise ValueError(f"--zero 3 needs a cap that the loss kernel knows, not {model.cap}: use --zero 2")
        self.parts = parts_of(model)
        super().__init__(groups, parts=numbers_of(self.parts), **options)
        for bucket in self.buckets:
            if bucket.share is not None:
                self.parts[bucket.share.part].buckets.append(bucket)
        self._calls: list[Part] = []
        """The current pass: its parts in the order of their calls, calls of the backward pass included."""
        self._records = False
        self._earlier: dict[bool, list[Part]] = {True: [], False: []}
        """The last pass with gradients, and the last one without."""
        self._sent: tuple[Bucket, Tensor, Pending] | None = None
        self._restore: list[Callable[[], object]] = []
        for part in self.parts:
            part.free()
            self._wrap(model, part)
        self._hooks.append(model.register_forward_pre_hook(self._begin))

    def close(self) -> None:
        super().close()
        for restore in self._restore:
            restore()
        for part in self.parts:
            part.gather()
            part.wait()

    # Parameters -----------------------------------------------------------------------------------------------

    def _wrap(self, model: Any, part: Part) -> None:
        """Wraps a part's module until `close`."""
        if part.again:
            self._restore.append(wrap_calls(part.module, partial(self._call_block, part)))
        elif part.module is model.head:  # not called: its weight is used in two methods of the model
            before = model.loss, model.logits
            model.loss, model.logits = (partial(self._call_head, part, call) for call in before)
            self._restore.append(partial(vars(model).update, {"loss": before[0], "logits": before[1]}))
        else:  # a table may be called within compiled code, which runs hooks, but no other wrapper
            disable: Any = torch.compiler.disable
            enter, leave = (disable(partial(hook, part)) for hook in (self._enter, self._leave))
            self._hooks.append(part.module.register_forward_pre_hook(enter))
            self._hooks.append(part.module.register_forward_hook(leave))

    def _begin(self, model: nn.Module, arguments: Any) -> None:
        """A new pass."""
        self._free()
        self._earlier[self._records], self._calls = self._calls, []
        self._records = torch.is_grad_enabled()

    def _free(self) -> None:
        for part in self.parts:
            part.free()

    def _call_block(self, part: Part, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._enter(part)
        result = call(*args, **kwargs)
        for tensor in tree_leaves(result) if torch.is_grad_enabled() else ():
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(partial(self._enter_backward, part))
        self._leave(part)
        return result

    def _call_head(self, part: Part, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._receive()  # the forward pass has hidden the last sum of the micro-batch before
        self._enter(part)
        result = call(*args, **kwargs)
        self._leave(part)
        return result

    def _enter(self, part: Part, *_: Any) -> None:
        """Before a part computes."""
        part.gather()
        self._calls.append(part)
        if (following := self._expected(after=0)) is not None:
            following.gather()
        part.wait()

    def _leave(self, part: Part, *_: Any) -> None:
        """After a part has computed. The last block stays for its backward pass, which comes after the head."""
        if self._expected(after=1) is not part:
            part.free()

    def _expected(self, after: int) -> Part | None:
        """The part that is called next, or `after` calls later, if this pass goes as the one before."""
        earlier, now = self._earlier[self._records], len(self._calls)
        if now + after >= len(earlier) or earlier[now - 1] is not self._calls[-1]:
            return None
        return earlier[now + after]

    def _enter_backward(self, part: Part, grads: Any) -> None:
        if not part.in_backward:  # the first of its results
            part.in_backward = True
            self._enter(part)

    # Gradients ------------------------------------------------------------------------------------------------

    def drop_grads(self) -> None:
        super().drop_grads()
        self._receive()
        for bucket in self.buckets:
            if bucket.share is not None:
                bucket.grads.untyped_storage().resize_(0)
                bucket.share.arrived.clear()
                bucket.share.summed = False

    def _arrived(self, number: int, place: int, parameter: Parameter) -> None:
        bucket = self.buckets[number]
        if bucket.share is None:
            super()._arrived(number, place, parameter)
            return
        assert parameter.grad is not None
        if not bucket.share.arrived:
            allocate(bucket.grads)
            bucket.grads.zero_()  # padding too
        bucket.grad_views[place].add_(parameter.grad)
        parameter.grad = None
        bucket.share.arrived.add(place)
        if len(bucket.share.arrived) == len(bucket.parameters):
            self._send(bucket)
        part = self.parts[bucket.share.part]
        part.without_gradient -= 1
        if not part.without_gradient:
            part.free()

    def _send(self, bucket: Bucket) -> None:
        """Starts to sum a bucket's gradients over the replicas."""
        self._receive()
        assert bucket.share is not None
        own = torch.empty_like(bucket.share.grads) if bucket.share.summed else bucket.share.grads
        self._sent = bucket, own, bucket.mesh.data.reduce_scatter(own, bucket.grads)

    def _receive(self) -> None:
        """Ends what `_send` began."""
        if self._sent is None:
            return
        (bucket, own, pending), self._sent = self._sent, None
        pending.wait()
        assert bucket.share is not None
        if bucket.share.summed:
            bucket.share.grads.add_(own)
        bucket.share.summed = True
        bucket.share.arrived.clear()
        bucket.grads.untyped_storage().resize_(0)

    def _reduce(self) -> None:
        if not self._reduced:
            self._receive()
            shares = [(bucket, bucket.share) for bucket in self.buckets if bucket.share is not None]
            refuse_silent(
                [
                    name
                    for bucket, share in shares
                    for place, (name, _) in enumerate(bucket.parameters)
                    if not share.summed and place not in share.arrived
                ]
            )
            for bucket, share in shares:
                if share.arrived:  # the last micro-batch did not use all of them
                    self._send(bucket)
            self._receive()
        super()._reduce()

    # Updates --------------------------------------------------------------------------------------------------

    def step(self, *args: Any, **kwargs: Any) -> None:
        self._free()  # the numbers will be others
        super().step(*args, **kwargs)

    def load_state_tensors(self, *args: Any, **kwargs: Any) -> None:
        self._free()
        super().load_state_tensors(*args, **kwargs)
