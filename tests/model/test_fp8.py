"""`use_fp8`: what it replaces, what it leaves alone and why; parameters stay themselves; what is recorded."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from quern.kernels.fp8 import HeadProducts
from quern.model.base import loss_sum
from quern.model.fp8 import Fp8Linear, use_fp8
from quern.recipe import Resolved
from quern.resolve import resolve
from quern.runs.training import set_up_training
from quern.text.tokenizer import Tokenizer
from quern.train.step import to_device
from tests.support import fp8_oracle as oracle
from tests.support.fp8_oracle import through
from tests.support.models import RECIPES
from tests.support.toy_training import CPU, toy_loader, toy_recipe

pytestmark = pytest.mark.usefixtures("eager")

MATRICES = ["attention.query", "attention.key", "attention.value", "attention.out", "mlp.up", "mlp.down"]


def built(name: str = "gpt", depth: int = 4, **shape: Any) -> Any:
    """A model of that architecture in which FP8 can multiply everything; all entries are random, also zero ones."""
    sizes: dict[str, Any] = {"width": 32, "head_dim": 16, "context": 16, "vocab_size": 64, "bos": 0, **shape}
    recipe = resolve(replace(RECIPES[name], depth=depth, model=replace(RECIPES[name].model, windows="L", **sizes)))
    made: Any = recipe.make_model(recipe.model)
    generator = torch.Generator().manual_seed(0)
    made.initialize(0)
    with torch.no_grad():
        for p in made.parameters():
            p.add_(torch.empty(p.shape).normal_(0.0, 0.1, generator=generator))
    return made


def test_the_head_gets_static_scales_and_the_blocks_dynamic_ones() -> None:
    made = built()
    report = use_fp8(made)
    assert report.dynamic == tuple(f"blocks.{layer}.{name}" for layer in range(4) for name in MATRICES)
    assert report.static == ("head",) and made.products.func is HeadProducts
    assert all(type(made.get_submodule(name)) is Fp8Linear for name in report.dynamic)
    assert report.skipped == {
        "blocks.1.attention.value_gate": "12 inputs, no multiple of 16",
        "blocks.3.attention.value_gate": "12 inputs, no multiple of 16",
        "smear_gate": "24 inputs, no multiple of 16",
    }
    assert type(made.smear_gate) is type(made.head) is nn.Linear


def with_bias() -> Any:
    made = built()
    made.blocks[0].mlp.up = nn.Linear(32, 128)
    return made


def converted() -> Any:
    use_fp8(made := built("unet"))
    return made


@pytest.mark.parametrize(
    ("make", "name", "reason"),
    [
        (lambda: built(width=40, head_dim=8), "head", "40 inputs, no multiple of 16"),
        (lambda: built(vocab_size=61), "head", "61 outputs, no multiple of 16"),
        (lambda: built(context=20), "head", "20 tokens in a row, no multiple of 16"),
        (lambda: built("llama", mlp_width=20), "blocks.0.mlp.gate_up", "40 outputs, no multiple of 16"),
        (with_bias, "blocks.0.mlp.up", "it has a bias"),
        (converted, "blocks.0.attention.qkv", "it is multiplied in FP8 already"),
        (converted, "blocks.0.mlp.up", "it is a Fp8Linear already"),
        (lambda: built().to("meta"), "head", "this meta device has no FP8 product"),
    ],
)
def test_what_stays_is_named_with_the_reason(make: Any, name: str, reason: str) -> None:
    report = use_fp8(make())
    assert report.skipped[name] == reason and name not in (*report.dynamic, *report.static)


@pytest.mark.parametrize("name", RECIPES)
def test_every_matrix_is_converted_or_named(name: str) -> None:
    """None stays in bf16 without a word: what counts as a matrix in FLOPs is what the report speaks of."""
    made = built(name)
    report = use_fp8(made)
    kinds = made.group_kinds
    matrices = {
        member
        for group, members in made.parameter_groups().items()
        if kinds.get(group, group) in ("matrices", "head")
        for member, _ in members
    }
    spoken_of = {*report.dynamic, *report.static, *report.skipped}
    assert {member.removesuffix(".weight") for member in matrices} <= spoken_of
    assert all("gate" in skipped and "gate_up" not in skipped for skipped in report.skipped)
    merged = {"llama": "mlp.gate_up", "unet": "attention.qkv"}.get(name)
    assert merged is None or f"blocks.0.{merged}" in report.dynamic


@pytest.mark.parametrize(("name", "path"), [("llama", "blocks.1.mlp"), ("unet", "blocks.1.attention")])
def test_a_merged_product_is_in_fp8_where_gradients_are_recorded(name: str, path: str) -> None:
    made = built(name)
    module = made.get_submodule(path)
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
    grad = torch.randn(32, module.stacked_weight().flatten(0, 1).size(0), generator=torch.Generator().manual_seed(2))
    plain = module.project(x)
    plain.backward(grad)
    plain_dx = x.grad
    x.grad = module.stacked_weight().grad = None
    use_fp8(made)
    with torch.no_grad():
        assert torch.equal(module.project(x), plain)
    found = module.project(x)
    found.backward(grad)
    x8, g8 = (through(one.detach().numpy(), of) for one, of in ((x, oracle.E4M3), (grad, oracle.E5M2)))
    w8 = through(module.stacked_weight().detach().flatten(0, 1).numpy(), oracle.E4M3)
    results = (found.detach(), x8 @ w8.T), (x.grad, g8 @ w8), (module.stacked_weight().grad.flatten(0, 1), g8.T @ x8)
    for ours, expected in results:
        assert ours is not None and np.abs(ours.numpy() - expected).max() <= 1e-5 * np.abs(expected).max()
    assert plain_dx is not None and x.grad is not None and not torch.equal(plain_dx, x.grad)


def test_the_loss_takes_its_products_from_the_head() -> None:
    made = built()
    batch = toy_loader().batch(0)
    inputs = to_device(batch, int(batch.mask.sum()), CPU)
    plain = loss_sum(made, *inputs)[0]
    use_fp8(made, head_only=True)
    low = loss_sum(made, *inputs)[0]
    low.backward()
    assert low != plain and low.item() == pytest.approx(plain.item(), rel=0.02)
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in made.parameters())


def trained_part(name: str, compiled: bool) -> list[Any]:
    """Results and gradients of a model of which one feed-forward is compiled whole, or is not."""
    made = built(name, depth=2)
    use_fp8(made)
    ids = torch.arange(32).view(2, 16)
    with torch.compiler.set_stance("default"):
        if compiled:
            made.blocks[1].mlp.compile(backend="aot_eager", fullgraph=True, dynamic=False)
        x = made(ids, made.context(ids))
        x.square().sum().backward()
        with torch.no_grad():
            without = made(ids, made.context(ids))
    return [x.detach(), without, *(p.grad for p in made.blocks.parameters())]


# torch's own tracer makes an object of a class that it says none should be made of, and looks at every input's .grad.
@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be:DeprecationWarning")
@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_a_part_of_a_block_compiles_whole_and_to_the_same_bits(name: str) -> None:
    """No break in the graph of linear layers or of a merged product, and the evaluation is that of the plain model."""
    plain, compiled = (trained_part(name, one) for one in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(plain, compiled, strict=True) if a is not None)


def test_a_recipe_asks_for_all_or_the_head() -> None:
    said: list[str] = []

    def set_up(recipe: Resolved, made: Any) -> dict[str, Any]:
        return set_up_training(recipe, made, Tokenizer([]), CPU, said.append, compiled=False)

    assert set_up(toy_recipe(), built()) == {} and said == []
    facts = set_up(toy_recipe(fp8="all"), built())["fp8"]
    assert facts["static"] == ("head",) and len(facts["dynamic"]) == 24 and "smear_gate" in facts["skipped"]
    assert len(said) == 1 and said[0].startswith("fp8: 24 layers")
    made = built()
    facts = set_up(toy_recipe(fp8="head"), made)["fp8"]
    assert facts["dynamic"] == () and facts["static"] == ("head",) and made.products.func is HeadProducts
    assert not any(isinstance(one, Fp8Linear) for one in made.modules())
    with pytest.raises(ValueError, match="train.fp8 must be one of off, head, all, not yes"):
        toy_recipe(fp8="yes")
