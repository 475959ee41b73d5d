"""Who owns which matrices, and how many elements travel between where gradients are summed and where they are updated.

Parameters of one shape ("units") are consecutive in a buffer, which is cut into one equal region per replica, possibly
within a unit; only the end is padded. Gradients are summed in regions. One rank owns a unit whole; ownership is cut
between units, in the same order. So a replica owns one interval of the buffer, and its part of each region is an
interval too. Parts outside the owner's region travel to the owner before the update and back after it. A rank sends at
most a region, and what it owns back: of n replicas, on average at most 2/n of the buffer. Where the units divide by the
replicas, regions and ownership are the same.

Owners balance the work: where units do not divide, each goes to the rank with the least work, the most costly shapes
first (longest processing time first: Graham, 1969). The shards of a replica divide its units in the same way.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True)
class Ownership:
    """The owners of the units of one buffer.

    Args:
        size: Elements of a unit on one rank.
        region: Elements of the buffer that each replica sums.
        cuts: Rank replica · shards + shard owns units cuts[rank] … cuts[rank + 1] - 1; shards is 1 if all shards do
            the same.
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
        return any(self._outside(replica) for replica in range(self.replicas))

    def owners_of_region(self, replica: int) -> list[int]:
        """How many elements of the replica's region each replica owns, in the order of the region."""
        low, high = self._region(replica)
        return [_overlap((low, high), self._owned(other)) for other in range(self.replicas)]

    def owned_in_regions(self, replica: int) -> list[int]:
        """How many elements the replica owns in each region."""
        low, high = self._owned(replica)
        return [_overlap((low, high), self._region(other)) for other in range(self.replicas)]

    def sent(self, replica: int) -> tuple[int, int]:
        """Elements that one rank of the replica sends to other replicas in a step: of gradients, and of parameters."""
        low, high = self._region(replica)
        summed = min(high, self.cuts[-1] * self.size) - min(low, self.cuts[-1] * self.size)
        kept = _overlap((low, high), self._owned(replica))
        return (summed - kept, self._outside(replica)) if self.moves else (0, 0)

    def _outside(self, replica: int) -> int:
        low, high = self._owned(replica)
        return high - low - _overlap((low, high), self._region(replica))

    def _region(self, replica: int) -> tuple[int, int]:
        return replica * self.region, (replica + 1) * self.region

    def _owned(self, replica: int) -> tuple[int, int]:
        units = self.units(replica)
        return units.start * self.size, units.stop * self.size


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> int:
    return max(0, min(one[1], other[1]) - max(one[0], other[0]))


def units_together(units: int, size: int, most: int, largest: int, ranks: int) -> int:
    """How many of the units share a buffer of at most `most` elements. Where it takes no more than `largest` elements,
    their number divides by the ranks, so that no unit has to travel."""
    count = max(1, most // size)
    if ranks <= units and ranks * size <= largest:
        return max(ranks, count // ranks * ranks)
    return -(-units // -(-units // count))  # all much the same


def share_out(units: int, cost: int, work: list[list[int]], whole: bool) -> tuple[int, ...]:
    """Divides units of one cost among the ranks, and returns the cuts between the owners.

    work: of each shard of each replica, increased by the units' cost; whole: every shard updates all units of its
    replica.
    """
    counts: list[int] = []
    for shards, count in zip(work, _spread(units, cost, [sum(shards) for shards in work]), strict=True):
        parts = [count] if whole else _spread(count, cost, shards)
        for shard in range(len(shards)):
            shards[shard] += cost * parts[0 if whole else shard]
        counts += parts
    return 0, *accumulate(counts)


def _spread(units: int, cost: int, work: Sequence[int]) -> list[int]:
    """How many units each rank gets: equally many if possible, otherwise each unit goes to the least work."""
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
