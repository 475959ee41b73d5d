"""The vocabulary cut into parts: embedding, head and cross-entropy, of which every shard holds some rows.

The embedding looks up the rows that it holds, and the sum over the shards is scattered as the stream (tensor.py). The
head computes logits of its own rows only, since a softmax over parts follows from each part's logsumexp:

    lse = log Σ_parts exp(lse_part)          loss = lse - z[target], known to the part that holds the target

So the loss runs the kernels of one process (kernels/cross_entropy.py) on the part, and for each chunk of tokens sends
two numbers per token in one all-reduce, and without a cap one more number before, the maximum. Two things of the
kernel's gradient are corrected: its softmax is that of the part (a factor of the row), and the entry at the target.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quern.kernels.cross_entropy import ChunkPath, MakeProducts, PlainProducts, cross_entropy, path_for
from quern.kernels.softcap import Cap
from quern.mesh import ProcessGroup
from quern.model.layers import embed
from quern.parallel.sharding import Sharding
from quern.parallel.tensor import collect, cut, reduce_scatter

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
        cut(part, "weight", 0, group, part_rows(whole.num_embeddings, group.size))
        part.sharding, part.group = _sharding(part.weight), group
        return part.train(whole.training)

    def forward(self, input: Tensor) -> Tensor:
        ours_BT, local_BT = _localised(input, self.sharding)
        x_BTD = embed(local_BT, self.weight) * ours_BT[..., None].to(self.weight.dtype)
        return reduce_scatter(x_BTD, self.group)


def _sharding(weight: Tensor) -> Sharding:
    return cast(Any, weight).sharding


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
        cut(head, "weight", 0, group, part_rows(head.out_features, group.size))
        return cls(group, _sharding(head.weight))

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
        products: MakeProducts = PlainProducts,
        path: ChunkPath | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Computes `kernels.cross_entropy.cross_entropy` from this part of the weight.

        The results are the same on every shard. The gradients of x sum over the shards to the whole gradient.
        """
        path = path or path_for(x_ND)
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
