"""Law: N ranks = 1 rank: loss, every gradient, the clipped norm, one and ten updates, whatever the masks.

Real processes over gloo, fp32. Each rank compares what it owns with a process of its own that does all.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quern.train import checkpoint, manifest
from tests.parallel.compared import BROKEN
from tests.support.ranks import Ranks
from tests.support.toy_training import toy_loader

BAR = 1e-5
Law = Callable[[str, float | int | str, str], None]


@pytest.mark.parametrize(
    ("count", "masked", "rows", "clip"),
    [(2, False, 3, None), (3, True, 2, 0.5), (4, True, 1, None)],
)
def test_n_ranks_are_one(count: int, masked: bool, rows: int, clip: float | None, ranks: Ranks, law: Law) -> None:
    found = ranks(count, "tests.parallel.compared:optimized", masked=masked, rows=rows, clip=clip)
    for measure in found[0]:
        worst = max(one[measure] for one in found)
        assert worst <= BAR, (measure, found)
        law(f"{count} ranks = 1{', uneven masks' if masked else ''}: {measure}", worst, "≤ 1e-5")


@pytest.mark.parametrize("architecture", ["gpt", "llama", "unet"])
def test_replicas_of_shards_are_one(architecture: str, ranks: Ranks, law: Law) -> None:
    """(dp, tp) of (2, 2): losses, clipped norms, one and ten updates. Gradients: test_tensor_law.py."""
    found = ranks(4, "tests.parallel.compared:optimized_shards", tp=2, architecture=architecture)
    worst = {name: max(one[name] for one in found) for name in found[0]}
    for name, value in worst.items():
        law(f"dp x tp = 1 rank, {architecture}: {name}", value, "≤ 1e-5")
    assert max(worst.values()) <= BAR, worst


@pytest.mark.parametrize("broken", [name for name in BROKEN if name])
def test_the_law_can_fail(broken: str, ranks: Ranks) -> None:
    found = ranks(2, "tests.parallel.compared:optimized", masked=True, rows=3, clip=0.5, broken=broken)
    assert max(max(one.values()) for one in found) > 100 * BAR, found


def test_a_parameter_without_gradient_is_named_on_every_rank(ranks: Ranks) -> None:
    for message in ranks(2, "tests.parallel.compared:silent"):
        assert "no gradient reached" in message and "value_embeddings.1.weight" in message


def test_resharded_is_not_resharded(ranks: Ranks, tmp_path: Path, law: Law) -> None:
    """Trained on 3 ranks; read and written again by 1, 2, 4 and 1."""
    ranks(3, "tests.parallel.compared:saved", source=None, target=str(tmp_path / "0"), steps=3)
    for number, count in enumerate((1, 2, 4, 1), start=1):
        source, target = str(tmp_path / str(number - 1)), str(tmp_path / str(number))
        assert ranks(count, "tests.parallel.compared:saved", source=source, target=target, steps=0) == [[]] * count
    first, last = (checkpoint.load(manifest.path_of(tmp_path / str(number), 3)) for number in (0, 4))
    assert first[1] == last[1]
    differing = [name for name in first[0].keys() | last[0].keys() if not torch.equal(first[0][name], last[0][name])]
    law("resharded = not resharded: 3 → 1 → 2 → 4 → 1 ranks", len(differing), "0")
    assert differing == [] and len(first[0]) > 40


@pytest.mark.parametrize("architecture", ["llama", "unet"])
def test_replicas_become_shards_and_back(architecture: str, ranks: Ranks, tmp_path: Path, law: Law) -> None:
    """(dp, tp): (2, 1) → (1, 2) → (2, 2) → (1, 1). gpt: test_zero3_law.py."""
    for number, (count, tp) in enumerate([(2, 1), (2, 2), (4, 2), (1, 1)]):
        source, target = str(tmp_path / str(number - 1)) if number else None, str(tmp_path / str(number))
        found = ranks(
            count, "tests.parallel.compared:saved_shards", tp, architecture=architecture, source=source, target=target
        )
        assert found == [[]] * count
    first, last = (checkpoint.load(manifest.path_of(tmp_path / str(number), 3)) for number in (0, 3))
    differing = [name for name in first[0].keys() | last[0].keys() if not torch.equal(first[0][name], last[0][name])]
    law(f"resharded = not resharded: (2,1) → (1,2) → (2,2) → (1,1), {architecture}", len(differing), "0")
    assert differing == [] and len(first[0]) > 40


@pytest.mark.parametrize("count", [2, 3, 4, 6])
def test_any_number_of_ranks_reads_the_same_global_batches(count: int) -> None:
    loader = toy_loader()
    for step in range(loader.steps_per_epoch + 2):
        whole, parts = loader.batch(step), [loader.batch(step, rank, count) for rank in range(count)]
        for rank, part in enumerate(parts):
            assert (part.tokens == whole.tokens[rank::count]).all() and (part.mask == whole.mask[rank::count]).all()
        assert sum(part.rows for part in parts) == whole.rows
