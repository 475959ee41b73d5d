"""Checks that all replicas start from bit-equal weights.

Gradients are summed over the replicas and each replica updates by itself, so replicas that start equal stay equal, and
replicas that start different train different models without any error. The check runs once, before the first step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from quern.train.state import TrainState

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK_WORDS = 1 << 17
"""Words of 8 bytes hashed at a time: temporaries stay in a CPU's cache, and a GPU launches few kernels."""
MULTIPLIER = 6364136223846793005  # odd; Knuth's MMIX generator


def refuse_unequal_replicas(state: TrainState) -> None:
    """Compares the parameters, and the optimizer state that every replica holds, over the data axis.

    The optimizer state that only one rank owns has no second copy to compare. Every rank of the mesh calls this.

    Raises:
        ValueError: on every rank, when the ranks differ. The message names the ranks and a tensor.
    """
    mesh = state.optimizer.mesh
    if mesh.data.size == 1:
        return
    tensors = _replicated(state)
    device = state.optimizer.buckets[0].params.device
    own = torch.stack([checksum(tensor).to(device) for tensor in tensors.values()])
    found = own.new_empty(mesh.world.size * len(own))
    mesh.world.all_gather(found, own).wait()
    rows = [tuple(row) for row in found.view(mesh.world.size, -1).tolist()]
    differing = _differing(rows, mesh.tp)
    if differing:
        (rank, reference), names = differing[0], list(tensors)
        places = [name for name, a, b in zip(names, rows[rank], rows[reference], strict=True) if a != b]
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        raise ValueError(
            f"the ranks do not start from equal weights: {', '.join(f'rank {one} differs' for one, _ in differing)} "
            f"from rank {reference} in {places[0]}{more}. Nothing was trained: start the same command again. If it "
            f"fails again, have the memory of these ranks' machines checked"
        )


def checksum(tensor: Tensor) -> Tensor:
    """Hashes the bits of a tensor and their positions.

    A change of any one element changes the checksum, since each word is multiplied by an odd number modulo 2^64. The
    odd numbers are pseudorandom, so that tensors that differ in many places get different checksums, too.

    Returns:
        int64, without dims, on the tensor's device.
    """
    flat = tensor.detach().reshape(-1)
    per_word = 8 // flat.element_size()
    if flat.storage_offset() % per_word:
        flat = flat.clone()  # a view as words must start at a whole word
    count = len(flat) // per_word * per_word
    words, tail = flat[:count].view(torch.int64), flat[count:].view(BITS[flat.element_size()]).to(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    draws = torch.Generator().manual_seed(0)  # the same on every rank
    weights = (torch.randint(1 << 62, (min(CHUNK_WORDS, max(len(words), per_word)),), generator=draws) | 1).to(
        flat.device
    )
    for chunk in (*words.split(CHUNK_WORDS), tail):
        total = total * MULTIPLIER + (chunk * weights[: len(chunk)]).sum()
    return total


def _replicated(state: TrainState) -> dict[str, Tensor]:
    """The tensors of which each replica has a copy, by name."""
    buckets = state.optimizer.buckets
    shared = {name for bucket in buckets if bucket.share is not None for name, _ in bucket.parameters}
    found: dict[str, Tensor] = {name: p for name, p in state.model.named_parameters() if name not in shared}
    for bucket in state.optimizer.buckets:
        if bucket.small:
            held = {"master": bucket.masters, **bucket.state}
            found |= {f"{name} of {bucket.parameters[0][0]}": tensor for name, tensor in held.items()}
    return found


def _differing(rows: Sequence[tuple[int, ...]], tp: int) -> list[tuple[int, int]]:
    """Returns the ranks that differ from most replicas of their shard, each with a rank that does not."""
    differing = []
    for shard in range(tp):
        ranks = range(shard, len(rows), tp)
        usual, _ = Counter(rows[rank] for rank in ranks).most_common(1)[0]
        reference = next(rank for rank in ranks if rows[rank] == usual)
        differing += [(rank, reference) for rank in ranks if rows[rank] != usual]
    return differing
