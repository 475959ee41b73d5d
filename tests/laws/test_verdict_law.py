"""Law: the lab's verdicts keep their error rates and their promised power when one looks after each pair.

Simulated studies draw scores of runs, not differences: a baseline and ideas that share its seeds, up to 30 pairs, a
verdict after each. In a null study every arm has the same distribution.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from quern.lab.evidence import VERDICTS, WORST, compare_pairs, decide, interval, moments, verdicts
from quern.lab.trainer import Trainer
from quern.recipe import ModelRecipe, TextRecipe, TrainRecipe
from quern.recipes.gpt import RECIPE
from tests.support.toy_training import CPU, eager

__all__ = ["eager"]

ALPHA, STUDIES, PAIRS, REAL_PAIRS = 0.05, 4_000, 30, 120
SD = 0.002  # of a score around 1.2 bits per byte
BETTER, WORSE, SAME = (VERDICTS.index(name) for name in ("better", "worse", "no difference"))
Law = Callable[[str, float | int | str, str], None]
Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape)


def heavy(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_t(3, shape) / np.sqrt(3)


def skewed(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.lognormal(0, 1, shape)


def outlying(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape) * np.where(rng.random(shape) < 0.05, 20, 1)


def diverging(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.where(rng.random(shape) < 0.03, np.inf, rng.standard_normal(shape))


NOISES = {draw.__name__: draw for draw in (normal, heavy, skewed, outlying, diverging)}


def scores(draw: Draw, ideas: int, shared: float = 0.7, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Null studies: scores of the baseline [study, pair, 1] and of the ideas [study, pair, idea].

    `shared` is the correlation of the pairs if the noise has variance 1. Where it is negative, the seed's part of the
    score has opposite signs in base and ideas.
    """
    rng = np.random.default_rng(seed)
    of_seed = np.sqrt(abs(shared)) * rng.standard_normal((STUDIES, PAIRS, 1))
    own = np.sqrt(1 - abs(shared)) * draw(rng, (STUDIES, PAIRS, 1 + ideas))
    runs = 1.2 + SD * (own + of_seed)
    runs[..., :1] += SD * (np.sign(shared) - 1) * of_seed
    runs = np.where(np.isfinite(runs), runs, WORST)
    return runs[..., :1], runs[..., 1:]


def differences(draw: Draw, ideas: int, shared: float = 0.7, seed: int = 0) -> np.ndarray:
    base, idea = scores(draw, ideas, shared, seed)
    return idea - base


def ends(differences_SNK: np.ndarray, delta: float = 0.0, alpha: float = ALPHA) -> np.ndarray:
    """How each idea of each study ends [study, idea]. An idea stops at its verdict, with the evidence it has then."""
    _, mean, sd = moments(differences_SNK.swapaxes(1, 2))
    at, final = np.zeros(mean.shape[:-1], int), np.zeros(mean.shape[:-1], int)
    for pair in range(PAIRS):
        at[final == 0] = pair
        mean_now, sd_now = (np.take_along_axis(values, at[..., None], -1)[..., 0] for values in (mean, sd))
        codes = decide(at + 1, mean_now, sd_now, delta, alpha)
        final = np.where(final == 0, codes, final)
    return final


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize(("ideas", "shared", "delta"), [(1, 0.7, 0.0), (1, -0.5, 0.0), (5, 0.7, 0.0), (5, 0.7, SD)])
def test_null_studies_seldom_end_better_or_worse(noise: str, ideas: int, shared: float, delta: float, law: Law) -> None:
    final = ends(differences(NOISES[noise], ideas, shared), delta)
    false = float(np.isin(final, (BETTER, WORSE)).any(-1).mean())
    law(f"false verdicts, α 0.05, a look after each of 30 pairs, ideas: {ideas}; share of studies", false, "≤ 5e-2")
    assert false <= ALPHA


@pytest.mark.parametrize("noise", ["normal", "heavy", "skewed"])
def test_among_claimed_ideas_few_are_null(noise: str, law: Law) -> None:
    found = differences(NOISES[noise], 5)
    found[..., :2] -= 2 * found[..., :2].std()  # two good ideas, three without effect
    final = ends(found)
    claimed = np.isin(final, (BETTER, WORSE))
    share = float((claimed[:, 2:].sum(-1) / np.maximum(claimed.sum(-1), 1)).mean())
    law("false discoveries, α 0.05, 2 good ideas of 5, a look after each pair: mean share", share, "≤ 5e-2")
    assert share <= ALPHA
    assert (final[:, :2] == BETTER).mean() > 0.8


@pytest.mark.parametrize("noise", ["normal", "heavy", "outlying"])
def test_the_confidence_sequence_covers_the_mean_at_all_times(noise: str, law: Law) -> None:
    mean = 0.7
    low, high = interval(*moments(mean + NOISES[noise](np.random.default_rng(2), (STUDIES, 100))), ALPHA)
    missed = float(((low > mean) | (high < mean)).any(-1).mean())
    law("95 % confidence sequence misses the true mean at any of 100 looks: share of studies", missed, "≤ 5e-2")
    assert missed <= ALPHA
    assert (low > 0).any(-1).mean() > 0.5  # and it is short enough to exclude 0


@pytest.mark.parametrize("noise", ["normal", "heavy"])
@pytest.mark.parametrize("sign", [-1, 1])
def test_an_effect_as_large_as_the_margin_is_seldom_called_no_difference(noise: str, sign: int, law: Law) -> None:
    found = differences(NOISES[noise], 1, seed=3)
    delta = 1.5 * found.std()
    false = float((ends(found + sign * delta, delta) == SAME).mean())
    law("false `no difference` where the effect is ±δ, α 0.05: share of studies", false, "≤ 5e-2")
    assert false <= ALPHA
    assert (ends(found, delta) == SAME).mean() > 0.8  # and it is called so where there is none


def test_a_study_of_runs_has_the_simulated_verdicts() -> None:
    """What the laws measure is what a study does: scores → pairs → verdicts, one study at a time."""
    base, idea = scores(diverging, 3, seed=4)
    idea[:, :, 0] -= 1.5 * SD
    n, mean, sd = moments((idea - base).swapaxes(1, 2))
    codes = decide(n[:, None], mean.swapaxes(1, 2), sd.swapaxes(1, 2), SD, ALPHA)
    seen: set[str] = set()
    for study in range(4):
        for pairs in range(1, PAIRS + 1):
            runs = [np.where(arm[study, :pairs] == WORST, np.nan, arm[study, :pairs]).T for arm in (base, idea)]
            found = [compare_pairs(runs[0][0].tolist(), one.tolist(), ALPHA) for one in runs[1]]
            assert verdicts(found, SD, ALPHA) == [VERDICTS[code] for code in codes[study, pairs - 1]]
            seen |= set(verdicts(found, SD, ALPHA))
    assert len(seen) >= 3, seen


@pytest.mark.campaign
@pytest.mark.usefixtures("eager")
def test_the_baseline_against_itself_on_the_real_trainer(tmp_path: Path, law: Law) -> None:
    """Pairs of runs share the order of the data, as in a study, and differ in their initial weights."""
    recipe = replace(
        RECIPE,
        depth=1,
        text=TextRecipe(vocab_size=512, tinyworld_megabytes=0.4, val_megabytes=0.02, tokenizer_megabytes=0.2),
        model=ModelRecipe(width=32, head_dim=16, context=64),
        train=TrainRecipe(steps=40, batch_tokens=512),
    )
    trainer = Trainer(tmp_path, CPU)
    scores = [
        [
            trainer.train(recipe, name=arm, seed=seed + shift, data_seed=seed).bpb
            for arm, shift in (("a", 0), ("b", 1_000))
        ]
        for seed in range(REAL_PAIRS)
    ]
    differences = np.diff(np.array(scores, float))[:, 0]
    assert np.isfinite(differences).all() and differences.std() > 0
    rng = np.random.default_rng(0)
    drawn = rng.choice(differences, (STUDIES, PAIRS)) * rng.choice([-1, 1], (STUDIES, PAIRS))  # either arm is the idea
    n, mean, sd = moments(drawn)
    codes = decide(n[:, None], mean[..., None], sd[..., None], 0.0, ALPHA)[..., 0]
    false = float((codes > 0).any(-1).mean())
    law(
        f"false verdicts on {REAL_PAIRS} real pairs, α 0.05, {STUDIES:,} studies of {PAIRS} looks; share of studies",
        false,
        "≤ 5e-2",
    )
    assert false <= ALPHA
    t = differences.mean() / differences.std(ddof=1) * np.sqrt(REAL_PAIRS)
    assert abs(t) < 4, "neither arm is favoured"


def test_the_law_can_fail() -> None:
    """The t test of a single look, repeated after each pair from the third on, is wrong in a quarter of the studies."""
    n, mean, sd = moments(differences(normal, 1)[:, :, 0])
    p = 2 * stats.t.sf(np.abs(mean) * np.sqrt(n) / sd, np.maximum(n - 1, 1))
    assert (p[:, 2:] < ALPHA).any(-1).mean() > 4 * ALPHA
