"""What every file of experiments/ must keep, at toy size; a new idea is covered by being there."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F

from quern.generate.cache import KVCache, decode
from quern.model.gpt import GPT
from quern.model.loss import loss_sum
from quern.recipe import Recipe
from quern.train import checkpoint
from tests.contracts.idea import STEPS, apart_on_ranks, batches_of, idea_files, state_of, toy, train
from tests.support.ranks import Ranks, running
from tests.support.toy_training import differing, eager, snapshot

pytestmark = pytest.mark.usefixtures("eager")
__all__ = ["eager"]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with running() as server:
        yield server


def test_there_are_ideas() -> None:
    assert {"baseline", "bigram", "swiglu"} <= set(idea_files())


@pytest.mark.parametrize("name", idea_files())
def test_it_trains_and_every_parameter_moves(name: str) -> None:
    recipe = toy(name)
    state = state_of(recipe)
    before = {key: p.detach().clone() for key, p in state.model.named_parameters()}
    losses = train(state, recipe, 0, STEPS)
    assert all(torch.tensor(losses).isfinite()) and losses[-1] < losses[0], losses
    still = [key for key, p in state.model.named_parameters() if torch.equal(p, before[key])]
    assert still == []


@pytest.mark.parametrize("name", idea_files())
def test_cached_is_uncached(name: str) -> None:
    assert cached_apart(toy(name)) <= 1e-5


def cached_apart(recipe: Recipe) -> float:
    """Largest difference of logits: a prompt in two parts, then token by token, against whole rows."""
    model = state_of(recipe).model.eval()
    ids = torch.from_numpy(batches_of(recipe).batch(0).tokens[:3]).long()
    with torch.inference_mode():
        whole = model.logits(model(ids, model.context(ids)))
        cache = KVCache.for_model(model, len(ids), ids.size(1))
        found = []
        for part in (ids[:, :5], ids[:, 5:7]):
            x = cache.prefill(model, part, torch.full((len(ids),), part.size(1)))
            found.append(model.logits(x))
        for at in range(7, ids.size(1)):
            found.append(decode(model, cache, ids[:, at], torch.arange(ids.size(1))))
    expected = [whole[:, 4], whole[:, 6], *whole[:, 7:].unbind(1)]
    return max((one - other).abs().max().item() for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", idea_files())
def test_the_loss_of_evaluation_is_that_of_the_logits(name: str) -> None:
    recipe = toy(name)
    model, batch = state_of(recipe).model.eval(), batches_of(recipe).batch(0)
    ids, targets = (torch.from_numpy(array).long() for array in (batch.tokens, batch.targets))
    with torch.no_grad():
        _, found = loss_sum(model, ids, targets, torch.zeros(ids.shape))
        logits = model.logits(model(ids, model.context(ids)))
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(ids.shape)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", idea_files())
def test_saved_and_loaded_it_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    recipe = toy(name)
    whole, first, second = (state_of(recipe) for _ in range(3))
    train(whole, recipe, 0, STEPS)
    train(first, recipe, 0, 3)
    checkpoint.save(tmp_path, 3, first.slices(), {"state": first.meta()}, keep=1)
    tensors, meta = checkpoint.load(checkpoint.path_of(tmp_path, 3))
    second.restore(tensors, meta["state"])
    train(second, recipe, 3, STEPS)
    assert differing(snapshot(whole), snapshot(second)) == []


@pytest.mark.parametrize("name", idea_files())
def test_two_ranks_are_one(name: str, ranks: Ranks) -> None:
    found = ranks(2, f"{apart_on_ranks.__module__}:{apart_on_ranks.__name__}", name=name)
    assert max(found) <= 1e-5, found


@pytest.mark.parametrize("name", idea_files())
def test_the_other_weights_start_as_in_the_baseline(name: str) -> None:
    """Seeds stay paired: what an idea adds leaves every other initial value as it was."""
    ours = toy(name).make_model(toy(name).model)
    theirs = GPT(toy("baseline").model)
    for model in (ours, theirs):
        model.initialize(3)
    expected = dict(theirs.named_parameters())
    shared = {key: p for key, p in ours.named_parameters() if key in expected and p.shape == expected[key].shape}
    assert "embedding.weight" in shared and "blocks.0.attention.query.weight" in shared
    assert [key for key, p in shared.items() if not torch.equal(p, expected[key])] == []


@pytest.mark.parametrize("name", idea_files())
def test_another_data_seed_gives_other_batches(name: str) -> None:
    """`--from` reads the documents in a new order by this seed."""
    recipe = toy(name)
    one, same, other = (batches_of(replace(recipe, data_seed=seed)).token_hash(0) for seed in (0, 0, 1))
    assert one == same != other


def test_a_lookback_that_is_not_declared_is_refused() -> None:
    recipe = toy("bigram")
    with pytest.raises(ValueError, match="looks 1 tokens back and declares 0: set its `lookback`"):
        cached_apart(replace(recipe, make_model=type("Undeclared", (cast(Any, recipe.make_model),), {"lookback": 0})))


def test_the_cache_contract_can_fail() -> None:
    """Previous tokens that a cache does not know give other logits."""
    bigram: Any = toy("bigram").make_model

    class Forgetful(bigram):
        def before_block(self, layer, x_BTD, kept, tokens_BT, context):  # noqa: ANN001, ANN202
            if layer == 0:
                shifted = F.pad(tokens_BT, (1, 0), value=-1)[:, :-1]  # whole rows only
                kept["bigrams"] = self.bigrams((tokens_BT * 1_000_003 + shifted) % self.bigrams.num_embeddings)
            return x_BTD + self.bigram_scales[layer] * kept["bigrams"]

    assert cached_apart(replace(toy("bigram"), make_model=Forgetful)) > 1e-3
