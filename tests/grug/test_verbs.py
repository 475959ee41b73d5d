"""The verbs of `quern grug`: PyTorch agrees with what they write, and they train the `gpt` recipe's numbers."""

from tests.support.jax_process import Grug


def test_models_move_both_ways(grug: Grug) -> None:
    found = grug("verbs:chain")
    assert found["verbs"] == ["", "", ""] and found["import"] == ""
    assert found["step"] == found["imported step"] == 4
    assert found["bits per byte"] <= 1e-5 and found["logits"] <= 1e-5, found
    assert "no run 'twin'" in found["export before training"]
    assert "has a JAX model already" in found["import over a JAX model"]
    assert "has a base model that PyTorch trained" in found["export over PyTorch's model"]
    assert "the JAX twin computes the `gpt` recipe only" in found["import of another architecture"]


def test_the_twin_trains_the_numbers_of_the_gpt_recipe(grug: Grug) -> None:
    found = grug("verbs:recipes")
    assert found["as it is"] == found["every number changed"] == []
    assert found["one number"] == ["optim.gate_lr"] and len(found["all"]) == 46
