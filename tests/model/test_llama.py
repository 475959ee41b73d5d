"""How the Llama starts and is counted. What it computes: tests/laws/test_export_law.py."""

import math
from dataclasses import replace

import pytest
import torch

from quern.model.count import FlopCounter, parameters
from quern.model.llama import INIT_STD, Llama, RMSNorm, mlp_width
from quern.recipe import ResolvedModel
from quern.recipes.llama import RECIPE
from quern.resolve import resolve
from tests.support.models import initialised

pytestmark = pytest.mark.usefixtures("eager")

SHAPE = ResolvedModel(
    depth=3, width=30, head_dim=6, heads=4, kv_heads=2, context=24, vocab_size=53, windows="L", rope_base=100_000.0
)


def test_the_norm_is_taken_in_fp32() -> None:
    """Squares of numbers like these overflow half precision."""
    norm = RMSNorm(16, 1e-5).to(torch.float16)
    torch.nn.init.constant_(norm.weight, 2.0)
    assert torch.equal(norm(torch.full((1, 1, 16), 60_000.0, dtype=torch.float16)), torch.full((1, 1, 16), 2.0).half())


def test_initial_spread_of_every_matrix() -> None:
    shape = resolve(replace(RECIPE, depth=4)).model
    for name, value in initialised(Llama(shape), 0).state_dict().items():
        if "norm" in name:
            assert (value == 1).all(), name
        else:
            small = name.endswith(("attention.out.weight", "mlp.down.weight"))
            assert value.std().item() == pytest.approx(INIT_STD / math.sqrt(8) if small else INIT_STD, rel=0.02), name


def test_counts_are_those_of_the_formula() -> None:
    """Twelve squares of the width in a block, as in a plain transformer, and no window shortens attention."""
    recipe = resolve(replace(RECIPE, depth=12))
    counted, width = parameters(recipe), 768
    assert mlp_width(recipe.model) == 2048
    assert counted.transformer == 12 * 12 * width**2
    assert counted.scalars == 25 * width and counted.value_embeddings == 0
    assert counted.total == counted.kaplan + 32_768 * width + 25 * width
    assert FlopCounter(recipe).per_token() == 6 * counted.kaplan + 12 * 12 * width * 2049 / 2
