"""The speedrun model against the same mathematics in NumPy with dense masks; what it may see; how it starts."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter

from quern import compiler
from quern.data.batch import Batch
from quern.model.base import loss_sum
from quern.model.unet import UNet, value_embedding_of, without_attention
from quern.recipe import Resolved, ResolvedModel
from quern.recipes.unet import RECIPE
from quern.resolve import resolve
from quern.runs.training import make_batches
from quern.train.state import TrainState, build_state
from quern.train.step import train_step
from tests.support.memory_corpus import memory_corpus
from tests.support.models import initialised, randomized
from tests.support.toy_training import CPU, copy_of, differing

pytestmark = pytest.mark.usefixtures("eager")

BOS = 0
SHAPE = ResolvedModel(
    depth=6, width=32, head_dim=16, heads=2, kv_heads=2, context=24, vocab_size=53, bos=BOS,
    windows="LSSSLSSLSSSL", rope_base=16.0,
)  # fmt: skip
# A row of documents of 5, 1, 9 and 9 tokens, one that begins in mid-document, and one of a single document.
IDS = [
    [0, 7, 8, 9, 10, 0, 0, 12, 13, 14, 15, 16, 17, 18, 19, 0, 21, 22, 23, 24, 25, 26, 27, 28],
    [31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 0, 48, 49, 50, 51, 52, 1, 2],
    [0, *range(20, 43)],
]


class Small(UNet):
    """Windows of whole fours, so that they matter in rows of 24."""

    window_block = 4
    long_window = 20


def random_model(shape: ResolvedModel = SHAPE) -> Small:
    """Every parameter random: no path through the model is silent."""
    return randomized(Small(shape))


def rms(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def turned(x_HTE: np.ndarray, base: float) -> np.ndarray:
    """The first quarter of the pairs (i, i + E/2) turns by position / base^(i / (E/4 - 1)), the others stand."""
    E = x_HTE.shape[-1]
    y = x_HTE.copy()
    for i in range(E // 4):
        angle = np.arange(x_HTE.shape[1]) * base ** -(i / max(1, E // 4 - 1))
        c, s = np.cos(angle), np.sin(angle)
        a, b = x_HTE[..., i], x_HTE[..., i + E // 2]
        y[..., i], y[..., i + E // 2] = a * c + b * s, b * c - a * s
    return y


def plain(model: UNet, ids: list[int], windows: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states and logits of one row in float64, layer by layer as the source has it."""
    shape = model.shape
    assert shape.depth and shape.heads and shape.head_dim and shape.width
    p = {name: t.detach().double().numpy() for name, t in model.named_parameters()}
    tokens, T, half = np.array(ids), len(ids), shape.depth // 2
    documents = np.cumsum(tokens == BOS)
    distance = np.arange(T)[:, None] - np.arange(T)
    tables = [p[f"value_embeddings.{i}.weight"][tokens] for i in range(min(3, half))]
    values = [*tables, *[None] * (shape.depth - 2 * len(tables)), *tables]
    x = x0 = rms(p["embedding.weight"][tokens])
    skips = []
    for layer in range(shape.depth):
        if layer >= half:
            x = x + p["skip_scales"][layer - half] * skips.pop()
        block = f"blocks.{layer}."
        mix = p[block + "residual_scales"]
        x = mix[0] * x + mix[1] * x0
        if block + "attention.qkv" in p:
            q, k, v = (rms(x) @ w.T for w in p[block + "attention.qkv"])
            scales = p[block + "attention.value_scales"]
            table = values[layer]
            v = scales[0] * v + (0 if table is None else scales[1] * table)
            q, k, v = (y.reshape(T, shape.heads, shape.head_dim).transpose(1, 0, 2) for y in (q, k, v))
            q, k = turned(rms(q), shape.rope_base), turned(rms(k), shape.rope_base)
            seen = (distance >= 0) & (distance < windows[layer]) & (documents[:, None] == documents)
            scores = np.where(seen, 0.12 * q @ k.transpose(0, 2, 1), -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            y = (weights / weights.sum(-1, keepdims=True)) @ v
            x = x + y.transpose(1, 0, 2).reshape(T, -1) @ p[block + "attention.out.weight"].T
        x = x + np.maximum(rms(x) @ p[block + "mlp.up.weight"].T, 0) ** 2 @ p[block + "mlp.down.weight"].T
        if layer < half:
            skips.append(x)
    x = rms(x)
    return x, 30 / (1 + np.exp(-(x @ p["head.weight"].T) / (7.5 * shape.width**0.5)))


# Long and short windows of a share of the run, and which layers of a depth are long: worked out by hand.
GROWN = {0.0: (4, 4), 0.3: (8, 4), 0.5: (12, 4), 0.75: (16, 8), 1.0: (20, 8)}
LONG = {2: (0, 1), 4: (0, 3), 6: (0, 4, 5), 8: (0, 4, 7), 12: (0, 4, 7, 11)}


@pytest.mark.parametrize("share", GROWN)
@pytest.mark.parametrize("depth", LONG)
def test_the_model_is_the_plain_one(depth: int, share: float) -> None:
    model = random_model(replace(SHAPE, depth=depth))
    tokens = torch.tensor(IDS)
    x_BTD = model(tokens, model.context(tokens, share))
    logits = model.logits(x_BTD)
    assert logits.dtype == torch.float32 and logits.shape == (3, 24, 128)
    windows = [GROWN[share][0 if layer in LONG[depth] else 1] for layer in range(depth)]
    for row, ids in enumerate(IDS):
        hidden, expected = plain(model, ids, windows)
        np.testing.assert_allclose(x_BTD[row].detach().numpy(), hidden, rtol=0, atol=2e-5)
        np.testing.assert_allclose(logits[row].detach().numpy(), expected, rtol=0, atol=2e-5)


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
    model = initialised(Small(replace(SHAPE, width=64, heads=4, kv_heads=4)), 0)
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
    model, tokens = initialised(Small(replace(SHAPE, vocab_size=vocabulary)), 0), torch.tensor(IDS)
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
    model = Small(replace(SHAPE, bos=None))
    with pytest.raises(ValueError, match="set model.bos to the tokenizer's"):
        model.context(torch.zeros(1, 4, dtype=torch.long))


# Training ---------------------------------------------------------------------------------------------------


def toy_recipe() -> Resolved:
    model = replace(RECIPE.model, width=32, head_dim=16, heads=2, context=24, vocab_size=53, bos=BOS)
    optim, train = replace(RECIPE.optim, lr_scale=0.1), replace(RECIPE.train, steps=8, batch_tokens=72)
    return Resolved.of(resolve(replace(RECIPE, make_model=Small, depth=6, model=model, optim=optim, train=train)))


def toy_batch() -> Batch:
    tokens = np.array(IDS, dtype=np.int32)
    return Batch(tokens, np.roll(tokens, -1, 1), np.ones(tokens.shape, dtype=bool))


def test_a_resumed_run_is_the_uninterrupted_one() -> None:
    """From the tensors of a step on: stacks of matrices, windows that go on growing, rows from the same stream."""
    recipe = toy_recipe()
    rng = np.random.default_rng(0)
    corpus = memory_corpus([[BOS, *rng.integers(1, 53, n)] for n in rng.integers(2, 40, 30)])

    def run(state: TrainState, steps: range) -> None:
        loader, schedule = make_batches(recipe, corpus), recipe.make_schedule(recipe.train)
        for step in steps:
            train_step(state, loader.batch(step), schedule(step), CPU, micro_batch_rows=1)

    whole, second = (build_state(recipe, CPU, initialised(Small(recipe.model), 0)) for _ in range(2))
    run(whole, range(3))
    saved = copy_of(whole.tensors())
    second.restore(copy_of(saved), whole.meta())
    run(whole, range(3, 6))
    run(second, range(3, 6))
    assert differing(whole.tensors(), second.tensors()) == []
    assert "master.blocks.0.attention.qkv" in differing(whole.tensors(), saved)


def test_every_parameter_moves_and_the_loss_falls() -> None:
    recipe = toy_recipe()
    state = build_state(recipe, CPU, initialised(Small(recipe.model), 0))
    before = {name: p.detach().clone() for name, p in state.model.named_parameters()}
    schedule = recipe.make_schedule(recipe.train)
    losses = [train_step(state, toy_batch(), schedule(step), CPU, micro_batch_rows=3).loss for step in range(8)]
    assert losses[-1] < 0.9 * losses[0]
    for name, p in state.model.named_parameters():
        assert not torch.equal(p, before[name]), name


# The compiler looks at the inputs of a block, no leaves of the graph, and silences this where warnings are no errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")
def test_growing_windows_do_not_compile_again() -> None:
    """Compiled by block: blocks differ in value embeddings, in attention and in the first half's skips, and no more."""
    model, tokens = random_model(replace(SHAPE, depth=8)), torch.tensor(IDS)
    counter, frames = CompileCounter(), []
    with compiler.eager(False):
        model.compile(backend=counter, dynamic=False)
        for share in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
            model(tokens, model.context(tokens, share)).sum().backward()
            frames.append(counter.frame_count)
    assert frames == [6] * 6  # three kinds of block, what comes before and after them, and the skips
