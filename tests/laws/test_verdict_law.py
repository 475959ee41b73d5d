"""Law: the lab's verdicts keep their error rates when one looks after each pair, and find more than other tests.

Simulated studies draw scores of runs: a baseline with twice the seeds of the ideas, which share its noise, and a look
after each pair. An idea stops at its verdict. In a null study all arms have the same distribution.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from quern.lab.trainer import Trainer
from quern.lab.verdict import VERDICTS, Decision, Moments, Rules, decide, estimate, fails, judge, reach
from quern.recipe import ModelRecipe, TextRecipe, TrainRecipe
from quern.recipes.gpt import RECIPE
from tests.laws.table import Law
from tests.support.toy_training import CPU

ALPHA, PAIRS, REAL_PAIRS = 0.05, 8, 120
SAME, DIFFERENT = VERDICTS.index("no difference"), range(1, VERDICTS.index("no difference"))
IDEAS = np.array(  # mean and SD of the differences of two studies of 7 pairs, whose runs have an SD of 0.0045
    [(0.0354, 0.0141), (0.0057, 0.0067), (0.0197, 0.0064), (0.0186, 0.0069), (-0.0044, 0.0063), (-0.0015, 0.0047)]
    + [(0.2259, 0.0033), (0.0070, 0.0072), (0.0254, 0.0115), (-0.0001, 0.0058), (-0.0024, 0.0050), (0.1451, 0.0068)]
    + [(-0.0262, 0.0010), (-0.0034, 0.0024), (-0.0676, 0.0029), (-0.0510, 0.0038), (-0.0129, 0.0100), (-0.0531, 0.0034)]
    + [(-0.0046, 0.0080), (0.0199, 0.0048), (-0.0012, 0.0022), (0.0001, 0.0047), (0.0105, 0.0098)]
)
RUN_SD, DELTA = 0.0045, 0.004
Floats = NDArray[np.float64]

NOISES: dict[str, Callable[[np.random.Generator, tuple[int, ...]], Floats]] = {
    "Gaussian": lambda rng, shape: rng.standard_normal(shape),
    "heavy-tailed": lambda rng, shape: rng.standard_t(3, shape) / np.sqrt(3),
    "skewed": lambda rng, shape: rng.lognormal(0, 1, shape),
    "outlying": lambda rng, shape: rng.standard_normal(shape) * np.where(rng.random(shape) < 0.05, 20, 1),
    "failing": lambda rng, shape: np.where(rng.random(shape) < 0.03, np.nan, rng.standard_normal(shape)),
}


def null(noise: str, ideas: int, shared: float, studies: int, pairs: int = PAIRS, seed: int = 0) -> list[Floats]:
    """Scores of the baseline [study, 2 pairs] and of the ideas [study, pair, idea]. `shared` is the correlation of the
    runs of a pair; at 0 the ideas share nothing but the error of the baseline."""
    rng, draw = np.random.default_rng(seed), NOISES[noise]
    of_seed = np.sqrt(shared) * draw(rng, (studies, 2 * pairs))
    base = of_seed + np.sqrt(1 - shared) * draw(rng, of_seed.shape)
    return [base, of_seed[:, :pairs, None] + np.sqrt(1 - shared) * draw(rng, (studies, pairs, ideas))]


def recorded(studies: int, pairs: int, each: int) -> tuple[Floats, Floats, Floats]:
    """Scores of studies of 11 of the recorded ideas, of which 40 % make no difference, and the true differences."""
    rng = np.random.default_rng(5)
    mean, sd = np.moveaxis(IDEAS[rng.permuted(np.tile(np.arange(len(IDEAS)), (studies, 1)), axis=1)[:, :11]], -1, 0)
    truth = np.where(rng.random(mean.shape) < 0.4, 0.0, mean)
    # The share of the seed's noise that the runs do not have in common.
    apart = np.minimum(np.square(sd) / (2 * RUN_SD**2), 1)
    own = np.sqrt(np.maximum(np.square(sd) - np.square(apart * RUN_SD), 0))
    base = RUN_SD * rng.standard_normal((studies, each * pairs))
    noise = (1 - apart)[:, None] * base[:, :pairs, None] + own[:, None] * rng.standard_normal((studies, pairs, 11))
    return base, truth[:, None] + noise, truth


def run(base: Floats, ideas: Floats, rules: Rules) -> tuple[Decision, NDArray[np.intp]]:
    """Judges after each pair. Returns the last decision on each idea [study, idea], and the pairs that it was given."""
    pairs, each = ideas.shape[1], base.shape[1] // ideas.shape[1]
    both = np.isfinite(ideas) & np.isfinite(base[:, :pairs, None])
    x, b = np.where(both, ideas, 0.0), np.where(both, base[:, :pairs, None], 0.0)
    sums, failed = np.cumsum([both, x, b, x * x, b * b, x * b], axis=2), np.cumsum(~np.isfinite(ideas), axis=1)
    totals = np.array([np.isfinite(base), np.nan_to_num(base), np.square(np.nan_to_num(base))])
    codes = at = np.zeros(both[:, 0].shape, int)
    decision = Decision(codes, codes * 0.0, codes * 0.0)
    for pair in range(pairs):
        at = np.where(codes == 0, pair, at)
        n, x, b, xx, bb, xb = np.take_along_axis(sums, at[None, :, None], axis=2)[:, :, 0]
        used = np.r_[: pair + 1, pairs : pairs + (each - 1) * (pair + 1)]
        count, total, squares = totals[..., used].sum(-1)[..., None]
        k, others = np.maximum(n, 1), count - n
        vx, vb, vxb = (
            (values - one * two / k) / np.maximum(n - 1, 1) for values, one, two in ((xx, x, x), (bb, b, b), (xb, x, b))
        )
        spread = np.broadcast_to((squares - total**2 / np.maximum(count, 1)) / np.maximum(count - 1, 1), n.shape)
        made = estimate(Moments(n, x / k, b / k, vx, vb, vxb, others, (total - b) / np.maximum(others, 1), spread))
        decision = decide(*made[:3], n, rules)
        lost = np.take_along_axis(failed, at[:, None], axis=1)[:, 0]
        fail = fails(lost, at + 1, len(used) - count, len(used), n.shape[1], rules.alpha)
        codes = np.where(fail, VERDICTS.index("fails"), decision.codes)
    return decision._replace(codes=codes), at + 1


def anytime(base: Floats, ideas: Floats, delta: float) -> tuple[NDArray[np.bool_], NDArray[np.intp]]:
    """The test to beat: a mixture t for any number of looks (Lai 1976), with e-BH over the ideas (Wang & Ramdas 2022).
    Which ideas it decides, and the pairs that it was given."""
    pairs, total = ideas.shape[1:]
    differences = ideas - base[:, :pairs, None]
    done, at = np.zeros(differences[:, 0].shape, bool), np.zeros(differences[:, 0].shape, int)
    mean = np.cumsum(differences, axis=1) / np.arange(1, pairs + 1)[:, None]
    for pair in range(1, pairs):
        at = np.where(done, at, pair)
        n, m = at + 1.0, np.take_along_axis(mean, at[:, None], axis=1)[:, 0]
        chosen = np.arange(pairs)[:, None] < n[:, None]
        variance = (chosen * np.square(differences - m[:, None])).sum(1) / (n - 1)
        t2, k = n * np.square(m) / variance, 1 + n
        logs = (n * (np.log1p(t2 / (n - 1)) - np.log1p(t2 / (k * (n - 1)))) - np.log(k)) / 2
        ratio = (np.log(k) - 2 * np.log(ALPHA / total)) / n
        reachable = np.where(ratio < np.log(k), ratio, 0)
        squares = (n - 1) * np.expm1(reachable) / -np.expm1(reachable - np.log(k))
        half = np.where(reachable > 0, np.sqrt(squares * variance / n), np.inf)
        same = np.abs(m) + half <= delta
        e = np.where(same, 0, np.exp(np.minimum(logs, 700)))
        ranks = np.arange(1, total + 1)
        count = (ranks * (-np.sort(-e) * ranks * ALPHA >= total)).max(-1, keepdims=True)
        done = same | ((count > 0) & (e * np.maximum(count, 1) * ALPHA >= total))
    return done, at + 1


def false_studies(
    noise: str, ideas: int, shared: float, studies: int, pairs: int = PAIRS, unstable: Sequence[float] = ()
) -> float:
    """Share of null studies in which an idea ends as better or worse, or as failing. `unstable` are factors by which
    the noise of the first ideas is larger."""
    base, runs = null(noise, ideas, shared, studies, pairs)
    runs[..., : len(unstable)] *= unstable
    decision, _ = run(base, runs, Rules(1.0, pairs, ALPHA))
    return float(((decision.codes > 0) & (decision.codes != SAME)).any(-1).mean())


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize(("ideas", "shared"), [(1, 0.7), (4, 0.0), (11, 0.0), (11, 0.7), (40, 0.7)])
def test_null_studies_seldom_end_better_or_worse(noise: str, ideas: int, shared: float, law: Law) -> None:
    false, bar = false_studies(noise, ideas, shared, 1_500), ALPHA if noise == "Gaussian" else 0.06
    name = f"false verdicts where no idea differs, {noise}, a look after each of 8 pairs; share of studies"
    law(name, false, bar)


@pytest.mark.parametrize(
    ("ideas", "unstable", "bar"), [(11, [20.0] * 2, 0.06), (30, [20.0] * 2, 0.06), (30, [5.0], 0.1)]
)
def test_null_studies_with_unstable_ideas(ideas: int, unstable: list[float], bar: float, law: Law) -> None:
    false = false_studies("Gaussian", ideas, 0.7, 1_500, unstable=unstable)
    noisy = f"{len(unstable)} of them with {unstable[0]:.0f} times the noise"
    law(f"false verdicts where no idea differs, and {noisy}; share of studies", false, bar)


def test_unstable_ideas_take_few_verdicts_from_the_others(law: Law) -> None:
    base, ideas, _ = recorded(400, 4, 2)
    rules = Rules(DELTA, 4, ALPHA)
    before = run(base, ideas, rules)[0].codes[:, 2:] > 0
    ideas[..., :2] += 20 * RUN_SD * np.random.default_rng(0).standard_normal(ideas[..., :2].shape)
    decided = run(base, ideas, rules)[0].codes[:, 2:] > 0
    share = float(decided.mean() / before.mean())
    name = "decided ideas by 4 pairs beside two with 20 times the noise, over those beside stable ones"
    law(name, share, bar="≥ 0.9")
    assert share >= 0.9


@pytest.mark.campaign
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("pairs", [4, 8, 16])
def test_many_null_studies(noise: str, pairs: int, law: Law) -> None:
    for ideas in (1, 2, 3, 4, 6, 11, 25, 100):
        for shared in (0.0, 0.3, 0.7, 0.95):
            false = false_studies(noise, ideas, shared, 20_000 // max(ideas // 4, 1), pairs)
            law(f"false verdicts where no idea differs, {noise}, many studies; share of studies", false, 0.06)


def test_more_is_decided_than_by_an_anytime_valid_test_at_equal_runs(law: Law) -> None:
    base, ideas, truth = recorded(400, 7, 2)
    decision, at = run(base, ideas, Rules(DELTA, 7, ALPHA))
    decided = decision.codes > 0
    before, pairs = anytime(*recorded(400, 7, 1)[:2], DELTA)
    runs, runs_before = (float((n.sum(-1) + each * n.max(-1)).mean()) for n, each in ((at, 2), (pairs, 1)))
    more = float(decided.mean() / before.mean())
    law("decided ideas over those of an anytime-valid test of 7 pairs", more, bar="≥ 1.5")
    law("runs over those of an anytime-valid test of 7 pairs", runs / runs_before, 1)
    assert more >= 1.5
    different = np.isin(decision.codes, DIFFERENT)
    signs = np.where(decision.high < 0, -1, 1)
    false = np.where(different, truth * signs <= 0, (decision.codes == SAME) & (np.abs(truth) > DELTA))
    share = float((false.sum(-1) / np.maximum(decided.sum(-1), 1)).mean())
    missed = decided & ((decision.low > truth) | (decision.high < truth))
    outside = float((missed.sum(-1) / np.maximum(decided.sum(-1), 1)).mean())
    law("false verdicts among the decided, 11 ideas, 40 % without effect: mean share", share, ALPHA)
    law("intervals of decided ideas that miss the true difference: mean share", outside, ALPHA)


@pytest.mark.parametrize("ideas", [1, 11])
def test_effects_and_margins_in_reach_are_found(ideas: int, law: Law) -> None:
    """A single effect among ideas without any, and the margin of these, at the promised 80 %."""
    base, runs = null("Gaussian", ideas, 0.0, 800)
    rules = Rules(1.0, PAIRS, ALPHA)
    effect, delta = reach(np.sqrt(2), rules, ideas)
    runs[..., 0] -= effect
    found = np.isin(run(base, runs, rules)[0].codes[:, 0], DIFFERENT).mean()
    base, runs = null("Gaussian", ideas, 0.0, 800, seed=1)
    same = (run(base, runs, Rules(delta, PAIRS, ALPHA))[0].codes == SAME).mean()
    worst = float(max(abs(found - 0.8), abs(same - 0.8)))
    law("found of the effects and margins in reach, promised 0.8: difference", worst, 0.1)


def test_the_arrays_are_judged_as_runs_are() -> None:
    base, ideas = null("failing", 11, 0.3, 3)
    decision, at = run(base, ideas, Rules(1.0, PAIRS, ALPHA))
    for study in range(3):
        runs = {str(k): {seed: float(ideas[study, seed, k]) for seed in range(at[study, k])} for k in range(11)}
        seeds = np.r_[: at[study].max(), PAIRS : PAIRS + at[study].max()]
        judged = judge({int(seed): float(base[study, seed]) for seed in seeds}, runs, Rules(1.0, PAIRS, ALPHA)).findings
        assert [VERDICTS.index(one.verdict) for one in judged.values()] == decision.codes[study].tolist()
        ends = np.array([one.interval for one in judged.values()]).T
        assert np.allclose(ends, [decision.low[study], decision.high[study]])


@pytest.mark.campaign
@pytest.mark.usefixtures("eager")
def test_real_pairs_without_an_effect_seldom_end_better_or_worse(tmp_path: Path, law: Law) -> None:
    """The baseline against itself, with other initial weights and the same data, on the real trainer. Its pairs are
    drawn again for many studies, so the noise is real."""
    text = TextRecipe(vocab_size=512, tinyworld_megabytes=0.4, val_megabytes=0.02, tokenizer_megabytes=0.2)
    model, train = ModelRecipe(width=32, head_dim=16, context=64), TrainRecipe(steps=40, batch_tokens=512)
    recipe = replace(RECIPE, depth=1, text=text, model=model, train=train)
    trainer = Trainer(tmp_path, CPU)
    pairs = [
        [trainer.train(recipe, name="arm", seed=seed + shift, data_seed=seed).bpb for shift in (0, 1_000)]
        for seed in range(REAL_PAIRS)
    ]
    scores = np.array(pairs, float)
    differences = scores[:, 1] - scores[:, 0]
    assert np.isfinite(differences).all() and differences.std() > 0
    rng = np.random.default_rng(0)
    for ideas in (1, 11):
        drawn = scores[rng.integers(REAL_PAIRS, size=(2_000, 2 * PAIRS))][:, :, 0]
        decision, _ = run(drawn, rng.choice(scores[:, 1], (2_000, PAIRS, ideas)), Rules(DELTA, PAIRS, ALPHA))
        false = float(np.isin(decision.codes, DIFFERENT).any(-1).mean())
        name = f"false verdicts on {REAL_PAIRS} real pairs, a look after each of 8 pairs; share of studies"
        law(name, false, ALPHA)


def test_the_law_can_fail() -> None:
    """The t test of a single look, repeated after each pair from the third on, is wrong far more often."""
    base, ideas = null("Gaussian", 1, 0.7, 2_000, pairs=20)
    x = ideas[..., 0] - base[:, :20]
    errors = [x[:, :n].std(1, ddof=1) / np.sqrt(n) for n in range(3, 21)]
    p = [2 * stats.t.sf(np.abs(x[:, :n].mean(1)) / error, n - 1) for n, error in zip(range(3, 21), errors, strict=True)]
    assert (np.array(p) < ALPHA).any(0).mean() > 3 * ALPHA
