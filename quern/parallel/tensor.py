"""Tensor and sequence parallelism: collectives as autograd functions, hooks that wrap layers with them, and the
vocabulary cut into parts.

Between the layers each of n shards holds t = ceil(N / n) of the N = B·T tokens with all channels: the *stream*,
(1, t, D), cut from the flattened batch and padded with zeros. A *region* (attention, feed-forward) runs on all tokens
with a part of its heads or hidden channels: the stream is gathered before it, and the partial results are summed and
scattered after it. So a layer's first linears hold rows of their weight, its last one columns.

This is Megatron-LM's scheme (arXiv 1909.08053, 2205.05198), except that the tokens of all rows are cut in one piece
instead of each row, and that gathered inputs are kept for the backward pass. plan.py says how each layer is cut. Every
rank of the group makes the same calls in the same order, also in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quern.compiler import untraced
from quern.kernels.cross_entropy import ChunkPath, MakeProducts, Products, cross_entropy, path_for
from quern.kernels.softcap import Cap
from quern.mesh import ProcessGroup
from quern.model.context import Context, Window
from quern.model.layers import embed
from quern.parallel.sharding import Sharding

Collective = Callable[[Tensor, ProcessGroup], Tensor]


def _all_gather(part: Tensor, group: ProcessGroup) -> Tensor:
    whole = part.new_empty(group.size * part.size(0), *part.shape[1:])
    group.all_gather(whole, part.contiguous()).wait()
    return whole


def _reduce_scatter(whole: Tensor, group: ProcessGroup) -> Tensor:
    part = whole.new_empty(whole.size(0) // group.size, *whole.shape[1:])
    group.reduce_scatter(part, whole.contiguous()).wait()
    return part


class _Exchange(torch.autograd.Function):
    """A collective along the first dim of a tensor, and in the backward pass its transpose, of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, there: Collective, back: Collective) -> Tensor:
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grads[0], ctx.group), None, None, None


@untraced
def _exchange(x: Tensor, group: ProcessGroup, there: Collective, back: Collective) -> Any:
    return _Exchange.apply(x, group, there, back)


class _Replicate(torch.autograd.Function):
    """Small parameters that every shard holds whole and uses on its part. The transpose sums over the shards with one
    all-reduce, in fp32, for all parameters, once the last gradient is complete."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(p.view_as(p) for p in parameters)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flat = torch.cat([grad.flatten().to(torch.promote_types(grad.dtype, torch.float32)) for grad in grads])
        ctx.group.all_reduce(flat).wait()
        sums = flat.split([grad.numel() for grad in grads])
        return None, *(s.view_as(grad).to(grad.dtype) for s, grad in zip(sums, grads, strict=True))


def gather(x_1tD: Tensor, group: ProcessGroup) -> Tensor:
    """The stream → all tokens (1, n·t, D), with the padding. Each shard computes something else from the result, and
    has a part of its gradient."""
    return _exchange(x_1tD[0], group, _all_gather, _reduce_scatter)[None]


def reduce_scatter(x_BTD: Tensor, group: ProcessGroup) -> Tensor:
    """Partial results for all tokens, (B, T, D) on each shard → their sum, as the stream (1, t, D)."""
    x_ND = x_BTD.flatten(0, 1)
    missing = -x_ND.size(0) % group.size
    x_ND = F.pad(x_ND, (0, 0, 0, missing)) if missing else x_ND
    return _exchange(x_ND, group, _reduce_scatter, _all_gather)[None]


def collect(part: Tensor, group: ProcessGroup) -> Tensor:
    """Parts → whole, along the first dim. Every shard computes the same from the result, and holds its gradient."""
    return _exchange(part, group, _all_gather, lambda whole, group: whole.chunk(group.size)[group.rank])


class StreamContext:
    """Wraps the context of whole rows (B, T), for a model whose stream holds a part of their tokens. Attention takes
    whole rows, and their own context (`Region`)."""

    def __init__(self, context: Context, rows: tuple[int, int], group: ProcessGroup) -> None:
        self.context, self.rows, self.group = context, rows, group
        self.continues = context.continues

    def positions(self, x_BTD: Tensor) -> Tensor:
        return self.context.positions(x_BTD.new_empty(*self.rows, 0))

    def windows(self, full: Sequence[int | None]) -> Sequence[Window]:
        return self.context.windows(full)

    def previous(self, x_BTD: Tensor, name: str) -> Tensor:
        """x is the stream. The last token of the previous part precedes its first token."""
        t, rank = x_BTD.size(1), self.group.rank
        if self.context.continues:  # only the context knows what precedes a row's first token
            before_ND = self.context.previous(self.whole_rows(x_BTD), name).flatten(0, 1)
            return F.pad(before_ND, (0, 0, 0, t * self.group.size - len(before_ND)))[None, rank * t : (rank + 1) * t]
        lasts_1nD = gather(x_BTD[:, -1:], self.group)  # all shards must take part, also in backward
        before = lasts_1nD[:, rank - 1 : rank or None]
        begins = (torch.arange(t, device=x_BTD.device) + rank * t) % self.rows[1] == 0
        return torch.cat([before, x_BTD[:, :-1]], dim=1).masked_fill(begins[:, None], 0)

    def previous_tokens(self, tokens_BT: Tensor, n: int) -> Tensor:
        return self.context.previous_tokens(tokens_BT, n)

    def whole_rows(self, x_1tD: Tensor) -> Tensor:
        """The stream → (B, T, D)."""
        B, T = self.rows
        x_1ND = gather(x_1tD, self.group)
        return (x_1ND if x_1ND.size(1) == B * T else x_1ND[:, : B * T]).view(B, T, -1)


@dataclass(frozen=True)
class Region:
    """Wraps a module that runs on all tokens with a part of its weights. Its first argument and its only result become
    the stream. A module that takes the context mixes tokens, so it gets whole rows (B, T, D) and their context; any
    other module gets (1, n·t, D)."""

    group: ProcessGroup

    def wrap(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self._enter)
        module.register_forward_hook(self._leave)

    def _enter(self, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        x_1tD, *others = arguments
        contexts = [a for a in others if isinstance(a, StreamContext)]
        x = contexts[0].whole_rows(x_1tD) if contexts else gather(x_1tD, self.group)
        return (x, *(a.context if isinstance(a, StreamContext) else a for a in others))

    def _leave(self, module: nn.Module, arguments: tuple[Any, ...], out_BTD: Tensor) -> Tensor:
        return reduce_scatter(out_BTD, self.group)


@dataclass(frozen=True)
class Stream:
    """Wraps the whole model: its blocks get the stream's context, its caller whole rows (B, T, D).

    What follows the model must differ by shard, as the vocabulary-parallel head does, because gradients are summed.

    Attributes:
        replicated: Parameters that are held whole and used on a part, as (module, name). While the model runs, copies
            from `_Replicate` replace them as attributes, so that their gradients are summed.
    """

    group: ProcessGroup
    replicated: tuple[tuple[nn.Module, str], ...]

    def wrap(self, model: nn.Module) -> None:
        model.register_forward_pre_hook(self._enter)
        model.register_forward_hook(self._leave)
        model.register_forward_hook(self._put_back, always_call=True)

    def _enter(self, model: nn.Module, arguments: tuple[Tensor, Context]) -> tuple[Tensor, StreamContext]:
        tokens_BT, context = arguments
        if torch.is_grad_enabled() and self.replicated:
            parameters = [module.get_parameter(name) for module, name in self.replicated]
            for (module, name), copied in zip(self.replicated, _Replicate.apply(self.group, *parameters), strict=True):
                module.__dict__[name] = copied  # found before the registered parameter of that name
        B, T = tokens_BT.shape
        return tokens_BT, StreamContext(context, (B, T), self.group)

    def _leave(self, model: nn.Module, arguments: tuple[Tensor, StreamContext], x_1tD: Tensor) -> Tensor:
        return arguments[1].whole_rows(x_1tD)

    def _put_back(self, model: nn.Module, arguments: Any, result: Any) -> None:
        for module, name in self.replicated:
            module.__dict__.pop(name, None)


class StreamDropout(nn.Dropout):
    """Dropout of a part of the tokens: every shard draws for all tokens by one seed, and takes its part."""

    group: ProcessGroup

    @classmethod
    def of(cls, whole: nn.Dropout, group: ProcessGroup) -> StreamDropout:
        part = cls(whole.p)
        part.group = group
        return part.train(whole.training)

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return input
        kept = F.dropout(input.new_ones(self.group.size, *input.shape[1:]), self.p)
        return input * kept[self.group.rank]


def cut(module: nn.Module, name: str, dim: int, group: ProcessGroup, size: int | None = None) -> Sharding:
    """Replaces a whole parameter by this shard's part of it along `dim`; returns the part's `Sharding`, which it has as
    an attribute too. size: indices of each part, the last ones padded with zeros; None cuts evenly."""
    whole = module.get_parameter(name)
    size = whole.size(dim) // group.size if size is None else size
    offset = min(group.rank * size, whole.size(dim))
    held = min(size, whole.size(dim) - offset)
    values = whole.detach().new_zeros(*whole.shape[:dim], size, *whole.shape[dim + 1 :])
    values.narrow(dim, 0, held).copy_(whole.detach().narrow(dim, offset, held))
    part = nn.Parameter(values, requires_grad=whole.requires_grad)
    sharding = Sharding(dim, offset, held, whole.size(dim))
    part.sharding = sharding  # pyright: ignore[reportAttributeAccessIssue]
    setattr(module, name, part)
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = part.shape
    elif isinstance(module, nn.Embedding):
        module.num_embeddings, module.embedding_dim = part.shape
    return sharding


# The vocabulary ---------------------------------------------------------------------------------------------
#
# Every shard holds some rows of embedding and head. The embedding looks up the rows that it holds, and the sum over the
# shards is scattered as the stream. The head computes logits of its own rows only, since a softmax over parts follows
# from each part's logsumexp:
#
#     lse = log Σ_parts exp(lse_part)          loss = lse - z[target], known to the part that holds the target
#
# So the loss runs the kernels of one process (kernels/cross_entropy.py) on the part, and for each chunk of tokens sends
# two numbers per token in one all-reduce, and without a cap one more number before, the maximum. Two things of the
# kernel's gradient are corrected: its softmax is that of the part (a factor of the row), and the entry at the target.

MULTIPLE = 16
"""A divisor of a part's rows, where possible: fast products prefer it, and FP8 requires it. Rows beyond the vocabulary
are zero, get no logits and stay zero."""
LEAST_SHARE = 1e-30
"""The least share of a row's softmax that a part can have: its factor and the inverse must fit into fp32."""


def part_rows(vocabulary: int, shards: int) -> int:
    """Returns the rows of each part. Raises ValueError if a shard would have none."""
    rows = -(-vocabulary // shards)
    rounded = -(-rows // MULTIPLE) * MULTIPLE
    if rounded * (shards - 1) < vocabulary:
        return rounded
    if rows * (shards - 1) >= vocabulary:
        raise ValueError(f"{shards} shards cannot share a vocabulary of {vocabulary}: use fewer, or more tokens")
    return rows


class VocabularyEmbedding(nn.Embedding):
    """tokens (B, T) → the stream (1, t, D), from a part of the rows."""

    sharding: Sharding
    group: ProcessGroup

    @classmethod
    def of(cls, whole: nn.Embedding, group: ProcessGroup) -> VocabularyEmbedding:
        """Returns this shard's part of an embedding. The weight keeps its name."""
        part = cls(whole.num_embeddings, whole.embedding_dim, device="meta")
        part.weight = whole.weight
        part.sharding = cut(part, "weight", 0, group, part_rows(whole.num_embeddings, group.size))
        part.group = group
        return part.train(whole.training)

    def forward(self, input: Tensor) -> Tensor:
        ours_BT, local_BT = _localised(input, self.sharding)
        x_BTD = embed(local_BT, self.weight) * ours_BT[..., None].to(self.weight.dtype)
        return reduce_scatter(x_BTD, self.group)


def _localised(tokens: Tensor, held: Sharding) -> tuple[Tensor, Tensor]:
    """Returns which of the ids this part holds, and their rows in it, 0 for the others."""
    local = tokens - held.offset
    ours = (local >= 0) & (local < held.size)
    return ours, torch.where(ours, local, 0)


@dataclass(frozen=True)
class VocabularyHead:
    """The head and the loss of a shard that holds a part of the vocabulary."""

    group: ProcessGroup
    held: Sharding

    @classmethod
    def of(cls, head: nn.Linear, group: ProcessGroup) -> VocabularyHead:
        """Cuts the weight of `head`, which stays a linear layer with its own rows."""
        return cls(group, cut(head, "weight", 0, group, part_rows(head.out_features, group.size)))

    def whole_logits(self, part: Tensor) -> Tensor:
        """Gathers logits (…, rows of this part) → (…, V) on every shard."""
        columns = collect(part.flatten(0, -2).T.contiguous(), self.group)
        return columns[: self.held.whole].T.unflatten(0, part.shape[:-1])

    def cross_entropy(
        self,
        x_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        scale_N: Tensor,
        cap: Cap,
        products: MakeProducts = Products,
    ) -> tuple[Tensor, Tensor]:
        """Computes `kernels.cross_entropy.cross_entropy` from this part of the weight.

        The results are the same on every shard. The gradients of x sum over the shards to the whole gradient.
        """
        path = path_for(x_ND)
        path = replace(path, losses=partial(self._losses, path), gradient=partial(self.chunk_gradient, path))
        return cross_entropy(x_ND, weight_VD, targets_N, scale_N, cap, products, path)

    def _losses(self, path: ChunkPath, logits_NV: Tensor, targets_N: Tensor, cap: Cap) -> Tensor:
        logits_NV = logits_NV[:, : self.held.size]
        ours_N, local_N = _localised(targets_N, self.held)
        z_N, _ = _capped(logits_NV, local_N, cap)
        lse_N = path.losses(logits_NV, local_N, cap) + z_N
        return self._loss(lse_N, z_N, ours_N, cap)[0]

    def _loss(self, lse_N: Tensor, z_N: Tensor, ours_N: Tensor, cap: Cap) -> tuple[Tensor, Tensor]:
        """Each part's logsumexp and the target's logit → losses and logsumexp of the whole vocabulary."""
        highest = torch.zeros_like(lse_N)
        if cap.tanh_form is None:
            highest.copy_(lse_N)
            self.group.all_reduce(highest, "max").wait()
        both_2N = torch.stack([(lse_N - highest).exp(), torch.where(ours_N, z_N, 0)])
        self.group.all_reduce(both_2N).wait()
        whole_N = both_2N[0].log() + highest
        return whole_N - both_2N[1], whole_N

    def chunk_gradient(
        self, path: ChunkPath, logits_NV: Tensor, targets_N: Tensor, scale_N: Tensor, cap: Cap
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`ChunkPath.gradient` for this part of the vocabulary; `path` computes it as if the part were all of it."""
        rows = logits_NV.size(1)
        ours_N, local_N = _localised(targets_N, self.held)
        own_NV = logits_NV[:, : self.held.size]
        z_N, slope_N = _capped(own_NV, local_N, cap)
        part_losses, factor, grad = path.gradient(own_NV, local_N, torch.ones_like(z_N), cap)
        lse_N = part_losses + z_N
        losses, whole_N = self._loss(lse_N, z_N, ours_N, cap)
        share = (lse_N - whole_N).exp().clamp(min=LEAST_SHARE)
        # At the target, slope · (p - 1). If another part holds the target, this is an ordinary entry: slope · p.
        at_local = torch.where(ours_N, ((z_N - whole_N).exp() - 1) / share, (z_N - lse_N).exp()) * slope_N / factor
        grad = grad.scatter(1, local_N[:, None], at_local[:, None].to(grad.dtype))
        return losses, factor * share * scale_N, F.pad(grad, (0, rows - grad.size(1))) if rows > grad.size(1) else grad


def _capped(logits_NV: Tensor, targets_N: Tensor, cap: Cap) -> tuple[Tensor, Tensor]:
    """Returns the capped logit at each target and the cap's slope there, from the cap's tanh form; fp32."""
    z_N = logits_NV.gather(1, targets_N[:, None])[:, 0].float()
    if cap.tanh_form is None:
        return z_N, torch.ones_like(z_N)
    height, divisor = cap.tanh_form
    t_N = torch.tanh(z_N / divisor)
    return height * t_N, height / divisor * (1 - t_N * t_N)
