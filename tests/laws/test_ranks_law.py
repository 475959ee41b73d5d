"""Law: N ranks = 1 rank: loss, every gradient, the clipped norm, one and ten updates, whatever the masks.

Real processes over gloo, fp32. Each rank compares what it owns with a process of its own that does all.
"""

from collections.abc import Callable, Iterator

import pytest

from tests.parallel.compared import BROKEN
from tests.parallel.ranks import Ranks, running

BAR = 1e-5
Law = Callable[[str, float | int | str, str], None]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with running() as server:
        yield server


@pytest.mark.parametrize(
    ("count", "masked", "rows", "clip"),
    [(2, False, 3, None), (3, True, 2, 0.5), (4, False, 8, 0.5), (4, True, 1, None)],
)
def test_n_ranks_are_one(count: int, masked: bool, rows: int, clip: float | None, ranks: Ranks, law: Law) -> None:
    found = ranks(count, "tests.parallel.compared:optimized", masked=masked, rows=rows, clip=clip)
    for measure in found[0]:
        worst = max(one[measure] for one in found)
        assert worst <= BAR, (measure, found)
        law(f"{count} ranks = 1{', uneven masks' if masked else ''}: {measure}", worst, "≤ 1e-5")


@pytest.mark.parametrize("broken", [name for name in BROKEN if name])
def test_the_law_can_fail(broken: str, ranks: Ranks) -> None:
    found = ranks(2, "tests.parallel.compared:optimized", masked=True, rows=3, clip=0.5, broken=broken)
    assert max(max(one.values()) for one in found) > 100 * BAR, found


def test_a_parameter_without_gradient_is_named_on_every_rank(ranks: Ranks) -> None:
    for message in ranks(2, "tests.parallel.compared:silent"):
        assert "no gradient reached" in message and "value_embeddings.1.weight" in message
