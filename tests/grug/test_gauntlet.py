"""The core and every experiment pass the gauntlet, broken ones fail; the sinks' file is core.py and its edit."""

from functools import cache

import pytest

from tests.support.jax_process import Grug
from tests.support.line_server import ROOT

EXPERIMENTS = sorted(path.stem for path in (ROOT / "experiments" / "grug").glob("*.py"))


@pytest.mark.parametrize("name", ["gpt", *EXPERIMENTS])
def test_every_experiment_passes(grug: Grug, name: str) -> None:
    found = grug("gauntlet_checks:checks", name=name)
    assert len(found) == (10 if name == "gpt" else 7) and all(found.values()), found


@pytest.mark.parametrize("notices", ["fast attention = reference", "parameters without", "devices = 1, loss"])
def test_a_broken_experiment_is_noticed(grug: Grug, notices: str) -> None:
    """In three ways, each of which one check sees."""
    found = broken(grug)
    assert any(notices in check for check in found) and len(found) < 6, found


@cache
def broken(grug: Grug) -> list[str]:
    return grug("gauntlet_checks:broken")


@pytest.mark.parametrize("fault", ["a wide window", "a narrow window", "a block's first key", "a later key"])
def test_a_fault_in_attention_is_far_outside_the_bound(grug: Grug, fault: str) -> None:
    found = grug("gauntlet_checks:noticed", fault=fault)
    assert len(found) == (3 if fault == "a narrow window" else 1) and min(found.values()) > 20, found


def test_the_sinks_are_the_core_and_their_edit(grug: Grug) -> None:
    found = grug("gauntlet_checks:edits")
    assert found["recipe"] == ["make_model", "name"] and found["step"] == ["core"]
    assert found["functions"] == ["attention", "forward", "group_of", "init_parameters", "reference_attention"]
    assert found["rules"] and found["start"] and found["removed"] == {}
    layers = found["added"].pop("logistic")  # one gate of a sink in each layer
    assert layers == 2 and set(found["added"]) <= {"sub", "mul", "broadcast_in_dim", "convert_element_type", "reshape"}
    assert found["off"] <= 1e-6 and found["on"] > 1e-3


def test_a_recipe_of_the_other_library_is_refused(grug: Grug) -> None:
    said = grug("gauntlet_checks:refused")
    assert "train it with `quern grug train" in said["torch"]
    assert "make_model = document_mask:DocumentsGPT, which is PyTorch's" in said["model"]
    assert "make_rules = adamw_everywhere:rules, which is PyTorch's" in said["rules"]
