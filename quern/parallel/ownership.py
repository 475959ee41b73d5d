"""Who owns which matrices, and how many elements of them travel from where they are summed to where they are updated.

Parameters of one shape ("units") lie one after the other in a buffer, which is cut into one equal region for each
replica, wherever the cuts fall: nothing is padded but the end. Gradients are summed there. A unit is owned whole, by
one rank of all; ownership is cut between units, in the same order. So what a replica owns is one stretch of the buffer,
and what of it lies in each region is one stretch too: what does not lie in the owner's region goes to the owner before
the update, and comes back after it. A rank sends a region at most, and back what it owns: of n replicas, on average
no more than 2/n of the buffer. Where the units divide by the replicas, regions and ownership are the same.

Owners follow the work: what does not divide goes, unit by unit, to the rank that has the least, the most costly shapes
first (longest processing time first: Graham, 1969). Among the shards of a replica its units are divided in the same
way.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True)
class Ownership:
    """size: elements of a unit on one rank; region: elements of the buffer that each replica sums; cuts: rank
    replica · shards + shard owns units cuts[rank] … cuts[rank + 1] - 1, where shards is 1 if all shards do the same."""

    size: int
    region: int
    cuts: tuple[int, ...]
    replicas: int

    @property
    def shards(self) -> int:
        return (len(self.cuts) - 1) // self.replicas

    def units(self, replica: int, shard: int | None = None) -> range:
        """Owned by one shard, or by all of the replica."""
        first = replica * self.shards
        if shard is None:
            return range(self.cuts[first], self.cuts[first + self.shards])
        return range(self.cuts[first + shard], self.cuts[first + shard + 1])

    def counts(self, replica: int) -> list[int]:
        """Units of each of its shards."""
        return [len(self.units(replica, shard)) for shard in range(self.shards)]

    @cached_property
    def moves(self) -> bool:
        """Whether anything lies outside of its owner's region."""
        return any(self._outside(replica) for replica in range(self.replicas))

    def owners_of_region(self, replica: int) -> list[int]:
        """Elements of its region that each replica owns: they are one after the other in it."""
        low, high = self._region(replica)
        return [_overlap((low, high), self._owned(other)) for other in range(self.replicas)]

    def owned_in_regions(self, replica: int) -> list[int]:
        """Elements that it owns in each replica's region."""
        low, high = self._owned(replica)
        return [_overlap((low, high), self._region(other)) for other in range(self.replicas)]

    def sent(self, replica: int) -> int:
        """Elements that one of its ranks sends to other replicas in a step: of its region to their owners, and of what
        it owns back."""
        low, high = self._region(replica)
        summed = min(high, self.cuts[-1] * self.size) - min(low, self.cuts[-1] * self.size)
        kept = _overlap((low, high), self._owned(replica))
        return summed - kept + self._outside(replica) if self.moves else 0

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


def share_out(units: int, cost: int, work: list[list[int]], whole: bool) -> tuple[int, ...]:
    """The cuts between owners of `units` of one cost each; adds it to `work`, which is that of each replica's shards.

    whole: every shard holds whole units and does what its replica does."""
    counts: list[int] = []
    for shards, count in zip(work, _spread(units, cost, [sum(shards) for shards in work]), strict=True):
        parts = [count] if whole else _spread(count, cost, shards)
        for shard in range(len(shards)):
            shards[shard] += cost * parts[0 if whole else shard]
        counts += parts
    return 0, *accumulate(counts)


def _spread(units: int, cost: int, work: Sequence[int]) -> list[int]:
    """How many each gets: the same where that can be, else one after the other to those with the least work."""
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
