"""Law: N ranks = 1 rank: loss, every gradient, the clipped norm, updates, checkpoints; whatever the ranks share.

Real processes over gloo, fp32, at sizes that do not divide; micro-batches of which one replica has more, uneven masks.
Each rank compares what it owns with a process of its own that does all.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from quern.train import checkpoint, manifest
from tests.laws.table import Law
from tests.support.ranks import Ranks

BAR = 1e-5
OPTIMIZED, SHARDS = "tests.parallel.compared:optimized", "tests.parallel.compared:optimized_shards"


def record(law: Law, name: str, found: list[dict[str, float]]) -> None:
    """Records and asserts the worst of all ranks for each measure."""
    for measure in found[0]:
        law(f"{name}: {measure}", max(one[measure] for one in found), BAR)


@pytest.mark.parametrize(
    ("count", "masked", "rows", "clip"), [(2, False, 3, None), (3, True, 2, 0.5), (4, True, 1, 0.5)]
)
def test_n_ranks_are_one(count: int, masked: bool, rows: int, clip: float | None, ranks: Ranks, law: Law) -> None:
    found = ranks(count, OPTIMIZED, masked=masked, rows=rows, clip=clip, steps=10 if count == 4 else 4)
    record(law, f"{count} ranks = 1{', uneven masks' if masked else ''}", found)


@pytest.mark.parametrize(
    ("architecture", "count", "tp", "zero", "recomputed"),
    [
        *((architecture, 4, 2, 2, 0) for architecture in ("gpt", "llama", "unet")),
        *(("llama", 2, 1, 3, 2), ("unet", 3, 1, 3, 0), ("gpt", 4, 2, 3, 3)),
    ],
)
def test_replicas_of_shards_are_one(
    architecture: str, count: int, tp: int, zero: int, recomputed: int, ranks: Ranks, law: Law
) -> None:
    """Gradients: test_tensor_law.py."""
    found = ranks(count, SHARDS, tp=tp, zero=zero, architecture=architecture, recomputed=recomputed)
    name = "dp x tp = 1 rank" if zero == 2 else "shared parameters (ZeRO-3) = 1 rank"
    record(law, f"{name}, {architecture}", found)


def test_the_law_can_fail(ranks: Ranks) -> None:
    found = ranks(2, OPTIMIZED, masked=True, rows=3, clip=0.5, steps=2, broken=True)
    assert max(max(one.values()) for one in found) > 100 * BAR, found


def test_a_parameter_without_gradient_is_named_on_every_rank(ranks: Ranks) -> None:
    for message in ranks(2, "tests.parallel.compared:silent"):
        assert "no gradient reached" in message and "value_embeddings.1.weight" in message


CHAINS: dict[str, tuple[str, list[tuple[int, int, int]]]] = {
    ": (2,1) → (1,2) → (2,2) → (1,1), llama": ("llama", [(2, 1, 2), (2, 2, 2), (4, 2, 2), (1, 1, 2)]),
    ": (2,1) → (1,2) → (2,2) → (1,1), unet": ("unet", [(2, 1, 2), (2, 2, 2), (4, 2, 2), (1, 1, 2)]),
    ": 3 → 1 → 2 → 4 → 1 ranks": ("gpt", [(3, 1, 2), (1, 1, 2), (2, 1, 2), (4, 1, 2), (1, 1, 2)]),
    ", with shared parameters, gpt": ("gpt", [(3, 1, 3), (2, 1, 2), (4, 2, 3), (2, 2, 2), (1, 1, 2)]),
}
"""(ranks, tp, ZeRO) that train, or read and write again."""


@pytest.mark.parametrize("chain", CHAINS)
def test_resharded_is_not_resharded(chain: str, ranks: Ranks, tmp_path: Path, law: Law) -> None:
    architecture, layouts = CHAINS[chain]
    files = [str(tmp_path / str(number)) for number in range(len(layouts))]
    for (count, tp, zero), source, target in zip(layouts, [None, *files], files, strict=False):
        paths: dict[str, Any] = {"source": source, "target": target}
        found = ranks(count, "tests.parallel.compared:saved_shards", tp, zero, architecture=architecture, **paths)
        assert found == [[]] * count
    first, last = (checkpoint.load(manifest.path_of(Path(file), 3)) for file in (files[0], files[-1]))
    differing = [name for name in first[0].keys() | last[0].keys() if not torch.equal(first[0][name], last[0][name])]
    law(f"resharded = not resharded{chain}", differing)
    assert first[1] == last[1] and len(first[0]) > 40
