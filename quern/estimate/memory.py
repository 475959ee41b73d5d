"""Memory of one rank of a layout, by category, in bytes, predicted without running the model.

Parameters, gradients, masters and moments are the optimizer's buffers (buckets.py), padding included, on the rank that
owns most. Activations come from a forward pass of the largest micro-batch on the "meta" device: the sum of what
autograd keeps. A compiled model keeps the operands and results of matrix products and attention, in the dtype in which
they were made, and computes pointwise results again (`Origins`). Of the blocks that run again in the backward pass
(model/base.py), the inputs stay, and in that pass the activations of one of them. Where replicas share parameters
(zero3.py), two of their modules are whole at a time, and in the backward pass the gradients of a bucket that is filled
and of one that is sent. The peak of a step is

    buffers + max(activations + gradients in flight + whole + max(loss, again + sent), gradients in flight at the end of
                  backward + again, update)

Gradients in flight are autograd's own, until they are copied into the buffers: with replicas the largest one, on one
replica all of them, through all micro-batches; a single micro-batch has none before its backward pass. The loss is the
memory of its chunks (kernels/cross_entropy.py). The update is the memory that the rule of the largest bucket needs
beside its buffers. Not counted: the interpreter and its libraries, a GPU's context, freed blocks that allocators keep
(on a CPU a third and more: machine.keep_freed_memory), and FP8's second copies.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from quern import compiler
from quern.estimate.layout import Layout
from quern.kernels.attention.attend import attend_in_blocks
from quern.kernels.attention.flash import flash_attention
from quern.kernels.cross_entropy import COMPILED, TRITON
from quern.kernels.softcap import has_kernel
from quern.model.base import wrap_calls
from quern.optim.groups import dry_run
from quern.parallel.buckets import Bucket

LOOKUPS = (torch.ops.aten.embedding, torch.ops.aten.index)


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, by the categories above. again: activations of one block that runs again; whole: gathered
    parameters; sent: gradients that replicas do not keep; in_flight: gradients; accumulates: over several
    micro-batches; away: masters and moments in a CPU's memory, beside a GPU."""

    parameters: int
    gradients: int
    masters: int
    moments: int
    activations: int
    again: int
    whole: int
    sent: int
    loss: int
    in_flight: int
    update: int
    accumulates: bool
    away: int = 0

    @property
    def buffers(self) -> int:
        return self.parameters + self.gradients + self.masters + self.moments

    @property
    def peak(self) -> int:
        during = self.activations + self.whole + max(self.loss, self.again + self.sent)
        during += self.in_flight if self.accumulates else 0
        return self.buffers + max(during, self.in_flight + self.again, self.update)


def memory(layout: Layout, device: str, compiled: bool, traced: Activations | None = None) -> Memory:
    """Predicts the memory of the rank that owns most, in a step of the recipe's batch. device: "cpu" or "cuda", which
    keep different tensors; traced: the result of `activations` for this layout, if it is known."""
    traced = traced or activations(layout, device, compiled)
    gradients = [p.numel() * layout.buckets[0].grads.itemsize for p in layout.shard.parameters()]
    held = [(bucket.share or bucket, bucket.group.every) for bucket in layout.buckets]
    masters, moments = _owned(layout, layout.buckets)
    away = masters + moments if device == "cuda" and layout.recipe.train.optimizer_memory == "cpu" else 0
    most_rows, context = max(layout.micro_batches), layout.recipe.model.context
    recomputed = layout.recipe.train.recompute
    return Memory(
        parameters=sum(one.params.nbytes for one, _ in held),
        gradients=sum(one.grads.nbytes * (1 if every == 1 else 2) for one, every in held),
        masters=0 if away else masters,
        moments=0 if away else moments,
        activations=most_rows * traced.kept(recomputed),
        again=most_rows * traced.again(recomputed),
        whole=_whole(layout),
        sent=_sent(layout, max(gradients)),
        loss=_loss(layout, most_rows * context, device, compiled),
        in_flight=sum(gradients) if layout.dp == 1 else max(gradients),
        update=_update(layout, compiled),
        accumulates=len(layout.micro_batches) > 1,
        away=away,
    )


def _owned(layout: Layout, buckets: Sequence[Bucket]) -> tuple[int, int]:
    """Bytes of masters and of moments of some buckets, on the rank that owns most."""
    masters, moments = [0] * (layout.dp * layout.tp), [0] * (layout.dp * layout.tp)
    for bucket in buckets:
        # Parameters in fp32 are their own masters.
        same = bucket.masters.untyped_storage()._cdata == bucket.region_params.untyped_storage()._cdata
        unit = bucket.masters.new_empty(1, *bucket.masters.shape[1:])
        state = sum(one.nbytes for one in bucket.rule.init_state(unit).values())
        for rank, count in enumerate(owned_counts(bucket, layout)):
            masters[rank] += 0 if same else unit.nbytes * count
            moments[rank] += state * count
    return max(zip(masters, moments, strict=True), key=sum)


def owned_counts(bucket: Bucket, layout: Layout) -> list[int]:
    """Counts the masters of each rank, along their first dim."""
    if bucket.stack is None:
        return [len(bucket.masters)] * (layout.dp * layout.tp)
    ownership, several = bucket.stack.ownership, bucket.stack.shape[:-2].numel()
    copies = layout.tp // ownership.shards
    return [
        count * several for replica in range(layout.dp) for count in ownership.counts(replica) for _ in range(copies)
    ]


def _whole(layout: Layout) -> int:
    """The most bytes of parameters that replicas share, while whole: the last block and the head, or two blocks."""
    sizes = [0] * len(layout.parts)
    for bucket in layout.buckets:
        if bucket.share is not None:
            sizes[bucket.share.part] += bucket.params.nbytes
    blocks = [size for size, part in zip(sizes, layout.parts, strict=True) if part.again]
    return max((sum(pair) for pair in [*pairwise(blocks), (*blocks[-1:], *sizes[-1:])]), default=0)


def _sent(layout: Layout, largest: int) -> int:
    """The most bytes of gradients that replicas do not keep: one that autograd hands over, and two buckets."""
    sizes = sorted(bucket.grads.nbytes for bucket in layout.buckets if bucket.share is not None)
    return largest + sum(sizes[-2:]) if sizes else 0


# Activations ------------------------------------------------------------------------------------------------


Sizes = dict[int, int]  # storage → bytes


@dataclass(frozen=True)
class Activations:
    """The tensors that autograd keeps of one row's forward pass, up to the head. inputs: the arguments of each block;
    inside: what each block keeps for its backward pass; outside: what is kept between the blocks."""

    inputs: list[Sizes]
    inside: list[Sizes]
    outside: Sizes

    def kept(self, recomputed: int) -> int:
        """Bytes from the forward to the backward pass, if the first blocks keep their inputs only."""
        kept: Sizes = dict(self.outside)
        for sizes in self.inputs[:recomputed] + self.inside[recomputed:]:
            kept |= sizes
        return sum(kept.values())

    def again(self, recomputed: int) -> int:
        """Bytes of the largest of the blocks that run again, beside its arguments."""
        blocks = zip(self.inside[:recomputed], self.inputs, strict=False)
        return max((sum(inside[at] for at in inside.keys() - inputs.keys()) for inside, inputs in blocks), default=0)


def activations(layout: Layout, device: str, compiled: bool) -> Activations:
    """Counts what autograd keeps of one row. Raises RuntimeError when the model cannot run on the "meta" device."""
    tokens_BT = torch.empty(1, layout.recipe.model.context, dtype=torch.int64, device="meta")
    model = layout.shard
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):  # a constant that the module keeps beside its parameters
                setattr(module, name, value.to("meta"))
    context = model.context(tokens_BT, 1.0)
    # `attend` would choose neither for tensors on "meta". One GPU kernel stands for all: none keeps probabilities.
    context._attend = attend_in_blocks if device == "cpu" else flash_attention
    origins = Origins(model.parameters())
    traced = Activations([], [], {})

    def sizes(tensors: Iterable[Any]) -> Sizes:
        found = _storages(list(tensors))
        if not compiled:
            return {at: size for at, size in found.items() if at not in origins.parameters}
        return {at: size for one in found for at, size in origins.of.get(one, {}).items()}

    def trace(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        computed = {at: size for at, size in _storages((args, kwargs)).items() if at not in origins.parameters}
        origins.of |= {at: {at: size} for at, size in computed.items()}  # a compiled block is a graph of its own
        traced.inputs.append(computed)
        with _saved_tensors() as saved:
            result = call(*args, **kwargs)
        traced.inside.append(sizes(saved))
        return result

    restore = [wrap_calls(block, trace) for block in model.blocks]
    try:
        with _saved_tensors() as saved, origins:
            saved.append(model(tokens_BT, context))
    finally:
        for one in restore:
            one()
    traced.outside.update(sizes(saved))
    return traced


@contextmanager
def _saved_tensors() -> Iterator[list[Tensor]]:
    """Collects what autograd saves, except within another such block."""
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield saved


class Origins(TorchDispatchMode):
    """Records from which stored tensors the compiler can compute each tensor again with pointwise operators. Results of
    matrix products, custom operators and lookups are stored, and so are the operands of the first two.

    Attributes:
        of: Storage of a tensor → {storage: bytes} of the tensors that it is computed from.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__()
        self.parameters = {p.untyped_storage()._cdata for p in parameters}
        self.of: dict[int, Sizes] = {}
        self._alive: list[Tensor] = []  # a storage's address is not used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        operands, results = _storages((args, kwargs)), _storages(result)
        self._alive += [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        packet, made = func.overloadpacket, {at: size for at, size in results.items() if at not in operands}
        if packet in LOOKUPS:
            self.of |= {at: {at: size} for at, size in made.items()}
        elif packet in flop_registry or func.namespace != "aten":
            stored = {at: size for at, size in (operands | made).items() if at not in self.parameters}
            self.of |= {at: {at: size} for at, size in stored.items()}
        else:
            origins = {at: size for one in operands for at, size in self.of.get(one, {}).items()}
            self.of |= dict.fromkeys(made, origins)
        return result


def _storages(values: Any) -> Sizes:
    """Storage → bytes of the tensors in nested containers."""
    found = (t.untyped_storage() for t in tree_leaves(values) if isinstance(t, Tensor))
    return {storage._cdata: storage.nbytes() for storage in found}


# Loss and update --------------------------------------------------------------------------------------------


def _loss(layout: Layout, tokens: int, device: str, compiled: bool) -> int:
    """Gradients of hidden states and head, which are computed along with the loss, and the logits of one chunk."""
    (V, D), s = layout.shard.head.weight.shape, layout.dtype.itemsize
    path = COMPILED if device == "cpu" else TRITON
    if not has_kernel(layout.whole.cap):  # logits, capped logits and their gradients, whole and in fp32
        return tokens * D * s + V * D * 4 + 4 * tokens * V * 4
    chunk = min(tokens, path.chunks(tokens, V)[0].stop)
    beside = 0  # a GPU's kernel writes the gradient over the logits
    if device == "cpu":
        beside = chunk * V * s if compiled else _loss_eagerly(layout, chunk, V)
    return tokens * D * s + V * D * 4 + max(chunk * V * s + beside, chunk * V * s + V * D * s)


def _loss_eagerly(layout: Layout, tokens: int, V: int) -> int:
    """The peak of the temporaries beside a chunk's logits while its gradient is computed, op by op."""
    logits, trace = torch.empty(tokens, V, dtype=layout.dtype, device="meta"), LiveBytes()
    targets = torch.empty(tokens, dtype=torch.int64, device="meta")
    with compiler.eager(), torch.no_grad(), trace:
        COMPILED.gradient(logits, targets, targets.float(), layout.whole.cap)
    return trace.most


def _update(layout: Layout, compiled: bool) -> int:
    """The peak of a rule's temporaries, masters and state that visit, and the matrices that other ranks send for it;
    those that replicas share come all at once."""
    always = _arriving([bucket for bucket in layout.buckets if bucket.share is not None], layout)
    most = 0
    for bucket in layout.buckets:
        beside = 0 if bucket.share is not None else _arriving([bucket], layout)
        beside += sum(_owned(layout, [bucket])) if bucket.visits else 0
        if bucket.rule.stacked or not compiled:  # the compiler fuses the others into one pass without temporaries
            beside += update_cost(layout, bucket)[0]
        most = max(most, beside)
    return always + most


def _arriving(buckets: Sequence[Bucket], layout: Layout) -> int:
    """Bytes of matrices that come for the update, on the replica that gets most."""
    come = [0] * layout.dp
    for bucket in buckets:
        if bucket.stack is not None and (bucket.moves or bucket.exchange):
            ownership, copies = bucket.stack.ownership, 1 + bucket.moves + 2 * bucket.exchange
            for replica in range(layout.dp):
                come[replica] += copies * len(ownership.units(replica)) * ownership.size * bucket.grads.itemsize
    return max(come)


def update_cost(layout: Layout, bucket: Bucket) -> tuple[int, int]:
    """Runs the bucket's rule on "meta". Returns the bytes of its temporaries at their peak, on the rank that owns most,
    and the FLOPs of products for one master."""
    shape = (max(owned_counts(bucket, layout)), *bucket.masters.shape[1:])

    def count() -> tuple[int, int]:
        update = dry_run(bucket.rule, bucket.masters.new_empty(shape), bucket.params.dtype)
        with LiveBytes() as live, FlopCounterMode(display=False) as flops:
            update()
        return live.most, flops.get_total_flops() // shape[0]

    return layout.once((id(bucket.rule), shape, bucket.params.dtype), count)


class LiveBytes(TorchDispatchMode):
    """Tracks the bytes of the storages that operators create, until they are freed. most: their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.most = 0, 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = _storages((args, kwargs))
        result = func(*args, **(kwargs or {}))
        for storage in [t.untyped_storage() for t in tree_leaves(result) if isinstance(t, Tensor)]:
            if storage._cdata not in known and storage._cdata not in self.seen:
                self.seen.add(storage._cdata)
                self.live += storage.nbytes()
                weakref.finalize(storage, self._dropped, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.live)
        return result

    def _dropped(self, storage: int, size: int) -> None:
        self.seen.discard(storage)
        self.live -= size
