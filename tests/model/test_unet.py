"""The speedrun model's layout, windows and start. What it computes: tests/laws/test_export_code_law.py."""

import math
from dataclasses import replace

import pytest
import torch

from quern.model.base import loss_sum
from quern.model.unet import UNet, value_embedding_of, without_attention
from quern.recipe import ResolvedModel
from quern.recipes.unet import RECIPE
from quern.resolve import resolve
from tests.support.models import initialised

pytestmark = pytest.mark.usefixtures("eager")

BOS = 0
SHAPE = ResolvedModel(
    depth=6, width=32, head_dim=16, heads=2, kv_heads=2, context=24, vocab_size=53, bos=BOS,
    windows="LSSSLSSLSSSL", rope_base=16.0,
)  # fmt: skip


def test_the_layout_of_twelve_layers() -> None:
    assert [value_embedding_of(layer, 12) for layer in range(12)] == [0, 1, 2, *[None] * 6, 0, 1, 2]
    assert [value_embedding_of(layer, 6) for layer in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [value_embedding_of(layer, 4) for layer in range(4)] == [0, 1, 0, 1]
    assert [value_embedding_of(layer, 2) for layer in range(2)] == [0, 0]
    assert [without_attention(depth) for depth in (2, 4, 6, 8, 12, 24)] == [1, 2, 3, 4, 7, 14]
    recipe = resolve(
        replace(RECIPE, depth=12, model=replace(RECIPE.model, context=49_152, vocab_size=50_257, bos=50_256))
    )
    with torch.device("meta"):
        model = UNet(recipe.model)
    long, short = 1792, 896
    assert model.windows == [long, *[short] * 3, long, short, short, long, *[short] * 3, long]
    assert model.attention_layers == [0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11]
    assert (model.head.weight.shape, model.embedding.weight.shape) == ((50_304, 768), (50_257, 768))
    attention = model.blocks[0].attention
    assert isinstance(attention, torch.nn.Module) and attention.qkv.shape == (3, 768, 768)


def test_windows_grow_by_blocks_of_128_as_in_the_source() -> None:
    """There: the next multiple of 128 from 1728 · progress, in blocks, and half of them, at least one."""
    with torch.device("meta"):
        model = UNet(resolve(replace(RECIPE, depth=12, model=replace(RECIPE.model, context=49_152, bos=1))).model)
    before = (0, 0)
    for step in range(1770):
        progress = step / 1770
        blocks = next(n for n in range(1, 15) if 128 * n >= 1728 * progress)
        windows = model.context(torch.zeros(1, 8, dtype=torch.long), progress).windows(model.windows)
        now = int(windows[0] or 0), int(windows[1] or 0)
        assert now == (128 * blocks, 128 * max(1, blocks // 2))
        assert now >= before
        before = now
    assert before == (1792, 896)


# How it starts ----------------------------------------------------------------------------------------------


def test_initial_values() -> None:
    model = initialised(UNet(replace(SHAPE, width=64, heads=4, kv_heads=4)), 0)
    for name, p in model.named_parameters():
        value, width = p.detach(), p.size(-1)
        if name.endswith(("out.weight", "down.weight", "head.weight")):
            assert not value.any()
        elif name.endswith("residual_scales"):
            assert value.tolist() == [1, 0]
        elif name.endswith("value_scales"):
            assert value.tolist() in ([0.5], [0.5, 0.5])
        elif name == "skip_scales":
            assert value.tolist() == [1, 1, 1]
        else:
            std = 1.0 if "embedding" in name else 0.5 * width**-0.5
            assert value.std() == pytest.approx(std, rel=0.05) and value.mean().abs() < 0.05 * std
            if "embedding" not in name:
                assert 0.98 * math.sqrt(3) * std <= value.abs().max() <= math.sqrt(3) * std


@pytest.mark.parametrize("vocabulary", [53, 128, 200])
def test_the_first_loss_is_that_of_a_uniform_guess_over_the_heads_rows(vocabulary: int) -> None:
    model, tokens = initialised(UNet(replace(SHAPE, vocab_size=vocabulary)), 0), torch.arange(24)[None]
    total, _ = loss_sum(model, tokens, tokens.roll(-1, 1), torch.full(tokens.shape, 1 / tokens.numel()))
    assert total.item() == pytest.approx(math.log(-(-vocabulary // 128) * 128), abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": 5}, "depth must be even, not 5"),
        ({"kv_heads": 1}, r"leave out model.kv-heads \(1\), or give it the number of heads, 2"),
        ({"head_dim": 10}, "model.head-dim must divide by 4, not 10"),
    ],
)
def test_shapes_it_cannot_have_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        UNet(replace(SHAPE, **changes))


def test_without_a_bos_documents_cannot_be_told_apart() -> None:
    model = UNet(replace(SHAPE, bos=None))
    with pytest.raises(ValueError, match="set model.bos to the tokenizer's"):
        model.context(torch.zeros(1, 4, dtype=torch.long))
