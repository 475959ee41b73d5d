"""Splits the work of an evaluation over the ranks.

The batches are those of one process, and each is computed whole by one rank. So a result does not depend on the number
of ranks: with equal threads and dtype its bits are the same. Every rank gets all results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

from quern.mesh import ProcessGroup

Result = TypeVar("Result")


def own_part(work: Sequence[Result] | Iterator[Result], group: ProcessGroup | None) -> Iterator[Result]:
    """Every size-th piece of work, from this rank's on. group: None is a single process."""
    return islice(work, 0 if group is None else group.rank, None, 1 if group is None else group.size)


def is_main(group: ProcessGroup | None) -> bool:
    """Whether this rank writes and prints."""
    return group is None or group.rank == 0


def on_ranks(
    batches: Sequence[Sequence[int]],
    compute: Callable[[Sequence[int]], Sequence[Result]],
    group: ProcessGroup | None,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Result]:
    """Computes the results of numbered items, each batch on one rank. All ranks call this, and get all results.

    Args:
        batches: The numbers of the items; each from 0 on is in one batch. Equal on all ranks.
        compute: Takes a batch, and returns a result for each of its items.
        group: The ranks; None is a single process.
        progress: Called with about how many items all ranks have done.
    """
    found: list[tuple[int, Result]] = []
    total, ranks = sum(map(len, batches)), 1 if group is None else group.size
    for batch in own_part(batches, group):
        found += zip(batch, compute(batch), strict=True)
        progress(min(total, len(found) * ranks))
    parts = [found] if group is None else group.gather_objects(found)
    return [result for _, result in sorted((pair for part in parts for pair in part), key=lambda pair: pair[0])]
