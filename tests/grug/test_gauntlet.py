"""Every experiment passes the gauntlet's checks, a broken one fails; the sinks' copy without sinks equals the core."""

import pytest

from tests.support.jax_process import ROOT, Grug

EXPERIMENTS = sorted(path.stem for path in (ROOT / "experiments" / "grug").glob("*.py"))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_passes(grug: Grug, name: str) -> None:
    found = grug("gauntlet_checks:checks", name=name)
    assert len(found) == 6 and all(found.values()), found


BROKEN = {"reference": "fast attention = reference", "gradient": "parameters without", "sharding": "devices = 1, loss"}


@pytest.mark.parametrize(("how", "notices"), BROKEN.items())
def test_a_broken_experiment_is_noticed(grug: Grug, how: str, notices: str) -> None:
    found = grug("gauntlet_checks:broken", how=how)
    assert any(notices in check for check in found), found


def test_without_sinks_the_copy_is_the_core(grug: Grug) -> None:
    found = grug("gauntlet_checks:sinks_at_minus_infinity")
    assert found["off"] <= 1e-5
    assert found["on"] > 1e-3
