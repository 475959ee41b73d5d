"""Law: a model cut into shards = the whole one: loss, every gradient, evaluation; at sizes that do not divide.

On processes that talk over gloo: 111 tokens in rows of 37, a vocabulary of 1,001, grouped queries, uneven masks,
documents and windows. The bytes that travel are those of the formula in parallel/plan.py.
"""

import pytest

from tests.laws.table import Law
from tests.parallel.sharded import ARCHITECTURES
from tests.support.ranks import Ranks

BAR = 1e-5
LAYOUTS = ((2, 2, True, 0), (4, 4, False, 0), (4, 2, True, 3))
"""(ranks, tp, accumulated in micro-batches of unequal size, blocks that run again); ranks / tp replicas."""
COMPARED, GENERATED = "tests.parallel.sharded:compared", "tests.parallel.sharded:generated"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_shards_are_one_model(architecture: str, ranks: Ranks, law: Law) -> None:
    worst: dict[str, float] = {}
    for count, tp, accumulated, recomputed in LAYOUTS:
        how = {"architecture": architecture, "accumulated": accumulated, "recomputed": recomputed}
        for found in ranks(count, COMPARED, tp=tp, **how):
            worst = {name: max(value, worst.get(name, 0.0)) for name, value in found.items()}
    wrong_bytes = worst.pop("bytes")
    for name, value in worst.items():
        law(f"tensor and sequence parallel = 1 rank, {architecture}: {name}", value, BAR, "relative, fp32")
    law(f"bytes sent by the model group = formula, {architecture}", wrong_bytes)


@pytest.mark.parametrize(("architecture", "count"), [("gpt", 4), ("llama", 2), ("unet", 2)])
def test_shards_generate_as_one_model(architecture: str, count: int, ranks: Ranks, law: Law) -> None:
    """With caches of a part of the heads."""
    worst = max(ranks(count, GENERATED, tp=count, architecture=architecture))
    law(f"shards generate as 1 rank, {architecture}: logits", worst, BAR, "relative, fp32")


def test_the_check_can_fail(ranks: Ranks) -> None:
    found = ranks(2, COMPARED, tp=2, architecture="gpt", broken=True)
    assert max(max(one["loss"], one["gradients"]) for one in found) > 100 * BAR
