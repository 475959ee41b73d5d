"""Sampling: the distribution and the filters against a plain definition, a row's independence of its batch."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from quern.generate.sample import SPAN, draw, generator, sample
from quern.generate.sampling import Sampling

V = 12
LOGITS = torch.randn(V, generator=torch.Generator().manual_seed(5)) * 2


def drawn(sampling: Sampling, count: int, logits_V: torch.Tensor = LOGITS) -> np.ndarray:
    own = generator(0, [1, 2], 0)
    uniform_BN = draw([own] * count, len(logits_V))
    return sample(logits_V.expand(count, -1), sampling, uniform_BN).numpy()


def expected(sampling: Sampling) -> np.ndarray:
    """The definition, token by token: temperature, the k best, the fewest that hold top_p, those above min_p."""
    weights = {token: math.exp(float(LOGITS[token]) / sampling.temperature) for token in range(V)}
    ranked = sorted(weights, key=lambda token: -weights[token])
    ranked = ranked[: sampling.top_k or V]
    total, held, kept = sum(weights[token] for token in ranked), 0.0, []
    for token in ranked:
        if kept and held >= sampling.top_p * total:
            break
        kept.append(token)
        held += weights[token]
    kept = [token for token in kept if weights[token] >= sampling.min_p * weights[ranked[0]]]
    held = sum(weights[token] for token in kept)
    return np.array([weights[token] / held if token in kept else 0.0 for token in range(V)])


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.5),
        Sampling(temperature=3.0),
        Sampling(top_k=1),
        Sampling(top_k=1000),
        Sampling(top_p=0.8),
        Sampling(top_p=0),
        Sampling(temperature=2.0, top_k=6, top_p=0.7),
        Sampling(min_p=0.05),
        Sampling(min_p=1.0),
        Sampling(temperature=3.0, min_p=0.3),
        Sampling(temperature=2.0, top_k=6, top_p=0.95, min_p=0.2),
        Sampling(temperature=2.0, top_k=2, min_p=0.01),
    ],
)
def test_draws_follow_the_definition(sampling: Sampling) -> None:
    count = 20_000
    shares = expected(sampling)
    counts = np.bincount(drawn(sampling, count), minlength=V)
    assert not counts[shares == 0].any()
    likely = shares * count > 5
    if likely.sum() > 1:
        observed, wanted = counts[likely], shares[likely]
        assert chisquare(observed, wanted / wanted.sum() * observed.sum()).pvalue > 1e-4


@given(st.floats(0, 1), st.integers(0, 2**32), st.floats(0.5, 3))
def test_min_p_keeps_exactly_the_tokens_of_the_numpy_definition(min_p: float, seed: int, temperature: float) -> None:
    """Random numbers that favour one token by a factor of 1e8: it is drawn if and only if the filter keeps it."""
    logits_V = np.random.default_rng(seed).normal(size=V).astype(np.float32)
    weights_V = torch.softmax(torch.from_numpy(logits_V) / temperature, dim=-1).numpy()
    kept_V = weights_V >= np.float32(min_p) * weights_V.max()
    uniform_VN = torch.full((V, 1 + SPAN), 1e-10)
    uniform_VN[range(V), range(1, V + 1)] = 1 - 2**-24
    drawn_V = sample(torch.from_numpy(logits_V).expand(V, V), Sampling(temperature, min_p=min_p), uniform_VN).numpy()
    assert ((drawn_V == np.arange(V)) == kept_V).all()


def test_extreme_numbers_and_temperatures_never_leave_the_vocabulary() -> None:
    forbidden_V = torch.where(torch.arange(V) > 0, LOGITS, -torch.inf)
    for u in (0.0, 1 - 2**-24):
        uniform_BN = torch.full_like(draw([generator(0, [], 0)], V), u)
        for sampling in (Sampling(1e-30), Sampling(100), Sampling(top_p=0.5), Sampling(top_k=4)):
            assert 0 <= sample(LOGITS[None], sampling, uniform_BN).item() < V
            assert sample(forbidden_V[None], sampling, uniform_BN).item() > 0
    half = torch.full_like(draw([generator(0, [], 0)], V), 0.5)
    for tiny in (1e-30, 1e-38, 1e-45):
        assert sample(100 * LOGITS[None], Sampling(tiny), half).item() == LOGITS.argmax()


def test_a_vocabulary_of_several_spans_is_drawn_by_weight() -> None:
    """The last span is a part of one; the tokens that decide lie in all of them."""
    logits_V = torch.full((3 * SPAN - 40,), -30.0)
    places = [0, SPAN - 1, SPAN, 2 * SPAN + 5, len(logits_V) - 1]
    logits_V[places] = torch.tensor([0.0, 1.0, -1.0, 0.5, 0.2])
    count = 20_000
    tokens, counts = np.unique(drawn(Sampling(), count, logits_V), return_counts=True)
    assert tokens.tolist() == places
    assert chisquare(counts, torch.softmax(logits_V[places].double(), 0).numpy() * count).pvalue > 1e-4


@given(st.integers(0, 2**63), st.lists(st.integers(0, 50_000), max_size=5), st.integers(0, 9))
def test_a_rows_numbers_are_its_own(seed: int, prompt: list[int], index: int) -> None:
    alone = draw([generator(seed, prompt, index)], V)[0]
    others = [
        generator(seed, prompt, index + 1),
        generator(seed + 1, prompt, index),
        generator(seed, [*prompt, 0], index),
    ]
    together = draw([*others, generator(seed, prompt, index)], V)
    assert torch.equal(together[-1], alone)
    assert all(not torch.equal(row, alone) for row in together[:-1])
