"""Memory of one rank of a layout, by category, in bytes: counted where it is tensors, traced where it is computation.

Parameters, gradients, masters and moments are the optimizer's buffers (buckets.py), padding included, on the rank that
owns most. Activations are found by running the forward pass of the largest micro-batch on "meta" and adding up what
autograd keeps. The compiler keeps less: it computes pointwise results again from what else is kept, and keeps what a
matrix product or attention made, in the dtype in which it was made. So the peak of a step is

    buffers + max(activations + gradients in flight + loss, gradients in flight at the end of backward, update)

Gradients in flight are autograd's own, until they lie in the buffers: with replicas the largest one; on one replica all
of them, through all micro-batches. The loss is what its chunks take (kernels/cross_entropy.py), the update what the
largest bucket's rule takes beside its buffers. Not counted: the interpreter and its libraries, a GPU's context, what
allocators keep of freed blocks (on a CPU a third and more: machine.keep_freed_memory), and FP8's second copies.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quern.kernels.attention.attend import MaskSpec, scale_or_default, split_window
from quern.kernels.attention.blocked import attend_blocked, kept_elements
from quern.kernels.attention.flash import flash_attention
from quern.kernels.cross_entropy import COMPILED, TRITON
from quern.parallel.buckets import Bucket
from quern.parallel.layout import Layout

POINTWISE = (
    "Add", "Sub", "Mul", "Div", "Neg", "Pow", "Relu", "Silu", "Sigmoid", "Tanh", "Rsqrt", "ToCopy", "Cat", "Mean",
    "Sum", "Square", "FusedRmsNorm",
)  # fmt: skip
"""Autograd's nodes whose results the compiler makes again rather than keep them."""
VIEWS = (
    "View", "ReshapeAlias", "Reshape", "Transpose", "Clone", "Split", "Slice", "Select", "Unsqueeze", "Unbind", "Alias",
    "Expand", "Permute", "T", "ConstantPadNd", "UnsafeView", "Squeeze",
)  # fmt: skip
"""Those that move or cut one tensor."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank; what each is, is said above. `in_flight` are gradients."""

    parameters: int
    gradients: int
    masters: int
    moments: int
    activations: int
    loss: int
    in_flight: int
    update: int
    accumulates: bool

    @property
    def buffers(self) -> int:
        return self.parameters + self.gradients + self.masters + self.moments

    @property
    def peak(self) -> int:
        during = self.activations + self.loss + (self.in_flight if self.accumulates else 0)
        return self.buffers + max(during, self.in_flight, self.update)


def memory(layout: Layout, device: str, compiled: bool, row_bytes: int | None = None) -> Memory:
    """device: "cpu" or "cuda", whose attention and loss keep different things; compiled: whether torch.compile is used;
    row_bytes: what `activations` gave for this layout, where it is known.

    Of the rank that owns most, in a step of the recipe's batch and micro-batches.
    """
    row_bytes = activations(layout, device, compiled) if row_bytes is None else row_bytes
    grad_bytes = layout.buckets[0].grads.itemsize
    gradients = [p.numel() * grad_bytes for p in layout.shard.parameters()]
    masters, moments = _owned(layout)
    most_rows, context = max(layout.micro_batches), layout.recipe.model.context
    assert context
    return Memory(
        parameters=sum(bucket.params.nbytes for bucket in layout.buckets),
        gradients=sum(bucket.grads.nbytes * (1 if bucket.group.every == 1 else 2) for bucket in layout.buckets),
        masters=masters,
        moments=moments,
        activations=most_rows * row_bytes,
        loss=_loss(layout, most_rows * context, device, compiled),
        in_flight=sum(gradients) if layout.dp == 1 else max(gradients),
        update=max(_update(bucket, layout, compiled) for bucket in layout.buckets),
        accumulates=len(layout.micro_batches) > 1,
    )


def _owned(layout: Layout) -> tuple[int, int]:
    """Bytes of masters and of moments, on the rank on which they are most."""
    masters, moments = [0] * (layout.dp * layout.tp), [0] * (layout.dp * layout.tp)
    for bucket in layout.buckets:
        # Parameters in fp32 are their own masters.
        same = bucket.masters.untyped_storage()._cdata == bucket.params.untyped_storage()._cdata
        unit = bucket.masters.new_empty(1, *bucket.masters.shape[1:])
        state = sum(one.nbytes for one in bucket.rule.init_state(unit).values())
        for rank, count in enumerate(owned_counts(bucket, layout)):
            masters[rank] += 0 if same else unit.nbytes * count
            moments[rank] += state * count
    return max(zip(masters, moments, strict=True), key=sum)


def owned_counts(bucket: Bucket, layout: Layout) -> list[int]:
    """Of masters, along their first dim, on each rank."""
    if bucket.stack is None:
        return [len(bucket.masters)] * (layout.dp * layout.tp)
    ownership, several = bucket.stack.ownership, bucket.stack.shape[:-2].numel()
    copies = layout.tp // ownership.shards
    return [
        count * several for replica in range(layout.dp) for count in ownership.counts(replica) for _ in range(copies)
    ]


# Activations ------------------------------------------------------------------------------------------------


def activations(layout: Layout, device: str, compiled: bool) -> int:
    """Bytes that autograd keeps of one row's forward pass, up to the head. Raises ValueError where the model cannot be
    run without numbers."""
    shape = layout.recipe.model
    assert shape.context
    tokens_BT = torch.empty(1, shape.context, dtype=torch.int64, device="meta")
    model = layout.shard
    _move_tables(model)
    context = model.context(tokens_BT, 1.0)
    context._attend = _attend_as_on_cpu if device == "cpu" else _attend_as_on_gpu
    known = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()._cdata
        if storage not in known:
            kept.setdefault(storage, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        x_BTD = model(tokens_BT, context)
    keep(x_BTD)
    tensors = list(kept.values())
    return sum(_compiled_bytes(tensors) if compiled else (t.untyped_storage().nbytes() for t in tensors))


def _compiled_bytes(kept: list[Tensor]) -> Iterator[int]:
    """Operands of matrix products and attention stay. Nothing is kept that follows pointwise from the rest; and what
    was only cast up to fp32, as it was before."""
    nodes = {tensor.grad_fn for tensor in kept}

    def follows(node: Any) -> bool:
        inputs = [before for before, _ in node.next_functions if before is not None]
        cheap = _operation(node) in POINTWISE + VIEWS
        return cheap and bool(inputs) and all(one in nodes or follows(one) for one in inputs)

    for tensor in kept:
        node, size = tensor.grad_fn, tensor.untyped_storage().nbytes()
        if node is not None and _operation(node) in POINTWISE and follows(node):
            continue
        cast_up = node is not None and _operation(node) == "ToCopy" and tensor.dtype == torch.float32
        yield size // 2 if cast_up else size


def _operation(node: Any) -> str:
    return node.name().rstrip("0123456789").removesuffix("Backward")


def _move_tables(model: torch.nn.Module) -> None:
    """Constants that a module keeps beside its parameters follow them to "meta"."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                setattr(module, name, value.to("meta"))


def _attend_as_on_cpu(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, mask: MaskSpec, scale: float | None) -> Tensor:
    """`kernels.attention.attend`, which asks where its tensors are."""
    q_BHTE, k_BKTE, v_BKTE = (x.transpose(1, 2).contiguous() for x in (q_BTHE, k_BTKE, v_BTKE))
    fixed, varying = split_window(mask.window, q_BTHE.size(1))
    scale, kept = scale_or_default(scale, q_BTHE), kept_elements(q_BHTE, fixed)
    y_BHTE, _ = attend_blocked(q_BHTE, k_BKTE, v_BKTE, mask.documents_BT, fixed, varying, scale, kept)
    return y_BHTE.transpose(1, 2)


def _attend_as_on_gpu(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, mask: MaskSpec, scale: float | None) -> Tensor:
    """Whatever kernel runs, none of them keeps probabilities."""
    fixed, varying = split_window(mask.window, q_BTHE.size(1))
    window = fixed if varying is None else varying
    scale = scale_or_default(scale, q_BTHE)
    return flash_attention(q_BTHE, k_BTKE, v_BTKE, window, mask.documents_BT, scale)


# Loss and update --------------------------------------------------------------------------------------------


def _loss(layout: Layout, tokens: int, device: str, compiled: bool) -> int:
    """Gradients by hidden states and head, which are made along with the loss, and the logits of one chunk."""
    (V, D), s = layout.shard.head.weight.shape, layout.dtype.itemsize
    path = COMPILED if device == "cpu" else TRITON
    chunk = min(tokens, path.chunks(tokens, V)[0].stop)
    beside = 0  # a GPU's kernel writes the gradient over the logits
    if device == "cpu":
        beside = chunk * V * s if compiled else _loss_eagerly(layout, chunk, V)
    return tokens * D * s + V * D * 4 + max(chunk * V * s + beside, chunk * V * s + V * D * s)


def _loss_eagerly(layout: Layout, tokens: int, V: int) -> int:
    """The most that stands beside a chunk's logits while its gradient is made, op by op."""
    logits, trace = torch.empty(tokens, V, dtype=layout.dtype, device="meta"), LiveBytes()
    targets = torch.empty(tokens, dtype=torch.int64, device="meta")
    with torch.compiler.set_stance("force_eager"), torch.no_grad(), trace:
        COMPILED.gradient(logits, targets, targets.float(), layout.whole.cap)
    return trace.most


def _update(bucket: Bucket, layout: Layout, compiled: bool) -> int:
    """What the rule allocates at once, and the matrices that come from elsewhere for it."""
    come = 0
    if bucket.stack is not None and (bucket.moves or bucket.exchange):
        ownership = bucket.stack.ownership
        held = max(len(ownership.units(replica)) for replica in range(layout.dp)) * ownership.size
        come = (1 + bucket.moves + 2 * bucket.exchange) * held * bucket.grads.itemsize
    if compiled and not bucket.rule.stacked:  # the compiler makes one pass of it; matrix products stay apart
        return come
    trace = LiveBytes()
    run_update(bucket, max(owned_counts(bucket, layout)), trace)
    return come + trace.most


def run_update(bucket: Bucket, count: int, trace: AbstractContextManager[Any]) -> None:
    """The rule once on "meta", under `trace`, on `count` masters."""
    masters = bucket.masters.new_empty(count, *bucket.masters.shape[1:])
    dtype, state = bucket.params.dtype, bucket.rule.init_state(masters)
    grads, out = masters.to(dtype), torch.empty_like(masters, dtype=dtype)
    scalars: dict[str, Any] = dict(bucket.rule.scalars(1, 1.0, 0.9, 1.0))
    with torch.no_grad(), trace:
        bucket.rule.update_(masters, grads, state, scalars, dtype=dtype, out=out)


class LiveBytes(TorchDispatchMode):
    """Adds up the storages that operators make, until they are dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.most = 0, 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in known | self.seen:
                self.seen.add(storage._cdata)
                self.live += storage.nbytes()
                weakref.finalize(storage, self._dropped, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.live)
        return result

    def _dropped(self, storage: int, size: int) -> None:
        self.seen.discard(storage)
        self.live -= size
