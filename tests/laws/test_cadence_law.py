"""Law: groups updated on every second step: N ranks = 1 rank, and resumed = not resumed between two updates."""

from pathlib import Path

import pytest

from tests.laws.table import Law
from tests.support.ranks import Ranks


@pytest.mark.parametrize(("count", "tp"), [(3, 1), (4, 2)])
def test_n_ranks_are_one(count: int, tp: int, ranks: Ranks, law: Law, tmp_path: Path) -> None:
    found = ranks(count, "tests.parallel.compared:every_second", tp, folder=str(tmp_path))
    worst = max(max(one["worst"], one["reshaped"]) for one in found)
    law(f"updates on every second step, {count} ranks (tp {tp}) = 1: losses, norms, state", worst, 1e-5)
    differing = [name for one in found for name in one["differing"]]
    law(f"updates on every second step, {count} ranks (tp {tp}): resumed between them", differing)
    for one in found:
        first, second = one["sent"][:4:2], one["sent"][1:4:2]
        assert max(first) < min(second), one["sent"]
        assert tp > 1 or max(first) < 0.9 * min(second), one["sent"]
