"""Fits vocabulary, size and time to a text of one's own, where the user left them open (estimate/own_text.py)."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from quern import validate
from quern.estimate.own_text import LEAST_BYTES, MINUTES, best_depth, expectation, most_readings, parameters_of
from quern.machine import measure_peak_flops
from quern.recipe import Recipe, Resolved
from quern.resolve import batch_rule, resolve
from quern.runs.public_data import name_of_set
from quern.stages.prepare import Prepared, fit_vocabulary, own_megabytes
from quern.stages.session import Session
from quern.terminal import human_size

TYPICAL_MFU = 0.5
"""The share of the measured speed in matrix products that training reaches on a GPU, about."""
OTHER_WORK = 3.3e11
"""FLOP/s of training on one thread of a CPU if matrix products took no time: attention, the loss and copies take about
as long whatever its matrix units. It predicts three CPUs, of 0.43, 0.9 and 2.5 TFLOP/s in products, to within 16 %."""
LENGTHS = ("train.steps", "train.minutes", "train.horizon_ratio")


def refuse_unfit(recipe: Recipe, out: Path) -> None:
    """Refuses wrong values, and a text that is missing or too short to learn from, without reading it.

    Raises:
        FileNotFoundError: There is no such data.
        ValueError: A value is wrong, the text is too short, or none is named.
    """
    validate.check(recipe)
    megabytes = own_megabytes(recipe, out) if name_of_set(recipe.data) is None else None
    if megabytes is not None and megabytes * 1e6 < LEAST_BYTES:
        raise ValueError(
            f"the text has {megabytes * 1e6:,.0f} bytes: training needs {LEAST_BYTES:,} at least, about "
            "a page, and 1 MB, about two novels, to write sentences of its own"
        )


def fit_time(recipe: Recipe, session: Session, megabytes: float) -> Recipe:
    """The recipe with the vocabulary that fits a text, and with a time, where neither size nor length is asked for."""
    recipe = fit_vocabulary(recipe, megabytes)
    train = recipe.train
    open_length = train.steps is None and train.minutes is None and "train.horizon_ratio" not in session.named
    if open_length and _has_open_depth(recipe, session) and session.mesh.tp == 1:
        recipe = replace(recipe, train=replace(train, minutes=MINUTES))
    return recipe


def training_speed(session: Session, peak_flops: float) -> float:
    """The FLOP/s that training reaches, about, on machines of this speed in matrix products."""
    if session.machine.device.type != "cpu":
        return TYPICAL_MFU * peak_flops
    return 1 / (1 / peak_flops + 1 / (OTHER_WORK * session.machine.threads * session.mesh.world.size))


def fit_depth(recipe: Recipe, session: Session, prepared: Prepared) -> Recipe:
    """The recipe with the depth that learns most from a text in the recipe's time, unless a depth is asked for."""
    minutes = recipe.train.minutes
    if minutes is None or not _has_open_depth(recipe, session):
        return recipe
    speed = training_speed(session, measure_peak_flops(session.machine) * session.mesh.world.size)
    flops = 60 * minutes * session.mesh.world.broadcast_object(speed)
    bytes_per_token = prepared.bytes_per_token
    depth = best_depth(recipe, prepared.train.num_tokens * bytes_per_token, bytes_per_token, flops)
    session.log(
        f"fitted to {human_size(prepared.train.num_tokens * bytes_per_token)} of text: a vocabulary of "
        f"{prepared.tokenizer.vocab_size:,}, depth {depth}, {minutes:g} minutes; --text.vocab-size, --depth and "
        "--train.minutes set others"
    )
    return replace(recipe, depth=depth)


def fit_batch(recipe: Recipe, session: Session, prepared: Prepared) -> Recipe:
    """The recipe with the batch of a run that ends before it reads a small text too often, where steps are asked for
    and no batch. The recipe's own batch is that of a whole horizon, which may read such a text a hundred times."""
    if recipe.train.steps is None or recipe.train.batch_tokens is not None:
        return recipe
    own, tokens = resolve(recipe, session.mesh.dp), prepared.train.num_tokens
    most = most_readings(parameters_of(recipe), tokens * prepared.bytes_per_token) * tokens
    batch_tokens = batch_rule(most, own.model.context, session.mesh.dp)
    if batch_tokens >= own.train.batch_tokens:
        return recipe
    return replace(recipe, train=replace(recipe.train, batch_tokens=batch_tokens))


def fit_readings(recipe: Recipe, session: Session, prepared: Prepared) -> Recipe:
    """The recipe with fewer steps, where its time was not asked for and reads a small text too often."""
    steps, batch_tokens, tokens = recipe.train.steps, recipe.train.batch_tokens, prepared.train.num_tokens
    assert steps is not None and batch_tokens is not None
    readings = most_readings(parameters_of(recipe), tokens * prepared.bytes_per_token)
    most = int(readings * tokens)
    if steps * batch_tokens <= most or set(LENGTHS) & set(session.named):
        return recipe
    if "train.batch_tokens" not in session.named:  # it follows from the length
        batch_tokens = batch_rule(most, resolve(recipe).model.context, session.mesh.dp)
    fewer = max(1, most // batch_tokens)
    session.log(
        f"{fewer:,} steps of {batch_tokens:,} tokens instead, which read the text {readings:.2g} times: read more "
        "often, it is learned by heart; more text helps, and --train.minutes asks for another time"
    )
    return replace(recipe, train=replace(recipe.train, minutes=None, steps=fewer, batch_tokens=batch_tokens))


def readings_and_expectation(recipe: Resolved, prepared: Prepared, parameters: int) -> tuple[float, list[str]]:
    """Readings of the text by a model of so many parameters, and lines on what to expect of the run."""
    tokens, read = prepared.train.num_tokens, recipe.train.steps * recipe.train.batch_tokens
    text_bytes, read_bytes = (count * prepared.bytes_per_token for count in (tokens, read))
    untrained = math.log2(prepared.tokenizer.vocab_size) / prepared.bytes_per_token
    lines = expectation(parameters, text_bytes, read_bytes, untrained)
    return most_readings(parameters, text_bytes), lines


def _has_open_depth(recipe: Recipe, session: Session) -> bool:
    """Whether the depth of the recipe `gpt` is left open, for which `best_depth` is measured."""
    return "depth" not in session.named and session.source is None and recipe.name == "gpt"
