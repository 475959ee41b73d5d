"""Checkpoints of the JAX twin are restored bit for bit on any mesh, damage is noticed; the bridge to PyTorch."""

from collections.abc import Callable

from tests.support.jax_process import Grug


def test_saved_is_restored_on_any_mesh(grug: Grug, law: Callable[[str, float | int | str, str], None]) -> None:
    found = grug("pieces:checkpoints")
    assert found["kept"] == [2, 3]
    assert found["meta"] == {"counters": {"step": 3}}
    assert found["damage"] == {"missed": [], "named": True, "whole again": True}
    verdicts = [value for name, value in found.items() if name.startswith(("bit for bit", "cut for"))]
    assert len(verdicts) == 8 and all(verdicts), found


def test_the_bridge_changes_no_bit_and_names_what_does_not_fit(grug: Grug) -> None:
    found = grug("pieces:bridge")
    assert found["equal"] and found["deviation"] == 0.0 and found["facts"] == {"step": 3}
    assert "head.weight is missing" in found["errors"][0]
    assert "extra is unknown" in found["errors"][1]
    assert "smear_scale is (2,), not (1,)" in found["errors"][2]
