"""The JAX twin's model and step: sharding, compilation, the effects of a step, evaluation."""

import pytest

from tests.support.jax_process import Grug

ROWS = "8@(replica_dcn,replica,data)"


def test_types_say_how_arrays_are_cut(grug: Grug) -> None:
    assert grug("pieces:shardings") == {
        "hidden": f"float32[{ROWS},16,32]",
        "logits": f"float32[{ROWS},16,62@model]",
        "parameters, gradients and their layout agree": "True",
        "query": "float32[32@model,32@data]",
        "momentum": "float32[32@model,32@data]",
    }


def test_steps_share_one_program_and_lower_the_loss(grug: Grug) -> None:
    found = grug("pieces:compiles_once")
    assert found["programs"] == 1
    assert found["shapes"]
    assert found["losses"] == sorted(found["losses"], reverse=True) and len(set(found["losses"])) == 4
    assert found["keys"] == 5


def test_the_start_does_not_depend_on_the_mesh(grug: Grug) -> None:
    assert grug("pieces:same_start_everywhere")


def test_a_step_that_is_not_finite_changes_nothing(grug: Grug) -> None:
    assert all(grug("pieces:not_finite").values())


def test_bits_per_byte_are_the_other_sides(grug: Grug) -> None:
    assert grug("pieces:bits_per_byte") <= 1e-5


def test_flops_are_the_other_sides(grug: Grug) -> None:
    ours, theirs = grug("pieces:flops")
    assert ours == pytest.approx(theirs, rel=2e-3)  # which has the products of the gates too


def test_the_peak_is_measured_whatever_mesh_is_set(grug: Grug) -> None:
    assert grug("pieces:peak") > 0
