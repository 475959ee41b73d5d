"""Comparisons whose arms train on the machines of a Ray cluster; here its only machine is this one."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quern.cluster import connect
from quern.flags.recipe_file import read_recipe_file
from quern.lab.arms import Arm, in_process, on_cluster
from quern.recipes.gpt import RECIPE

ray = pytest.importorskip("ray", reason="the extra ray is not installed")
MACHINE = {"device": "cpu", "dtype": "fp32", "compile": False, "threads": 1}
IDEA = Path(__file__).parents[2] / "experiments" / "leaky_relu.py"


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
        yield
        ray.shutdown()


def arms(data: Path) -> dict[str, Arm]:
    idea, source = read_recipe_file(IDEA)
    own: dict[str, Any] = {
        "depth": 1,
        "data": str(data),
        "text": replace(RECIPE.text, vocab_size=300, val_megabytes=0.002),
        "model": replace(RECIPE.model, width=32, head_dim=16, context=32),
        "train": replace(RECIPE.train, steps=4, batch_tokens=64),
    }
    return {
        "baseline": Arm("baseline", replace(RECIPE, **own)),
        "idea": Arm("idea", replace(idea, **own), IDEA, source),
    }


@pytest.mark.campaign
def test_arms_on_a_cluster_are_the_arms_of_this_machine(cluster: None, tmp_path: Path) -> None:
    data = tmp_path / "text.txt"
    data.write_text("\n\n".join(f"the {word} is number {word * 7 % 90}, and so on." for word in range(900)))
    here, there = (make(tmp_path / "out", MACHINE) for make in (in_process, on_cluster))
    ours, theirs = (
        {name: [trial.bpb for trial in train(arm, [(1, 1)])] for name, arm in arms(data).items()}
        for train in (here, there)
    )
    assert ours == theirs and ours["idea"] != ours["baseline"] and None not in ours["idea"]
    minutes = replace(RECIPE, train=replace(RECIPE.train, minutes=1.0))
    with pytest.raises(RuntimeError, match=r"the arm baseline process failed: .*give --train\.steps"):
        list(there(Arm("baseline", minutes), [(1, 1)]))


@pytest.mark.campaign
def test_an_address_without_a_cluster_is_refused() -> None:
    ray.shutdown()
    for address in ("127.0.0.1:1", "localhost", "ray://127.0.0.1:10001"):
        with pytest.raises(ValueError, match=f"no Ray cluster at {address} .*ray start --head"):
            connect(address)
