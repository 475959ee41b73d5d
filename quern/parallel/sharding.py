"""Which part of a parameter or of its state a rank holds: shards, slices of checkpoints, matrices that it owns.

A parameter that tensor parallelism cut has a `Sharding` as its attribute `sharding`; every shard of the replica holds
the others whole. The optimizer and the checkpoints need no other information about how a model was cut.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import Parameter

from quern.mesh import Mesh, Pending


@dataclass(frozen=True)
class Sharding:
    """Along `dim`, this process holds indices offset … offset + size - 1 of `whole`; the rest is padding."""

    dim: int
    offset: int
    size: int
    whole: int


def sharding_of(parameter: Parameter) -> Sharding | None:
    return getattr(parameter, "sharding", None)


@dataclass(frozen=True)
class Slice:
    """A rectangle of a logical tensor.

    Attributes:
        tensor: The rectangle, not a copy.
        offsets: Where the rectangle begins in the logical tensor.
        whole: Shape of the logical tensor.
        saved: Whether this rank writes it; one rank writes equal copies.
    """

    tensor: Tensor
    offsets: tuple[int, ...]
    whole: tuple[int, ...]
    saved: bool = True

    def of(self, logical: Tensor) -> Tensor:
        """Returns a view of this slice's part of a whole logical tensor."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.tensor.shape, strict=True)):
            logical = logical.narrow(dim, offset, size)
        return logical


def sliced(tensor: Tensor, sharding: Sharding | None, first_row: int, rows: int, *, saved: bool) -> Slice | None:
    """Describes `tensor`, rows first_row … of a parameter's local part, as a slice; None for padding."""
    offsets, whole = [0] * tensor.ndim, list(tensor.shape)
    offsets[0], whole[0] = first_row, rows
    if sharding is not None:
        begin = first_row if sharding.dim == 0 else 0
        tensor = tensor.narrow(sharding.dim, 0, max(0, min(tensor.size(sharding.dim), sharding.size - begin)))
        offsets[sharding.dim] += sharding.offset
        whole[sharding.dim] = sharding.whole
    return Slice(tensor, tuple(offsets), tuple(whole), saved) if tensor.numel() else None


# Who owns which matrices, and the collectives that bring them whole to their owners and back ------------------
#
# Parameters of one shape ("units") are consecutive in a buffer (docs/parallelism.md, "Who holds what"). One rank owns a
# unit whole, in the same order, so a replica owns one interval of the buffer. Which rank, follows from the longest
# processing time first (Graham, 1969). The shards of a replica divide its units in the same way.


@dataclass(frozen=True)
class Ownership:
    """The owners of the units of one buffer, each of `size` elements on one rank; a replica sums `region` elements.

    Rank replica · shards + shard owns units cuts[rank] … cuts[rank + 1] - 1; shards is 1 if all shards do the same.
    """

    size: int
    region: int
    cuts: tuple[int, ...]
    replicas: int

    @property
    def shards(self) -> int:
        return (len(self.cuts) - 1) // self.replicas

    def units(self, replica: int, shard: int | None = None) -> range:
        """The units of one shard, or of the whole replica."""
        first = replica * self.shards
        if shard is None:
            return range(self.cuts[first], self.cuts[first + self.shards])
        return range(self.cuts[first + shard], self.cuts[first + shard + 1])

    def counts(self, replica: int) -> list[int]:
        """The number of units of each shard of the replica."""
        return [len(self.units(replica, shard)) for shard in range(self.shards)]

    @cached_property
    def moves(self) -> bool:
        """Whether some unit is outside its owner's region."""
        return any(self._shared(one, one) < len(self.units(one)) * self.size for one in range(self.replicas))

    def owners_of_region(self, replica: int) -> list[int]:
        """Number of elements of the replica's region that each replica owns, in the order of the region."""
        return [self._shared(replica, other) for other in range(self.replicas)]

    def owned_in_regions(self, replica: int) -> list[int]:
        """Number of elements that the replica owns in each region."""
        return [self._shared(other, replica) for other in range(self.replicas)]

    def sent(self, replica: int) -> tuple[int, int]:
        """Elements of gradients and of parameters that one rank of the replica sends to other replicas in a step."""
        kept = self._shared(replica, replica)
        return sum(self.owners_of_region(replica)) - kept, len(self.units(replica)) * self.size - kept

    def _shared(self, region: int, owner: int) -> int:
        """Number of elements of one replica's region that a replica owns."""
        units = self.units(owner)
        low, high = (
            max(region * self.region, units.start * self.size),
            min((region + 1) * self.region, units.stop * self.size),
        )
        return max(0, high - low)


def units_together(units: int, size: int, most: int, largest: int, ranks: int) -> int:
    """Number of units that share a buffer of at most `most` elements. Where it takes no more than `largest` elements,
    their number divides by the ranks, so that no unit has to travel."""
    count = max(1, most // size)
    if ranks <= units and ranks * size <= largest:
        return max(ranks, count // ranks * ranks)
    return -(-units // -(-units // count))  # all much the same


def share_out(units: int, cost: int, work: list[list[int]], whole: bool) -> tuple[int, ...]:
    """Divides units of one cost among the ranks, and returns the cuts between the owners. work: work of each shard of
    each replica, which grows; whole: every shard updates all units of its replica."""
    counts: list[int] = []
    for shards, count in zip(work, _spread(units, cost, [sum(shards) for shards in work]), strict=True):
        parts = [count] if whole else _spread(count, cost, shards)
        for shard in range(len(shards)):
            shards[shard] += cost * parts[0 if whole else shard]
        counts += parts
    return 0, *accumulate(counts)


def _spread(units: int, cost: int, work: Sequence[int]) -> list[int]:
    """Number of units of each rank: equally many if possible, otherwise each unit goes to the least work."""
    if units % len(work) == 0:
        return [units // len(work)] * len(work)
    counts = [0] * len(work)
    waiting = [(done, rank) for rank, done in enumerate(work)]
    heapq.heapify(waiting)
    for _ in range(units):
        done, rank = waiting[0]
        counts[rank] += 1
        heapq.heapreplace(waiting, (done + cost, rank))
    return counts


@dataclass(frozen=True)
class Stack:
    """shape: shape of this rank's part of a parameter, one matrix or several. exchange: the dimension of (N, R, C) that
    tensor parallelism cuts; None where this rank has whole matrices."""

    ownership: Ownership
    shape: torch.Size
    exchange: int | None
    mesh: Mesh

    @property
    def units(self) -> range:
        """The parameters that this rank owns."""
        return self.ownership.units(self.mesh.data.rank, None if self.exchange is None else self.mesh.model.rank)

    def of_replica(self, buffer: Tensor, begin: int = 0) -> Tensor:
        """Returns this rank's part (n, r, c) of the matrices that its replica owns, from a buffer of all regions, or
        from the part of it that starts at element `begin`."""
        units, size = self.ownership.units(self.mesh.data.rank), self.ownership.size
        return buffer[units.start * size - begin : units.stop * size - begin].view(-1, *self.shape[-2:])

    def fetch(self, region: Tensor) -> tuple[Tensor, Pending]:
        """Starts to fetch `of_replica` of the gradients; read it after the wait. region: this replica's, flat."""
        here, there = self._lengths()
        parts = region.new_empty(sum(here))
        return parts.view(-1, *self.shape[-2:]), self.mesh.data.all_to_all(parts, region[: sum(there)], here, there)

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

    def _lengths(self) -> tuple[list[int], list[int]]:
        """Number of elements that this replica owns in each region, and each replica in this region."""
        replica = self.mesh.data.rank
        return self.ownership.owned_in_regions(replica), self.ownership.owners_of_region(replica)

    def _counts(self) -> list[int]:
        """The number of matrices of each shard of the replica."""
        several = self.shape[:-2].numel()
        return [units * several for units in self.ownership.counts(self.mesh.data.rank)]
