"""The measures of ideas: Witten-Bell n-grams against a plain dictionary implementation, and on what must not count;
the ratio of two arms' speeds on a simulated machine with drift and disturbances, and of two real recipes."""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quern.data.loader import Batch, Loader
from quern.data.packing import windows
from quern.data.shards import Corpus
from quern.flags.check_flags import DeviceOptions
from quern.lab import axes
from quern.lab.arms import Arm, Seeds
from quern.lab.axes import LEAST_PAIRS, PARTS, _alternate, measure_speed, ngram_bits
from quern.lab.ladder import command
from quern.lab.options import CompareOptions
from quern.lab.trainer import Trial
from quern.recipe import TrainRecipe
from quern.recipes.gpt import RECIPE
from tests.lab.test_trainer import toy
from tests.support.memory_corpus import memory_corpus
from tests.support.toy_training import CPU

BOS, V = 0, 23
SIZES = np.array([0, *(1 + np.arange(V - 1) % 4)])


def corpus(seed: int, documents: int) -> Corpus:
    rng = np.random.default_rng(seed)
    return memory_corpus([[BOS, *(1 + rng.geometric(0.3, n) % (V - 1))] for n in rng.integers(2, 40, documents)])


def batches() -> list[Batch]:
    loader = Loader(corpus(0, 60), 16, 4, seed=1)
    return [loader.batch(step) for step in range(12)]


def histories(batch: Batch) -> Iterator[tuple[tuple[int, ...], int]]:
    """Each target that counts, and the tokens before it since the last BOS of its row."""
    for tokens, targets, mask in zip(batch.tokens, batch.targets, batch.mask, strict=True):
        history: tuple[int, ...] = ()
        for token, target, counts in zip(tokens, targets, mask, strict=True):
            history = (int(token),) if token == BOS else (*history, int(token))
            if counts:
                yield history, int(target)


def plain(train: list[Batch], val: list[Batch], order: int) -> float:
    follows: defaultdict[tuple[int | None, ...], Counter[int]] = defaultdict(Counter)
    for batch in train:
        for history, target in histories(batch):
            for n in range(order):
                follows[_context(history, n)][target] += 1

    def p(history: tuple[int, ...], target: int, n: int) -> float:
        if n < 0:
            return 1 / V
        found = follows[_context(history, n)]
        lower = p(history, target, n - 1)
        return (found[target] + len(found) * lower) / (found.total() + len(found)) if found else lower

    assert sum(p((BOS, 3), target, order - 1) for target in range(V)) == pytest.approx(1)
    scored = [(h, target) for batch in val for h, target in histories(batch) if SIZES[target]]
    bits = sum(-math.log2(p(history, target, order - 1)) for history, target in scored)
    return bits / sum(int(SIZES[target]) for _, target in scored)


def _context(history: tuple[int, ...], n: int) -> tuple[int | None, ...]:
    """The last n tokens; None where there are fewer."""
    return (*[None] * n, *history)[len(history) :]


def test_equals_a_plain_dictionary() -> None:
    val = list(windows(corpus(7, 20), 16, rows=4))
    found = ngram_bits(batches(), val, SIZES, BOS)
    assert found == pytest.approx({order: plain(batches(), val, order) for order in (1, 2, 3)})


def test_what_is_masked_counts_nothing() -> None:
    val = list(windows(corpus(7, 20), 16, rows=4))
    masked = [replace(batch, mask=np.zeros_like(batch.mask)) for batch in batches()]
    more = [*val, replace(val[0], mask=np.zeros_like(val[0].mask))]
    assert ngram_bits([*batches(), *masked], more, SIZES, BOS) == ngram_bits(batches(), val, SIZES, BOS)
    with pytest.raises(ValueError, match="n-grams need targets"):
        ngram_bits(masked, val, SIZES, BOS)


GROWS = 1.1, 1.3
"""The idea's seconds over the baseline's in each half of a run."""


class Noisy:
    """A machine on which steps take longer and longer, vary, and are disturbed now and then. arms: their steps."""

    def __init__(self, seed: int) -> None:
        self.rng, self.time = np.random.default_rng(seed), 0.0
        self.arms = [partial(self.step, arm) for arm in (0, 1)]

    def step(self, arm: int, share: float) -> float:
        factor = GROWS[share >= 0.5] if arm else 1.0
        disturbed = 5.0 if self.rng.random() < 0.03 else 1.0
        seconds = 0.1 * factor * disturbed * math.exp(0.03 * self.rng.normal()) * (1 + self.time / 100)
        self.time += seconds
        return seconds


def test_the_error_is_that_of_the_ratio() -> None:
    """Over 24 measurements the ratio is as far from the true one as the errors say."""
    found = []
    for seed in range(24):
        speed = _alternate(Noisy(seed).arms, 2, 0.01, 1000)
        assert speed.error <= 0.01 and speed.pairs >= PARTS * LEAST_PAIRS
        found.append(math.log(speed.ratio / (sum(GROWS) / 2)) / speed.error)
    assert 0.6 < np.std(found) < 1.6 and abs(np.mean(found)) < 0.5
    machine = Noisy(0)
    assert _alternate(machine.arms, 2, 1e-9, 5.0).error > 1e-9 and 4.0 <= machine.time < 15, "the time is over"


@pytest.mark.usefixtures("eager")
def test_a_deeper_model_is_slower_and_a_twin_is_not(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"TURN_SECONDS": 0.04, "ERROR": 0.05, "MOST_SECONDS": 0.5}.items():
        monkeypatch.setattr(axes, name, value)
    flat, deep = (replace(toy(text, steps=20), depth=depth) for depth in (1, 6))
    same, slower = (measure_speed(flat, one, tmp_path, CPU) for one in (flat, deep))
    assert abs(math.log(same.ratio)) < 0.1 + 4 * same.error
    assert slower.ratio > 1.5


def test_an_interrupt_while_speeds_are_measured_leaves_the_verdicts(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(arm: Arm, seeds: Iterable[Seeds]) -> Iterator[Trial]:
        flops = 1e12 * (arm.recipe.train.steps or 1)
        for seed in seeds:
            yield Trial(arm.name, 10, *seed, 10, flops, flops / 1e12, 2 - flops / 1e13 + math.sin(seed[0]) / 1e3)

    def interrupted(*given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "in_process", lambda *given: train)
    monkeypatch.setattr(command, "measure_speed", interrupted)
    small = replace(RECIPE.text, vocab_size=300, val_megabytes=0.01)
    recipe = replace(RECIPE, depth=1, data=str(text), text=small, train=TrainRecipe(steps=4, batch_tokens=512))
    where = DeviceOptions(device="cpu", compile=False)
    options = CompareOptions(recipe, out=tmp_path, study="s", speeds=True, where=where)
    with pytest.raises(KeyboardInterrupt):
        command.run([Arm("base", recipe), Arm("idea", recipe)], options, [], "", lambda line: None)
    (one,) = json.loads((tmp_path / "lab" / "s" / "verdicts.json").read_text(encoding="utf-8"))
    assert (one["idea"], one["n"]) == ("idea", 3)
