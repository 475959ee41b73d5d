"""Who owns which matrices: nothing is padded, the work is even, and what one rank sends another expects."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from quern.estimate.layout import Layout, lay_out
from quern.parallel.buckets import Bucket
from quern.parallel.sharding import Ownership, share_out
from quern.resolve import resolve
from tests.support.models import RECIPES

GRID = [
    ("gpt", 6, 2, 1), ("gpt", 12, 5, 1), ("gpt", 12, 8, 1), ("gpt", 12, 64, 1), ("gpt", 12, 4, 2), ("gpt", 20, 32, 2),
    ("gpt", 32, 512, 1), ("llama", 12, 64, 1), ("unet", 12, 16, 1), ("unet", 12, 32, 2),
]  # fmt: skip


def layout(architecture: str, depth: int, dp: int, tp: int) -> Layout:
    made = resolve(replace(RECIPES[architecture], depth=depth))
    context = made.model.context
    assert context
    return lay_out(replace(made, train=replace(made.train, batch_tokens=dp * context)), torch.bfloat16, dp, tp)


def unit_flops(bucket: Bucket, tp: int) -> int:
    """FLOPs of the Gram matrices of one parameter, whole, up to a factor."""
    assert bucket.stack is not None
    *several, R, C = bucket.parameters[0][1].shape
    if bucket.stack.exchange is not None:
        R, C = (tp * R, C) if bucket.stack.exchange == 1 else (R, tp * C)
    return torch.Size(several).numel() * R * C * min(R, C)


def imbalance(made: Layout) -> float:
    """The most that a rank has, over what none could have less than."""
    total, largest = [0] * (made.dp * made.tp), 0  # of each rank; the most that cannot be divided
    for bucket in made.buckets:
        if bucket.stack is None:
            continue
        owners, cost = bucket.stack.ownership, unit_flops(bucket, made.tp)
        largest = max(largest, cost)
        for rank in range(len(total)):
            shard = rank % made.tp if owners.shards > 1 else 0
            total[rank] += cost * len(owners.units(rank // made.tp, shard))
    return max(total) / max(largest, sum(total) / len(total))


@pytest.mark.parametrize(("architecture", "depth", "dp", "tp"), GRID)
def test_nothing_is_padded_and_the_work_is_even(architecture: str, depth: int, dp: int, tp: int) -> None:
    made = layout(architecture, depth, dp, tp)
    held = sum(p.numel() for p in made.shard.parameters())
    padding = 1 - held / sum(bucket.params.numel() for bucket in made.buckets)
    assert 0 <= padding <= 0.001
    assert imbalance(made) <= 1.25
    assert max(len(bucket.region_grads) * dp for bucket in made.buckets if bucket.stack) < held / 3


def test_what_divides_stays_where_it_is_summed() -> None:
    assert not any(bucket.moves for bucket in layout("gpt", 12, 4, 1).buckets)


def test_by_hand() -> None:
    """Three units of 10 elements; two replicas, of which the first has work: 0 | 1 2, summed as 0 … 15 | 16 … 29."""
    done = [[7], [0]]
    cuts = share_out(3, 5, done, whole=True)
    assert cuts == (0, 1, 3) and done == [[12], [10]]
    owners = Ownership(10, 16, cuts, 2)
    assert owners.moves
    assert owners.owners_of_region(0) == [10, 6] and owners.owners_of_region(1) == [0, 14]
    assert owners.owned_in_regions(0) == [10, 0] and owners.owned_in_regions(1) == [6, 14]
    assert [owners.sent(replica) for replica in (0, 1)] == [(6, 0), (0, 6)]


@pytest.mark.parametrize("seed", range(30))
def test_what_is_sent_is_what_is_expected(seed: int) -> None:
    """Any numbers: each unit has one owner, each element is sent once, and twice between no more than needed."""
    pick = random.Random(seed)
    units, size, replicas, shards = pick.randint(1, 30), pick.randint(1, 9), pick.randint(1, 12), pick.randint(1, 3)
    done = [[pick.randint(0, 50) for _ in range(shards)] for _ in range(replicas)]
    before = sum(map(sum, done))
    cuts = share_out(units, 4, done, whole=False)
    owners = Ownership(size, -(-units * size // replicas) + pick.randint(0, 3), cuts, replicas)
    assert cuts[0] == 0 and cuts[-1] == units and all(low <= high for low, high in pairwise(cuts))
    assert len(cuts) == replicas * shards + 1 and sum(map(sum, done)) == before + 4 * units
    sums = [owners.owners_of_region(replica) for replica in range(replicas)]
    owned = [owners.owned_in_regions(replica) for replica in range(replicas)]
    assert [list(column) for column in zip(*sums, strict=True)] == owned
    assert sum(map(sum, sums)) == units * size
    for replica in range(replicas):
        kept = sums[replica][replica]
        assert owners.sent(replica) == (sum(sums[replica]) - kept, sum(owned[replica]) - kept)
