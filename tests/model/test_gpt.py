"""The model against the same mathematics written over again in NumPy; what it may see; how it starts."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from quern.model.base import loss_sum
from quern.model.context import CausalContext
from quern.model.gpt import GATE_CHANNELS, GATE_RANGE, GPT, QK_SCALE, SMEAR_CHANNELS
from quern.recipe import ResolvedModel
from quern.recipes.gpt import RECIPE
from quern.resolve import resolve
from tests.support.models import initialised, randomized, tokens

pytestmark = pytest.mark.usefixtures("eager")

SHAPE = ResolvedModel(depth=3, width=32, head_dim=8, heads=4, kv_heads=2, context=24, vocab_size=53)


def random_model(shape: ResolvedModel = SHAPE, windows: list[int | None] | None = None) -> GPT:
    """Every parameter random: no path through the model is silent."""
    model = randomized(GPT(shape))
    model.windows = windows or model.windows
    return model


# An independent oracle --------------------------------------------------------------------------------------


def in_numpy(model: GPT, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states and logits of one row, in float64, one query and one head at a time."""
    p = {name: value.detach().double().numpy() for name, value in model.named_parameters()}
    shape, depth = model.shape, len(model.blocks)
    E, T = shape.head_dim, len(ids)
    assert E is not None

    def rms(x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)

    def sigmoid(x: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-x))

    def turned(x: np.ndarray, position: int) -> np.ndarray:
        """Rotary: the pair (i, i + E/2) as a complex number, times e^(-i · angle)."""
        angle = position * shape.rope_base ** (-np.arange(0, E, 2) / E)
        z = (x[: E // 2] + 1j * x[E // 2 :]) * np.exp(-1j * angle)
        return QK_SCALE * rms(np.concatenate([z.real, z.imag]))

    x = rms(p["embedding.weight"][ids])
    gate = sigmoid(x[:, :SMEAR_CHANNELS] @ p["smear_gate.weight"].T)
    x = x + p["smear_scale"] * gate * np.vstack([np.zeros_like(x[:1]), x[:-1]])
    x0, halfway = x, x
    for layer in range(depth):
        if layer == depth // 2:
            halfway = x
        x = p["residual_scales"][layer] * x + p["x0_scales"][layer] * x0
        name, h = f"blocks.{layer}.attention", rms(x)
        q, k, v = (h @ p[f"{name}.{part}.weight"].T for part in ("query", "key", "value"))
        heads, kv_heads = q.shape[1] // E, k.shape[1] // E
        v = v.reshape(T, kv_heads, E)
        if layer % 2 == (depth - 1) % 2:
            opening = GATE_RANGE * sigmoid(h[:, :GATE_CHANNELS] @ p[f"{name}.value_gate.weight"].T)
            v = v + opening[:, :, None] * p[f"value_embeddings.{layer}.weight"][ids].reshape(T, kv_heads, E)
        y, window = np.zeros((T, heads, E)), model.windows[layer] or T
        for t in range(T):
            for head in range(heads):
                kv = head // (heads // kv_heads)
                seen = range(max(0, t - window + 1), t + 1)
                query = turned(q[t, head * E : (head + 1) * E], t)
                keys = np.stack([turned(k[s, kv * E : (kv + 1) * E], s) for s in seen])
                weights = np.exp(keys @ query / math.sqrt(E))
                y[t, head] = weights / weights.sum() @ v[seen, kv]
        x = x + y.reshape(T, -1) @ p[f"{name}.out.weight"].T
        up = np.maximum(rms(x) @ p[f"blocks.{layer}.mlp.up.weight"].T, 0) ** 2
        x = x + up @ p[f"blocks.{layer}.mlp.down.weight"].T
    x = rms(x - p["backout_scale"] * halfway)
    return x, shape.softcap * np.tanh(x @ p["head.weight"].T / shape.softcap)


@pytest.mark.parametrize(
    "shape",
    [
        SHAPE,
        replace(SHAPE, depth=1, kv_heads=1),
        replace(SHAPE, depth=4, windows="SL", softcap=5.0, width=48),
    ],
)
def test_forward_is_the_same_model_in_numpy(shape: ResolvedModel) -> None:
    model, ids = random_model(shape), tokens()
    x_BTD = model(ids, CausalContext())
    logits = model.logits(x_BTD)
    assert logits.dtype == torch.float32 and logits.shape == (2, 24, 53)
    for row in range(2):
        hidden, expected = in_numpy(model, ids[row].numpy())
        assert np.abs(x_BTD[row].detach().numpy() - hidden).max() <= 2e-5
        assert np.abs(logits[row].detach().numpy() - expected).max() <= 5e-5


# What it may see --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("windows", [[None] * 3, [3] * 3, [1, 5, 2]])
def test_a_token_reaches_exactly_as_far_as_the_windows_allow(windows: list[int | None]) -> None:
    """Nothing before it changes in a single bit, nor does anything past the windows; all in between does."""
    model, ids = random_model(windows=windows), tokens()
    at = 7
    other = ids.clone()
    other[:, at] = (ids[:, at] + 1) % 53
    before, after = (model(x, CausalContext()) for x in (ids, other))
    # Each layer carries window - 1 tokens further; the smear, before them all, carries one.
    reach = 24 if windows[0] is None else at + 1 + sum(w - 1 for w in windows if w)
    changed = [t for t in range(24) if not torch.equal(before[:, t], after[:, t])]
    assert changed == list(range(at, min(24, reach + 1)))


def test_window_pattern_ends_long_and_a_short_one_is_a_quarter() -> None:
    shape = replace(SHAPE, depth=6, context=24, windows="SSSL")
    assert GPT(shape).windows == [6, 6, 6, None, 6, None]
    assert GPT(replace(shape, windows="L")).windows == [None] * 6
    assert GPT(replace(shape, windows="S", depth=2, context=3)).windows == [1, None]


# How it starts ----------------------------------------------------------------------------------------------


def test_initial_spread_of_every_matrix() -> None:
    width = 256
    recipe = resolve(replace(RECIPE, depth=4, model=replace(RECIPE.model, width=width)))
    weights = initialised(GPT(recipe.model), 0).state_dict()
    std = {
        "embedding": 0.8,
        "head": 0.001,
        "query": width**-0.5,
        "key": width**-0.5,
        "value": width**-0.5,
        "up": 0.4 * width**-0.5,
        "out": 0.0,
        "down": 0.0,
        "value_embeddings": width**-0.5,
    }
    for name, value in weights.items():
        part = name.split(".")[0] if not name.startswith("blocks") else name.split(".")[-2]
        if part in std:
            assert value.std().item() == pytest.approx(std[part], rel=0.02), name
            assert abs(value.mean().item()) <= 0.02 * std[part], name
        elif part in ("value_gate", "smear_gate"):
            assert value.min() >= 0 and value.max() <= 0.02 and value.std() > 0, name
    assert weights["smear_scale"] == 0 and weights["backout_scale"] == pytest.approx(0.2)
    assert weights["residual_scales"].tolist() == pytest.approx([1.15, 1.15 - 0.1 / 3, 1.15 - 0.2 / 3, 1.05])
    assert weights["x0_scales"].tolist() == pytest.approx([0.2, 0.15, 0.1, 0.05])


def test_the_first_loss_is_that_of_a_uniform_guess() -> None:
    vocabulary = 8192
    model = initialised(GPT(replace(SHAPE, vocab_size=vocabulary)), 0)
    ids = tokens(V=vocabulary)
    total, losses = loss_sum(model, ids, ids.roll(-1, 1), torch.full(ids.shape, 1 / ids.numel()))
    assert total.item() == pytest.approx(math.log(vocabulary), abs=2e-3)
    assert (losses - math.log(vocabulary)).abs().max() < 0.1
