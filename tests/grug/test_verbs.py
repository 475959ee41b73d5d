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
    assert found["one number"] == ["optim.gate_lr"] and len(found["all"]) == 45


def test_a_file_trains_on_data_and_its_run_keeps_it(grug: Grug) -> None:
    found = grug("verbs:from_a_file")
    assert found["verbs"] == ["", "", ""] and found["trained"] == [6, "attention_sink", "Sinks"]
    assert found["sinks move"] and max(found["perplexity"]) <= 1e-6 and len(found["perplexity"]) == 2
    assert "make-model idea:Sinks" in found["without the file"]
    assert "comes from a file ('attention_sink')" in found["export"]
    assert all("2 heads cannot be spread over --mesh.model 4: use one of [1, 2]" in said for said in found["axis"]), (
        found
    )


def test_a_study_trains_files_of_the_twin(grug: Grug) -> None:
    found = grug("verbs:trials")
    assert found["repeats"] and all(found["counts"]) and found["curve"] == [2, 3]
    assert found["added"] == 2 and 0 < found["gap"] < 0.3
