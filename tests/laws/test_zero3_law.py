"""Law: replicas that share their parameters = replicas that hold them whole = 1 rank; and what they hold falls.

Real processes over gloo, fp32, at sizes that do not divide, in micro-batches of which one replica has more.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quern.train import checkpoint, manifest
from tests.parallel.compared import SHARING_BROKEN
from tests.support.ranks import Ranks

BAR = 1e-5
Law = Callable[[str, float | int | str, str], None]
COMPARED = "tests.parallel.compared:optimized_shards"


@pytest.mark.parametrize(
    ("architecture", "count", "tp", "recomputed"),
    [("gpt", 2, 1, 0), ("llama", 2, 1, 2), ("unet", 3, 1, 0), ("gpt", 4, 2, 3)],
)
def test_replicas_that_share_parameters_are_one(
    architecture: str, count: int, tp: int, recomputed: int, ranks: Ranks, law: Law
) -> None:
    found = ranks(count, COMPARED, tp=tp, zero=3, architecture=architecture, recomputed=recomputed)
    for name in found[0]:
        worst = max(one[name] for one in found)
        assert worst <= BAR, (name, found)
        law(f"shared parameters (ZeRO-3) = 1 rank, {architecture}: {name}", worst, "≤ 1e-5")


@pytest.mark.parametrize("broken", SHARING_BROKEN)
def test_the_law_can_fail(broken: str, ranks: Ranks) -> None:
    found = ranks(2, COMPARED, zero=3, architecture="llama", broken=broken)
    assert max(max(one.values()) for one in found) > 100 * BAR, found


def test_checkpoints_are_the_same(ranks: Ranks, tmp_path: Path, law: Law) -> None:
    """(dp, tp, ZeRO): (3, 1, 3) → (2, 1, 2) → (2, 2, 3) → (1, 2, 2) → (1, 1, 2)."""
    layouts = [(3, 1, 3), (2, 1, 2), (4, 2, 3), (2, 2, 2), (1, 1, 2)]
    for number, (count, tp, zero) in enumerate(layouts):
        source, target = str(tmp_path / str(number - 1)) if number else None, str(tmp_path / str(number))
        saved = "tests.parallel.compared:saved_shards"
        assert ranks(count, saved, tp, zero, architecture="gpt", source=source, target=target) == [[]] * count
    first, last = (checkpoint.load(manifest.path_of(tmp_path / str(number), 3)) for number in (0, 4))
    differing = [name for name in first[0].keys() | last[0].keys() if not torch.equal(first[0][name], last[0][name])]
    law("resharded = not resharded, with shared parameters, gpt", len(differing), "0")
    assert differing == [] and len(first[0]) > 40
