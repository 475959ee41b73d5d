"""Measures of ideas: n-gram models that a proxy must beat, and the speed of an idea against the baseline.

N-gram models count a run's own training tokens: what a trained model must beat to be of use. Interpolated Witten-Bell
smoothing (Witten and Bell 1991; Chen and Goodman 1998, section 2.6):

    P(w | h) = (count(h w) + distinct(h) · P(w | h')) / (count(h) + distinct(h))

where h' is h without its first token and distinct(h) is the number of tokens that follow h. Below the unigram is the
uniform distribution over the vocabulary. A context does not reach beyond the BOS of its document or the start of its
row, as in training. Nothing is tuned.

The speed of PyTorch's models is measured apart from the training runs (docs/ladder.md), in pairs of turns whose order
alternates. In each of the `PARTS` of a schedule the ratio is the median over the pairs, and the parts are weighted by
the time that the baseline spends in them. The standard error comes from a bootstrap over the pairs of each part.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from quern.data.batch import Batch
from quern.machine import Machine
from quern.mesh import alone
from quern.recipe import Recipe
from quern.resolve import resolve
from quern.runs.training import fit_to_text, make_batches, ready_model
from quern.stages.prepare import prepare
from quern.terminal import silent
from quern.train.state import build_state
from quern.train.step import train_step

ORDER = 3


def ngram_bits(train: Iterable[Batch], val: Iterable[Batch], token_bytes: np.ndarray, bos: int) -> dict[int, float]:
    """Computes the bits per byte of the unigram, bigram and trigram, by order.

    Args:
        train: The batches of the run. Each target that counts is counted with the tokens before it.
        val: The validation batches. As in `bits_per_byte`, a target counts if its token has at least one byte.
        token_bytes: The number of bytes of each token id, (vocabulary,).
        bos: The id that begins each document.

    Raises:
        ValueError: There is no target to count or to score.
    """
    V = len(token_bytes)
    seen, scored = (np.concatenate([_grams(batch, bos, V) for batch in batches], 1) for batches in (train, val))
    sizes = np.asarray(token_bytes, np.int64)[scored[-1]]
    scored, num_bytes = scored[:, sizes > 0], int(sizes.sum())
    if not seen.size or not num_bytes:
        raise ValueError("n-grams need targets to count and to score: hand in more training and validation text")
    bits, p = {}, np.full(scored.shape[1], 1 / V)
    for order in range(1, ORDER + 1):
        grams, counts = np.unique(_packed(seen[-order:], V), return_counts=True)
        contexts, first, distinct = np.unique(grams // (V + 1), return_index=True, return_counts=True)
        totals, wanted = np.add.reduceat(counts, first), _packed(scored[-order:], V)
        followers = _look_up(contexts, distinct, wanted // (V + 1))
        total = _look_up(contexts, totals, wanted // (V + 1)) + followers
        known = _look_up(grams, counts, wanted) + followers * p
        p = np.divide(known, total, out=p, where=total > 0)
        bits[order] = float(-np.log2(p).sum() / num_bytes)
    return bits


def _grams(batch: Batch, bos: int, V: int) -> np.ndarray:
    """The targets that count, last, and the tokens before them, (ORDER, N); V stands for "before the beginning"."""
    rows = [batch.tokens]
    for _ in range(ORDER - 2):
        before = np.pad(rows[0][:, :-1], ((0, 0), (1, 0)), constant_values=V)
        rows.insert(0, np.where((rows[0] == bos) | (rows[0] == V), V, before))
    return np.stack([row[batch.mask] for row in (*rows, batch.targets)])


def _packed(columns: np.ndarray, V: int) -> np.ndarray:
    """One int64 for each column of ids (order, N), in the order of the ids."""
    assert (V + 1) ** len(columns) <= 1 << 63  # 2 million tokens and more
    packed = np.zeros(columns.shape[1], np.int64)
    for ids in columns:
        packed = packed * (V + 1) + ids
    return packed


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The values of the wanted keys, 0 for those that are missing. keys: sorted."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)


PARTS, RESAMPLES = 4, 500
WARMUP_STEPS = 3  # steps of each arm that are not timed: the first ones compile
LEAST_PAIRS = 6  # in each part before the first estimate of the error; each later estimate has a quarter more pairs
ERROR, MOST_SECONDS = 0.005, 120.0  # standard error of ln(ratio) that is small enough; time of a measurement
TURN_SECONDS = 0.2  # least time of the steps that an arm takes before the other one follows


@dataclass(frozen=True)
class Speed:
    """An idea's speed. ratio: its seconds over the baseline's, at equal steps; error: standard error of ln(ratio);
    seconds: seconds of a step of the baseline, meanwhile; pairs: number of pairs of turns."""

    ratio: float
    error: float
    seconds: float
    pairs: int

    def __str__(self) -> str:
        return f"{self.ratio:.3f} times the baseline's seconds ± {self.error:.1%}, {self.pairs} pairs"


def measure_speed(base: Recipe, idea: Recipe, out: Path, machine: Machine) -> Speed:
    """Measures an idea against the baseline until the error of the ratio is small enough, or the time is over."""
    if machine.compile:
        torch.compiler.reset()  # the compiler keeps a few versions of a function, and earlier arms have used them
    with _stepping(base, out, machine) as first, _stepping(idea, out, machine) as second:
        steps = [first, second]
        for step in steps:
            for number in range(WARMUP_STEPS):
                step((number + 0.5) / WARMUP_STEPS)
        turn = max(1, *(math.ceil(TURN_SECONDS / step(0.5)) for step in steps))
        return _alternate(steps, turn, ERROR, MOST_SECONDS)


def _alternate(steps: list[Callable[[float], float]], turn: int, error: float, most_seconds: float) -> Speed:
    """Alternates two arms. steps: run a step at a share of the run and return its seconds; turn: steps of a turn."""
    rng = np.random.default_rng(0)
    times: list[list[tuple[float, float]]] = [[] for _ in range(PARTS)]
    flip, look = False, LEAST_PAIRS
    while True:
        for part in rng.permutation(PARTS):
            shares = (part + rng.random(turn)) / PARTS
            order = (1, 0) if flip else (0, 1)
            found = {arm: sum(steps[arm](float(share)) for share in shares) for arm in order}
            times[part].append((found[0], found[1]))
            flip = not flip
        pairs, spent = len(times[0]), float(np.median(times) * np.size(times))
        if pairs >= look or (spent >= most_seconds and pairs > 1):
            ratio, reached = _ratio(np.array(times), rng)
            if reached <= error or spent >= most_seconds:
                return Speed(ratio, reached, float(np.median(np.array(times)[..., 0])) / turn, PARTS * pairs)
            look = math.ceil(1.25 * pairs)


def _ratio(times: np.ndarray, rng: np.random.Generator) -> tuple[float, float]:
    """The ratio of the seconds of both arms, and the standard error of its logarithm. times: (PARTS, pairs, 2)."""
    parts, pairs, _ = times.shape
    weights = np.median(times[..., 0], axis=1)
    logs = np.log(times[..., 1] / times[..., 0])

    def ratio(logs: np.ndarray) -> np.ndarray:
        return np.average(np.exp(np.median(logs, axis=-1)), axis=-1, weights=weights)

    drawn = np.take_along_axis(logs[None], rng.integers(0, pairs, (RESAMPLES, parts, pairs)), axis=-1)
    return float(ratio(logs)), float(np.log(ratio(drawn)).std(ddof=1))


@contextmanager
def _stepping(recipe: Recipe, out: Path, machine: Machine) -> Iterator[Callable[[float], float]]:
    """Readies a recipe for the body, to take any of its steps. Yields a function that trains on a batch at a share of
    the run, and returns the seconds, which on a GPU hide the making of the batch behind the step, as training does."""
    if isinstance(recipe.make_model, type) and not issubclass(recipe.make_model, torch.nn.Module):
        raise ValueError(f"{recipe.name} is no model of PyTorch, whose speed alone is measured")
    prepared = prepare(resolve(recipe), out, silent)
    recipe = fit_to_text(recipe, prepared.tokenizer, prepared.train)
    model, *_ = ready_model(recipe, prepared.tokenizer, machine, alone(), silent)
    state, batches = build_state(recipe, machine, model), make_batches(recipe, prepared.train)
    train, schedule, on_cpu = recipe.train, recipe.make_schedule(recipe.train), machine.device.type == "cpu"
    clock = time.process_time if on_cpu and machine.threads == 1 else time.perf_counter
    how = {"micro_batch_rows": recipe.micro_batch_rows, "clip_norm": train.clip_norm}

    def step(share: float) -> float:
        number, start = min(train.steps - 1, int(share * train.steps)), clock()
        batch, made = batches.batch(number), clock()
        train_step(state, batch, schedule(number), machine, **how)
        machine.synchronize()
        making, training = made - start, clock() - made
        return making + training if on_cpu else max(making, training)

    try:
        yield step
    finally:
        state.optimizer.close()
