"""How matrices come whole to their owners, and back: the collectives of a stack of parameters of one shape.

Two ways lie between a matrix's gradient and its owner. Over the data group, from the regions in which gradients are
summed, where these are not what their rank owns (ownership.py). Under tensor parallelism, over the model group, since
each shard has a part of every matrix. Parameters go the same ways back. Who owns what is not decided here, and what
the owner does with it is the update rule's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quern.mesh import Mesh, Pending
from quern.parallel.ownership import Ownership


@dataclass(frozen=True)
class Stack:
    """shape: of one parameter's part here, a matrix or several. exchange: the dimension of (N, R, C) that is cut by
    tensor parallelism, None where matrices are whole here."""

    ownership: Ownership
    shape: torch.Size
    exchange: int | None
    mesh: Mesh

    @property
    def moves(self) -> bool:
        """Whether owners are elsewhere than the regions."""
        return self.ownership.moves

    @property
    def units(self) -> range:
        """The parameters that this rank owns."""
        return self.ownership.units(self.mesh.data.rank, None if self.exchange is None else self.mesh.model.rank)

    def of_replica(self, buffer: Tensor) -> Tensor:
        """(n, r, c): what this rank holds of the matrices that its replica owns, out of all replicas' regions."""
        units = self.ownership.units(self.mesh.data.rank)
        return self._matrices(buffer[units.start * self.ownership.size : units.stop * self.ownership.size])

    def fetch(self, region: Tensor) -> tuple[Tensor, Pending]:
        """region: a flat one, of gradients → `of_replica`, when it has come."""
        here, there = self._lengths()
        parts = region.new_empty(sum(here))
        return self._matrices(parts), self.mesh.data.all_to_all(parts, region[: sum(there)], here, there)

    def put_together(self, parts: Tensor) -> Tensor:
        """`of_replica` → (N, R, C), this rank's own, whole."""
        if self.exchange is None:
            return parts
        counts, shards, shard = self._counts(), self.mesh.model.size, self.mesh.model.rank
        received = parts.new_empty(shards * counts[shard], *parts.shape[1:])
        self.mesh.model.all_to_all(received, parts.contiguous(), [counts[shard]] * shards, counts).wait()
        return torch.cat(list(received.view(shards, counts[shard], *parts.shape[1:])), dim=self.exchange)

    def take_apart(self, whole: Tensor) -> Tensor:
        """The inverse of `put_together`."""
        if self.exchange is None:
            return whole
        counts, shards, shard = self._counts(), self.mesh.model.size, self.mesh.model.rank
        pieces = torch.cat(whole.chunk(shards, dim=self.exchange))
        parts = pieces.new_empty(sum(counts), *pieces.shape[1:])
        self.mesh.model.all_to_all(parts, pieces, counts, [counts[shard]] * shards).wait()
        return parts

    def send_back(self, parts: Tensor, region: Tensor) -> Pending:
        """The inverse of `fetch`, into a flat region of parameters. Keep parts until it is over."""
        here, there = self._lengths()
        return self.mesh.data.all_to_all(region[: sum(there)], parts.view(-1), there, here)

    def _matrices(self, flat: Tensor) -> Tensor:
        return flat.view(-1, *self.shape[-2:])

    def _lengths(self) -> tuple[list[int], list[int]]:
        """Elements that this replica owns in each region; those of its region that each replica owns."""
        replica = self.mesh.data.rank
        return self.ownership.owned_in_regions(replica), self.ownership.owners_of_region(replica)

    def _counts(self) -> list[int]:
        """Matrices of each shard of the replica."""
        several = self.shape[:-2].numel()
        return [units * several for units in self.ownership.counts(self.mesh.data.rank)]
