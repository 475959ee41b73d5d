"""Every architecture: what it may see, its layout, and how it starts.

What it computes: tests/laws/test_export_law.py.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from quern.kernels.rope import rotate_plain
from quern.model.base import LanguageModel, loss_sum
from quern.model.context import CausalContext
from quern.model.count import FlopCounter, parameters
from quern.model.gpt import GPT
from quern.model.layers import embed, norm, rotary_table
from quern.model.llama import INIT_STD, Llama, RMSNorm, mlp_width
from quern.model.unet import UNet, value_embedding_of, without_attention
from quern.recipe import ResolvedModel
from quern.recipes.gpt import RECIPE
from quern.recipes.llama import RECIPE as LLAMA
from quern.recipes.unet import RECIPE as UNET
from quern.resolve import resolve
from tests.support.models import initialised, randomized, tokens

pytestmark = pytest.mark.usefixtures("eager")

SHAPE = ResolvedModel(
    depth=4, width=32, head_dim=8, heads=4, kv_heads=4, context=24, vocab_size=53, bos=0, rope_base=100_000.0
)
GPT_SHAPE = replace(SHAPE, depth=3, kv_heads=2, bos=None)
UNET_SHAPE = replace(SHAPE, depth=6, heads=2, head_dim=16, kv_heads=2, windows="LSSSLSSLSSSL", rope_base=16.0)
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


def within(bound: float) -> tuple[float, float]:
    return -bound, bound


def initial_values() -> Iterator[tuple[LanguageModel, dict[str, Any]]]:
    """Models, and by the end of a parameter's name, the first that fits: its values in a list, the ends of a uniform
    distribution, or the standard deviation of a normal one."""
    width, to_stream = 256, INIT_STD / math.sqrt(8)
    root = math.sqrt(3 / width)  # the bound at a standard deviation of 1 / sqrt(width)
    llama = resolve(replace(LLAMA, depth=4)).model
    ends: dict[str, Any] = {"norm.weight": [1.0] * llama.width, "out.weight": to_stream, "down.weight": to_stream}
    yield Llama(llama), ends | {"": INIT_STD}
    ends = {"out.weight": 0.0, "down.weight": 0.0}
    scales = {"smear_scale": [0.0], "backout_scale": [0.2], "x0_scales": [0.2, 0.15, 0.1, 0.05]}
    scales["residual_scales"] = [1.15, 1.15 - 0.1 / 3, 1.15 - 0.2 / 3, 1.05]
    ends["bigrams.weight"], scales["bigram_scales"] = 0.0, [0.1] * 4
    matrices = {"gate.weight": (0.0, 0.02), "up.weight": within(0.4 * root), "": within(root)}
    shape = resolve(replace(RECIPE, depth=4, model=replace(RECIPE.model, width=width, bigrams=True))).model
    yield GPT(shape), ends | scales | {"embedding.weight": 0.8, "head.weight": 0.001} | matrices
    scales = {"residual_scales": [1, 0], "value_scales": [0.5, 0.5], "skip_scales": [1, 1, 1]}
    tables = {"embedding.weight": 1.0, **{f"embeddings.{number}.weight": 1.0 for number in range(3)}}
    shape = replace(UNET_SHAPE, width=width, heads=16, kv_heads=16)
    yield UNet(shape), ends | scales | tables | {"head.weight": 0.0, "": within(0.5 * root)}


def test_initial_values() -> None:
    for model, known in initial_values():
        for name, value in initialised(model, 0).state_dict().items():
            expected = next(known[end] for end in known if name.endswith(end))
            if isinstance(expected, list):
                assert value.tolist() == pytest.approx(expected), name
                continue
            near, mean, std = max(0.02, 4 * value.numel() ** -0.5), 0.0, expected
            if isinstance(expected, tuple):
                low, high = expected
                mean, std = (low + high) / 2, (high - low) / math.sqrt(12)
                assert low <= value.min() and high - near * (high - low) <= value.max() <= high, name
            assert value.std().item() == pytest.approx(std, rel=near), name
            assert abs(value.mean().item() - mean) <= near * std, name


@every
def test_a_parameter_without_initial_value_is_named(kind: type[LanguageModel]) -> None:
    model = kind(SHAPE)
    model.forgotten = torch.nn.Parameter(torch.empty(3))
    with pytest.raises(ValueError, match="no initial value for forgotten: set it in init_parameters"):
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


@pytest.mark.parametrize(
    ("kind", "vocabulary", "rows", "bar"),
    [(GPT, 8192, 8192, 2e-3), (UNet, 53, 128, 1e-5), (UNet, 128, 128, 1e-5), (UNet, 200, 256, 1e-5)],
)
def test_the_first_loss_is_that_of_a_uniform_guess_over_the_heads_rows(
    kind: type[LanguageModel], vocabulary: int, rows: int, bar: float
) -> None:
    model = initialised(kind(replace(GPT_SHAPE if kind is GPT else UNET_SHAPE, vocab_size=vocabulary)), 0)
    ids = tokens(V=vocabulary)
    total, losses = loss_sum(model, ids, ids.roll(-1, 1), torch.full(ids.shape, 1 / ids.numel()))
    assert total.item() == pytest.approx(math.log(rows), abs=bar)
    assert (losses - math.log(rows)).abs().max() < 50 * bar


# GPT --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("windows", [[None] * 3, [3] * 3, [1, 5, 2]])
def test_a_token_reaches_exactly_as_far_as_the_windows_allow(windows: list[int | None]) -> None:
    """Nothing before it changes in a single bit, nor does anything past the windows; all in between does."""
    model, ids = randomized(GPT(GPT_SHAPE)), tokens()
    model.windows = windows
    at = 7
    other = ids.clone()
    other[:, at] = (ids[:, at] + 1) % 53
    before, after = (model(x, CausalContext()) for x in (ids, other))
    # Each layer carries window - 1 tokens further; the smear, before them all, carries one.
    reach = 24 if windows[0] is None else at + 1 + sum(w - 1 for w in windows if w)
    changed = [t for t in range(24) if not torch.equal(before[:, t], after[:, t])]
    assert changed == list(range(at, min(24, reach + 1)))


def test_window_pattern_ends_long_and_a_short_one_is_a_quarter() -> None:
    shape = replace(GPT_SHAPE, depth=6, context=24, windows="SSSL")
    assert GPT(shape).windows == [6, 6, 6, None, 6, None]
    assert GPT(replace(shape, windows="L")).windows == [None] * 6
    assert GPT(replace(shape, windows="S", depth=2, context=3)).windows == [1, None]


# U-net ------------------------------------------------------------------------------------------------------


def test_a_unets_layout_of_twelve_layers() -> None:
    assert [value_embedding_of(layer, 12) for layer in range(12)] == [0, 1, 2, *[None] * 6, 0, 1, 2]
    assert [value_embedding_of(layer, 6) for layer in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [value_embedding_of(layer, 4) for layer in range(4)] == [0, 1, 0, 1]
    assert [value_embedding_of(layer, 2) for layer in range(2)] == [0, 0]
    assert [without_attention(depth) for depth in (2, 4, 6, 8, 12, 24)] == [1, 2, 3, 4, 7, 14]
    recipe = resolve(replace(UNET, depth=12, model=replace(UNET.model, context=49_152, vocab_size=50_257, bos=50_256)))
    with torch.device("meta"):
        model = UNet(recipe.model)
    long, short = 1792, 896
    assert model.windows == [long, *[short] * 3, long, short, short, long, *[short] * 3, long]
    assert model.attention_layers == [0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11]
    assert (model.head.weight.shape, model.embedding.weight.shape) == ((50_304, 768), (50_257, 768))
    attention = model.blocks[0].attention
    assert isinstance(attention, torch.nn.Module) and attention.qkv.shape == (3, 768, 768)


def test_a_unets_windows_grow_by_blocks_of_128_as_in_the_source() -> None:
    """There: the next multiple of 128 from 1728 · progress, in blocks, and half of them, at least one."""
    with torch.device("meta"):
        model = UNet(resolve(replace(UNET, depth=12, model=replace(UNET.model, context=49_152, bos=1))).model)
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": 5}, "depth must be even, not 5"),
        ({"kv_heads": 1}, r"leave out model.kv-heads \(1\)"),
        ({"head_dim": 10}, "model.head-dim must divide by 4, not 10"),
    ],
)
def test_shapes_that_a_unet_cannot_have_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        UNet(replace(UNET_SHAPE, **changes))


def test_without_a_bos_documents_cannot_be_told_apart() -> None:
    model = UNet(replace(UNET_SHAPE, bos=None))
    with pytest.raises(ValueError, match="set model.bos to the tokenizer's"):
        model.context(torch.zeros(1, 4, dtype=torch.long))


def test_half_of_the_pairs_are_left_out_in_training_alone() -> None:
    model = randomized(GPT(replace(GPT_SHAPE, bigrams=True, bigram_dropout=0.5)))
    entered = list[torch.Tensor]()
    model.blocks[0].register_forward_pre_hook(lambda block, inputs: entered.append(inputs[0][0].detach()))
    text = tokens()
    for seed in (0, 1):
        torch.manual_seed(seed)
        model.train()(text, CausalContext())
    model.eval()(text, CausalContext())
    with torch.no_grad():
        model.bigrams.weight.zero_()
    model(text, CausalContext())
    first, second, whole, without = entered
    left_out = [(one == without).all(-1) for one in (first, second)]
    for one, gone in zip((first, second), left_out, strict=True):
        assert torch.equal(one[~gone], whole[~gone]) and 0.2 < gone.float().mean() < 0.8
    assert not (whole == without).all(-1).any() and not torch.equal(*left_out)
