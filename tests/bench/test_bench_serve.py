"""The chats of `quern bench serve`: what their figures count, but no speed."""

from dataclasses import replace

import pytest

from quern.bench.data import Setup
from quern.bench.material import reference, talking_engine
from quern.bench.serve import NAME, QUESTION, TURN_REPLY, second_turns
from quern.serve.server import create_app
from tests.support.http_server import running
from tests.support.toy_training import CPU


@pytest.mark.parametrize("megabytes", [8, 0])
def test_a_second_turn_reads_only_what_is_new(megabytes: float) -> None:
    """The first turn's prompt is cached, if there is a cache, and the second turn almost fills the context."""
    recipe = reference(quick=True, seed=0)
    recipe = replace(recipe, model=replace(recipe.model, context=256))
    engine = talking_engine(recipe, CPU, prefix_megabytes=megabytes)
    setup = Setup(CPU, quick=True, rounds=1)
    with running(create_app({NAME: engine})) as url:
        first, second, ratio = second_turns(setup, int(url.rpartition(":")[2]), engine.context)
    prompt = engine.context - 9 - 2 * TURN_REPLY - QUESTION + 4  # BOS, two around the question, one before the reply
    assert first["name"] == f"first turn of {prompt} tokens: time to first token, median"
    assert ratio["values"] == pytest.approx([a / b for a, b in zip(first["values"], second["values"], strict=True)])
    assert len(ratio["values"]) == 1
    if engine.prefixes is None:
        assert ratio["note"] == "0% of the prompt cached"
        return
    share = float(ratio["note"].partition("%")[0]) / 100
    assert prompt / engine.context <= share < 1
    assert engine.prefixes.counts["hit"] == pytest.approx(2 * 8 * prompt, rel=0.1), "first turns were cached as well"
