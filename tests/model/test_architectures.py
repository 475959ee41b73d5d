"""Every architecture: one seed gives one model, a parameter without a value is named, bf16 stays near fp32; the
embedding's gradient; how the Llama starts and is counted. What it computes: tests/laws/test_export_law.py."""

import math
from dataclasses import replace

import pytest
import torch

from quern.kernels.rope import rotate_plain
from quern.model.base import LanguageModel
from quern.model.context import CausalContext
from quern.model.count import FlopCounter, parameters
from quern.model.gpt import GPT
from quern.model.layers import embed, norm, rotary_table
from quern.model.llama import INIT_STD, Llama, RMSNorm, mlp_width
from quern.model.unet import UNet
from quern.recipe import ResolvedModel
from quern.recipes.llama import RECIPE as LLAMA
from quern.resolve import resolve
from tests.support.models import initialised, randomized, tokens

pytestmark = pytest.mark.usefixtures("eager")

SHAPE = ResolvedModel(
    depth=4, width=32, head_dim=8, heads=4, kv_heads=4, context=24, vocab_size=53, bos=0, rope_base=100_000.0
)
every = pytest.mark.parametrize("kind", [GPT, Llama, UNet])
CONSTANT = {
    GPT: ("scales", "scale", "attention.out.weight", "mlp.down.weight"),
    Llama: ("norm.weight",),
    UNet: ("scales", "attention.out.weight", "mlp.down.weight", "head.weight"),
}
"""The ends of the names of parameters that start at the same values for every seed."""


@every
def test_same_seed_same_weights_whatever_else_was_drawn(kind: type[LanguageModel]) -> None:
    torch.manual_seed(1)
    first = initialised(kind(SHAPE), 5).state_dict()
    torch.manual_seed(2)
    torch.rand(7)
    second, other = (initialised(kind(SHAPE), seed).state_dict() for seed in (5, 6))
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.isfinite(value).all(), f"{name} was left uninitialised"
        assert torch.equal(value, second[name]), name
    drawn = {name for name in first if not torch.equal(first[name], other[name])}
    assert drawn == {name for name in first if not name.endswith(CONSTANT[kind])}


@every
def test_a_parameter_without_initial_value_is_named(kind: type[LanguageModel]) -> None:
    model = kind(SHAPE)
    model.forgotten = torch.nn.Parameter(torch.empty(3))
    with pytest.raises(ValueError, match="no initial value is given for forgotten: set it in init_parameters"):
        model.initialize(0)


@every
def test_bf16_stays_near_fp32(kind: type[LanguageModel]) -> None:
    model, ids = randomized(kind(SHAPE)), tokens()
    exact = model(ids, CausalContext())
    low = model.to(torch.bfloat16)(ids, CausalContext())
    assert low.dtype == torch.bfloat16
    assert ((low.float() - exact).norm() / exact.norm()).item() < 0.03


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 2.0**-24), (torch.bfloat16, 2.0**-8)])
def test_gradients_of_embeddings_are_summed_in_fp32(dtype: torch.dtype, rounding: float) -> None:
    """Within the rounding of the result, and a millionth of what was added up."""
    generator = torch.Generator().manual_seed(0)
    share = 1 / torch.arange(1, 102, dtype=torch.float32)
    tokens = torch.multinomial(share, 4096, replacement=True, generator=generator).view(8, 512)
    grad = torch.randn(8, 512, 16, generator=generator).to(dtype)
    weight = torch.randn(101, 16, generator=generator).to(dtype).requires_grad_()
    embed(tokens, weight).backward(grad)
    expected = torch.zeros(101, 16, dtype=torch.float64).index_add_(0, tokens.flatten(), grad.flatten(0, 1).double())
    assert weight.grad is not None and weight.grad.dtype == dtype
    scale = torch.zeros_like(expected).index_add_(0, tokens.flatten(), grad.flatten(0, 1).double().abs())
    apart = (weight.grad.double() - expected).abs()
    assert (apart <= rounding * expected.abs() + 1e-6 * scale).all(), apart.max()


def test_llamas_norm_is_taken_in_fp32() -> None:
    """Squares of numbers like these overflow half precision."""
    norm = RMSNorm(16, 1e-5).to(torch.float16)
    torch.nn.init.constant_(norm.weight, 2.0)
    assert torch.equal(norm(torch.full((1, 1, 16), 60_000.0, dtype=torch.float16)), torch.full((1, 1, 16), 2.0).half())


def test_initial_spread_of_llamas_matrices() -> None:
    shape = resolve(replace(LLAMA, depth=4)).model
    for name, value in initialised(Llama(shape), 0).state_dict().items():
        if "norm" in name:
            assert (value == 1).all(), name
        else:
            small = name.endswith(("attention.out.weight", "mlp.down.weight"))
            assert value.std().item() == pytest.approx(INIT_STD / math.sqrt(8) if small else INIT_STD, rel=0.02), name


def test_llamas_counts_are_those_of_the_formula() -> None:
    """Twelve squares of the width in a block, as in a plain transformer, and no window shortens attention."""
    recipe = resolve(replace(LLAMA, depth=12))
    counted, width = parameters(recipe), 768
    assert mlp_width(recipe.model) == 2048
    assert counted.transformer == 12 * 12 * width**2
    assert counted.scalars == 25 * width and counted.value_embeddings == 0
    assert counted.total == counted.kaplan + 32_768 * width + 25 * width
    assert FlopCounter(recipe).per_token() == 6 * counted.kaplan + 12 * 12 * width * 2049 / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_fused_with_rotary_positions_is_the_models(dtype: torch.dtype) -> None:
    """Bit for bit, so that a model's numbers do not depend on which of the two it calls."""
    x = torch.randn(2, 11, 3, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    cos, sin = rotary_table(torch.arange(5, 16)[None], 16, 100.0)
    assert torch.equal(rotate_plain(x, cos, sin, 1.2), norm(rotate_plain(x, cos, sin)) * 1.2)
