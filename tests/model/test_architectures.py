"""Every architecture: one seed gives one model, a parameter without a value is named, bf16 stays near fp32."""

import pytest
import torch

from quern.model.base import LanguageModel
from quern.model.context import CausalContext
from quern.model.gpt import GPT
from quern.model.llama import Llama
from quern.model.unet import UNet
from quern.recipe import ResolvedModel
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
