"""The optimizer's driver against plain loops: the same numbers, whatever the buffers' layout."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from quern.optim.adamw import AdamW
from quern.optim.groups import ParameterGroup, make_groups, table
from quern.optim.muon import Muon
from quern.optim.schedule import Multipliers
from quern.parallel.zero2 import Zero2
from quern.recipe import OptimRecipe, Resolved
from quern.recipes.gpt import RECIPE
from quern.resolve import resolve
from tests.support.toy_training import toy_schedule


def held(optimizer: Zero2) -> dict[str, torch.Tensor]:
    return {name: part.tensor for name, part in optimizer.slices().items()}


class Toy(nn.Module):
    """Two shapes of matrices, an embedding, a head, and vectors of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def parameter(*shape: int) -> Parameter:
            return Parameter(0.5 * torch.randn(*shape, generator=generator))

        self.embedding = parameter(13, 6)
        self.up = nn.ParameterList(parameter(18, 6) for _ in range(3))
        self.down = nn.ParameterList(parameter(6, 18) for _ in range(3))
        self.scales = parameter(3)
        self.head = parameter(13, 6)

    def parameter_groups(self) -> dict[str, list[tuple[str, Parameter]]]:
        named = dict(self.named_parameters())
        return {
            "matrices": [(name, p) for name, p in named.items() if name.startswith(("up.", "down."))],
            "embedding": [("embedding", self.embedding)],
            "head": [("head", self.head)],
            "residual_scales": [("scales", self.scales)],
        }

    def loss(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 + step)
        tokens = torch.randint(13, (40,), generator=generator)
        x = self.embedding[tokens]
        for i, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            x = x + self.scales[i] * (x @ up.T).relu().square() @ down.T
        return nn.functional.cross_entropy((x @ self.head.T).float(), tokens.roll(-1))


def driver(model: Toy, **every: int) -> Zero2:
    """every: group → on which steps it is updated."""
    rules = table(Resolved.of(resolve(RECIPE), optim=OptimRecipe(lr_scale=0.2, decay_scale=1.0, width_scale=1.0)))
    rules |= {name: rules[name]._replace(every=steps) for name, steps in every.items()}
    return Zero2(make_groups(model.parameter_groups(), rules, model.named_parameters()))


def train(model: Toy, optimizer: Zero2, steps: range) -> None:
    for step in steps:
        model.loss(step).backward()
        optimizer.step(step, toy_schedule(10)(step))
        optimizer.drop_grads()


def test_a_parameter_that_is_a_stack_is_updated_as_its_matrices() -> None:
    stacked = [Parameter(torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(i))) for i in range(2)]
    matrices = [[Parameter(m.detach().clone()) for m in p] for p in stacked]
    rule = Muon(weight_decay=0.1)
    whole = Zero2([ParameterGroup("matrices", rule, tuple((f"p{i}", p) for i, p in enumerate(stacked)), 0.1)])
    single = tuple((f"{i}.{j}", p) for i, p3 in enumerate(matrices) for j, p in enumerate(p3))
    parts = Zero2([ParameterGroup("matrices", rule, single, 0.1)])
    (bucket,) = whole.buckets
    assert bucket.masters.shape == (6, 8, 5)
    assert bucket.masters.data_ptr() == bucket.params.data_ptr(), "fp32 parameters are their own masters"
    for step in range(3):
        for i, p in enumerate(stacked):
            p.grad = torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(10 * step + i))
            for m, grad in zip(matrices[i], p.grad, strict=True):
                m.grad = grad.clone()
        whole.step(step, Multipliers())
        parts.step(step, Multipliers())
    of_whole, of_parts = held(whole), held(parts)
    for i, p in enumerate(stacked):
        assert p.shape == of_whole[f"momentum.p{i}"].shape == (3, 8, 5)
        assert of_whole[f"second.p{i}"].shape == (3, 8, 1)
        for kind in ("master", "momentum", "second"):
            assert torch.equal(of_whole[f"{kind}.p{i}"], torch.stack([of_parts[f"{kind}.{i}.{j}"] for j in range(3)]))


def test_state_that_does_not_fit_is_refused_and_nothing_changes() -> None:
    optimizer = driver(Toy())
    before = {name: tensor.clone() for name, tensor in held(optimizer).items()}
    wrong: list[tuple[Callable[[dict[str, torch.Tensor]], object], str]] = [
        (lambda state: state.pop("m.head"), "missing: m.head"),
        (lambda state: state.update({"m.stranger": torch.ones(1)}), "unknown: m.stranger"),
        (lambda state: state.update({"m.head": torch.ones(13, 5)}), r"m.head is \(13, 5\), not \(13, 6\)"),
    ]
    for change, message in wrong:
        state = {name: tensor + 1 for name, tensor in before.items()}
        change(state)
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_tensors(state)
    assert all(torch.equal(before[name], tensor) for name, tensor in held(optimizer).items())


def test_what_cannot_be_updated_is_refused() -> None:
    model = Toy()
    optimizer = driver(model)
    (model.embedding.sum() + model.head.sum()).backward()
    with pytest.raises(ValueError, match="no gradient reached up.0, up.1, up.2, down.0, .*, scales: run backward"):
        optimizer.grad_norm()
    model.loss(0).backward()
    with pytest.raises(ValueError, match=r"factors for \['heads'\]: the model's groups are \['embedding', 'head'"):
        optimizer.step(0, Multipliers(groups={"heads": 0.5}))


def test_gradients_set_to_none_or_replaced_are_taken_in() -> None:
    ours, theirs = Toy(), Toy()
    optimizers = driver(ours), driver(theirs)
    for step in range(3):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            model.loss(step).backward()
            optimizer.step(step, Multipliers())
        ours.zero_grad(set_to_none=True)
        optimizers[1].drop_grads()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)


# Groups that are updated on every n-th step -----------------------------------------------------------------


def test_updates_on_every_nth_step_are_those_of_torchs_adamw() -> None:
    """On every step, and on every third with the mean of its gradients; with constants and a factor of its own."""
    ours, theirs = Toy(), Toy()
    every, factor, halves = (1, 3), (1.0, 2.0), [list(m.named_parameters()) for m in (ours, theirs)]
    constants = [(0.01, (0.8, 0.95), 1e-3, 0.1), (0.03, (0.9, 0.99), 1e-6, 0.0)]
    groups, oracles = [], []
    for i, (lr, betas, eps, decay) in enumerate(constants):
        groups.append(ParameterGroup(f"{i}", AdamW(betas, eps, decay), tuple(halves[0][i::2]), lr, every[i]))
        parameters = [p for _, p in halves[1][i::2]]
        oracles.append(torch.optim.AdamW(parameters, lr=lr * factor[i], betas=betas, eps=eps, weight_decay=decay))
    optimizer = Zero2(groups)
    for step in range(12):
        for model in (ours, theirs):
            model.loss(step).backward()
        optimizer.step(step, Multipliers(groups={"1": factor[1]}))
        optimizer.drop_grads()
        for n, oracle in zip(every, oracles, strict=True):
            if (step + 1) % n == 0:
                for p in oracle.param_groups[0]["params"]:
                    p.grad /= n
                oracle.step()
                oracle.zero_grad()
    for (name, mine), (_, other) in zip(*halves, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6, msg=name)


def test_a_bad_gradient_between_updates_is_noticed_and_leaves_the_held_ones() -> None:
    clean, ours = Toy(), Toy()
    optimizers = [driver(model, embedding=2, head=3) for model in (clean, ours)]
    for model, optimizer in zip((clean, ours), optimizers, strict=True):
        train(model, optimizer, range(2))
    for name in ("embedding", "head"):  # not due and due; the head's comes next
        ours.loss(2).backward()
        grad = dict(ours.named_parameters())[name].grad
        assert grad is not None
        grad.view(-1)[0] = torch.nan
        assert not optimizers[1].grad_norm().isfinite()
        optimizers[1].drop_grads()
    for model, optimizer in zip((clean, ours), optimizers, strict=True):
        train(model, optimizer, range(2, 6))
    for mine, other in zip(ours.parameters(), clean.parameters(), strict=True):
        assert torch.equal(mine, other)
