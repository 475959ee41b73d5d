"""Collectives that bring matrices whole to their owners and back, for a stack of parameters of one shape.

There are two of them. Over the data group, gradients travel from the regions in which they are summed to the owners,
where these differ (ownership.py). Under tensor parallelism, the shards of the model group exchange their parts of
matrices. Parameters take the same ways back. ownership.py decides the owners, the update rule what they compute.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quern.mesh import Mesh, Pending
from quern.parallel.ownership import Ownership


@dataclass(frozen=True)
class Stack:
    """shape: of this rank's part of a parameter, one matrix or several. exchange: the dimension of (N, R, C) that
    tensor parallelism cuts; None where this rank has whole matrices."""

    ownership: Ownership
    shape: torch.Size
    exchange: int | None
    mesh: Mesh

    @property
    def moves(self) -> bool:
        """Whether some matrices are owned outside their region."""
        return self.ownership.moves

    @property
    def units(self) -> range:
        """The parameters that this rank owns."""
        return self.ownership.units(self.mesh.data.rank, None if self.exchange is None else self.mesh.model.rank)

    def of_replica(self, buffer: Tensor, begin: int = 0) -> Tensor:
        """Returns this rank's part (n, r, c) of the matrices that its replica owns, from a buffer of all regions, or
        from the part of it that starts at element `begin`."""
        units, size = self.ownership.units(self.mesh.data.rank), self.ownership.size
        return self._matrices(buffer[units.start * size - begin : units.stop * size - begin])

    def fetch(self, region: Tensor) -> tuple[Tensor, Pending]:
        """Starts to fetch `of_replica` of the gradients; read it after the wait. region: this replica's, flat."""
        here, there = self._lengths()
        parts = region.new_empty(sum(here))
        return self._matrices(parts), self.mesh.data.all_to_all(parts, region[: sum(there)], here, there)

    def put_together(self, parts: Tensor) -> Tensor:
        """`of_replica` → (N, R, C), the whole matrices that this rank owns."""
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
        """The inverse of `fetch`, into a flat region of parameters. Keep `parts` until the wait."""
        here, there = self._lengths()
        return self.mesh.data.all_to_all(region[: sum(there)], parts.view(-1), there, here)

    def _matrices(self, flat: Tensor) -> Tensor:
        return flat.view(-1, *self.shape[-2:])

    def _lengths(self) -> tuple[list[int], list[int]]:
        """How many elements this replica owns in each region, and each replica in this region."""
        replica = self.mesh.data.rank
        return self.ownership.owned_in_regions(replica), self.ownership.owners_of_region(replica)

    def _counts(self) -> list[int]:
        """The number of matrices of each shard of the replica."""
        several = self.shape[:-2].numel()
        return [units * several for units in self.ownership.counts(self.mesh.data.rank)]
