"""The speedrun recipe and Llama's with AdamW: at the size of its source each has the source's rates and updates."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from quern.data.batch import Batch
from quern.optim.adamw import AdamW
from quern.optim.groups import ParameterGroup, make_groups
from quern.optim.muon import PlainMuon
from quern.optim.schedule import Multipliers
from quern.recipe import Resolved
from quern.recipes.llama_adamw import RECIPE as LLAMA
from quern.recipes.unet import RECIPE
from quern.resolve import resolve
from quern.train.state import build_model, build_state
from quern.train.step import train_step
from tests.support.toy_training import CPU

SPEEDRUN = replace(
    RECIPE,
    depth=12,
    model=replace(RECIPE.model, context=48 * 1024, vocab_size=50_257, bos=50_256),
    train=replace(RECIPE.train, steps=1770, batch_tokens=8 * 48 * 1024, micro_batch_tokens=48 * 1024),
)


def groups_of(recipe: Resolved) -> list[ParameterGroup]:
    with torch.device("meta"):
        model = recipe.make_model(recipe.model)
    return make_groups(model.parameter_groups(), recipe.make_rules(recipe), model.named_parameters())


def test_at_the_sources_size_rates_and_rules_are_the_sources() -> None:
    recipe = resolve(SPEEDRUN)
    assert (recipe.model.width, recipe.model.heads, recipe.model.head_dim) == (768, 6, 128)
    groups = groups_of(recipe)
    rates = {group.name: group.lr for group in groups}
    expected = {"matrices": 0.05, "head": 0.22, "embedding": 0.6, "value_embeddings": 0.6, "scales": 0.04}
    assert rates == pytest.approx(expected)
    for group in groups:
        matrices = group.name == "matrices"
        assert group.rule == (PlainMuon(5) if matrices else AdamW((0.8, 0.95), recipe.optim.eps, 0.0))
        assert all(p.ndim == 1 for _, p in group.parameters) == (group.name == "scales")


@pytest.mark.usefixtures("eager")
def test_adam_moves_as_far_as_in_the_source_whose_loss_is_a_sum() -> None:
    """The source's Adam on the loss summed over one GPU's 48k tokens, which are the same 4,096 in twelve parts."""
    context, vocabulary, parts = 256, 2048, 12
    shape = replace(RECIPE.model, width=32, head_dim=32, context=context, vocab_size=vocabulary, bos=0)
    train = replace(SPEEDRUN.train, micro_batch_tokens=4096)
    recipe = resolve(replace(RECIPE, depth=2, model=shape, train=train))
    ids = np.random.default_rng(0).zipf(1.2, (4096 // context, context + 1)).clip(max=vocabulary - 1)
    ids[:, 0] = 0
    tokens, targets = torch.from_numpy(ids[:, :-1]), torch.from_numpy(ids[:, 1:])
    batch = Batch(ids[:, :-1], ids[:, 1:], np.ones_like(ids[:, 1:], dtype=bool))
    model = build_model(recipe, CPU, 0)
    state = build_state(recipe, CPU, model)
    rules, groups = recipe.make_rules(recipe), model.parameter_groups()
    groups = {name: [p for _, p in groups[name]] for name in groups if name != "matrices"}
    theirs = {name: [p.detach().clone().requires_grad_() for p in groups[name]] for name in groups}
    options = [{"params": theirs[name], "lr": rules[name].lr} for name in theirs]
    adam = torch.optim.Adam(options, betas=(0.8, 0.95), eps=1e-10)
    for step in range(4):
        total = F.cross_entropy(model.logits(model(tokens, model.context(tokens))).flatten(0, 1), targets.flatten())
        (parts * targets.numel() * total).backward()
        with torch.no_grad():
            for p, copy in zip(sum(groups.values(), []), sum(theirs.values(), []), strict=True):
                copy.copy_(p)
                copy.grad = p.grad.clone()
        before = {name: [p.detach().clone() for p in groups[name]] for name in groups}
        adam.step()
        model.zero_grad()
        train_step(state, batch, Multipliers(momentum=0.85, decay=0.0), CPU, micro_batch_rows=len(ids))
        if step < 2:
            continue  # the head starts at zero: value embeddings have gradients from the third step on
        for name in groups:
            ours, expected = (
                torch.cat([(p - old).detach().flatten() for p, old in zip(after[name], before[name], strict=True)])
                for after in (groups, theirs)
            )
            assert ours.norm() / expected.norm() >= 0.9998, name
            assert (ours - expected).norm() <= 1e-4 * expected.norm(), name


@pytest.mark.parametrize(
    ("step", "lr", "momentum"),
    # 1,770 steps: flat until 1,062, then down to a tenth over 708; momentum up over 300.
    [(0, 1.0, 0.85), (150, 1.0, 0.90), (300, 1.0, 0.95), (1061, 1.0, 0.95), (1416, 0.55, 0.95), (1770, 0.1, 0.95)],
)
def test_the_schedule_at_points_worked_out_by_hand(step: int, lr: float, momentum: float) -> None:
    recipe = resolve(SPEEDRUN)
    told = recipe.make_schedule(recipe.train)(step)
    assert told[:4] == pytest.approx((lr, momentum, 0.0, step / 1770))


def test_the_dial_sizes_it_as_it_does_gpt() -> None:
    for depth in (2, 4, 8, 12):
        recipe = resolve(replace(RECIPE, depth=depth))
        assert recipe.model.width == 64 * depth and recipe.model.head_dim == (64 if depth < 8 else 128)
        with torch.device("meta"):
            recipe.make_model(replace(recipe.model, bos=0))
    assert RECIPE.train.packing == "stream"


def test_llama_with_adamw_has_the_rates_and_the_rule_of_its_source() -> None:
    train, optim = replace(LLAMA.train, batch_tokens=2**14, steps=1000), replace(LLAMA.optim, decay_scale=1.0)
    recipe = resolve(replace(LLAMA, depth=12, train=train, optim=optim))
    assert recipe.model.width == 768 and recipe.train.clip_norm == 1.0
    groups = groups_of(recipe)
    names = ("matrices", "head", "embedding", "norms")
    assert {group.name: group.lr for group in groups} == dict.fromkeys(names, pytest.approx(3e-4))
    for group in groups:
        assert group.rule == AdamW((0.9, 0.95), 1e-8, 0.0 if group.name == "norms" else 0.1)
