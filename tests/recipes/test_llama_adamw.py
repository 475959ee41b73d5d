"""AdamW for every parameter at one rate: the source's rate at its size, and the updates of torch's optimizer."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from quern.data.batch import Batch
from quern.model.context import CausalContext
from quern.optim.adamw import AdamW
from quern.optim.groups import make_groups
from quern.optim.schedule import Multipliers
from quern.recipe import ModelRecipe
from quern.recipes.llama_adamw import RECIPE
from quern.resolve import resolve
from quern.train.state import build_model, build_state
from quern.train.step import train_step
from tests.support.toy_training import CPU

DECAY = 0.1


def test_at_the_sources_size_every_group_has_its_rate() -> None:
    recipe = resolve(replace(RECIPE, depth=12, train=replace(RECIPE.train, batch_tokens=2**14, steps=1000)))
    assert recipe.model.width == 768 and recipe.train.clip_norm == 1.0
    with torch.device("meta"):
        model = recipe.make_model(replace(recipe.model, vocab_size=1000, bos=0))
    groups = make_groups(model.parameter_groups(), recipe.make_rules(recipe), model.named_parameters())
    assert {group.name: group.lr for group in groups} == dict.fromkeys(
        ("matrices", "head", "embedding", "norms"), pytest.approx(3e-4)
    )
    assert all(isinstance(group.rule, AdamW) for group in groups)
    assert [group.name for group in groups if not group.rule.weight_decay] == ["norms"]  # type: ignore[attr-defined]


@pytest.mark.usefixtures("eager")
def test_the_updates_are_those_of_torch() -> None:
    """Gradients below and above the norm at which they are clipped. All kinds of parameters."""
    shape = ModelRecipe(width=32, head_dim=16, context=16, vocab_size=64, bos=0, windows="L")
    train, optim = replace(RECIPE.train, batch_tokens=64, steps=4), replace(RECIPE.optim, decay_scale=1.0)
    recipe = resolve(replace(RECIPE, depth=2, model=shape, train=train, optim=optim))
    ours, theirs = build_model(recipe, CPU, 0), build_model(recipe, CPU, 0)
    state, rules = build_state(recipe, CPU, ours), recipe.make_rules(recipe)
    oracle = torch.optim.AdamW(
        [
            {"params": [parameter for _, parameter in group], "weight_decay": 0.0 if name == "norms" else DECAY}
            for name, group in theirs.parameter_groups().items()
        ],
        lr=rules["matrices"].lr,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    draw, norms = np.random.default_rng(0), []
    for weight in (0.2, 5.0, 0.2, 5.0):
        batch = Batch.of_rows(draw.integers(0, 64, (4, 17), dtype=np.int32), np.ones((4, 16), dtype=bool))
        batch = replace(batch, weight=np.full((4, 16), weight, np.float32))
        train_step(state, batch, Multipliers(), CPU, micro_batch_rows=2, clip_norm=recipe.train.clip_norm)
        oracle.zero_grad()
        tokens, targets = (torch.from_numpy(rows).long() for rows in (batch.tokens, batch.targets))
        logits = theirs.logits(theirs(tokens, CausalContext()))
        (weight * torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)))
        oracle.step()
    assert min(norms) < 1 < max(norms)
    for (name, own), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6, msg=name)
