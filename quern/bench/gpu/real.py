"""Section of `quern bench gpu`: a minute of training on real text.

The model of the training section learns the bytes of `--data`: a token is a byte, so no tokenizer is needed. Prepared
tokens (.bin files, with `--tokenizer`) are used as they are. Every 20th document is held out; the first half megabyte
of those is scored at the end with the functions of a run's validation.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from statistics import mean, median

import numpy as np

from quern.bench.gpu.setup import GpuBench
from quern.bench.gpu.train import recipe_of
from quern.bench.material import take_step, training_state
from quern.bench.measure import Figure, figure
from quern.data.loader import Loader
from quern.data.packing import windows
from quern.data.shards import Corpus
from quern.eval.bits_per_byte import bits_per_byte
from quern.recipe import TextRecipe
from quern.stages.prepare_tokens import is_tokens, open_tokens
from quern.text.documents import read
from quern.train.state import build_state

REAL_SECONDS = 60.0
BYTE_BOS, BYTE_VOCABULARY = 256, 512
"""The vocabulary has unused ids, because its size suits the hardware."""
HELD_OUT_EVERY, HELD_OUT_BYTES = 20, 500_000


def real(bench: GpuBench) -> Iterator[Figure]:
    """Loss at the start and end of a run, speed, and bits per byte of the held-out text."""
    if bench.data is None:
        bench.problems.append("no text to train on: give --data, a file or folder of text")
        return
    machine, (train, val, token_bytes) = bench.machine, corpora(bench)
    recipe = recipe_of(bench, 1000, len(token_bytes))
    context, batch_tokens = recipe.model.context, recipe.train.batch_tokens
    loader, state = Loader(train, context, batch_tokens // context, bench.seed), training_state(recipe, machine)
    model, steps = state.model, 3
    trial = [take_step(state, recipe, machine, loader.batch(n))[0] for n in range(3 if bench.quick else 8)]
    if not bench.quick:  # half of the time left, at most a minute
        left = max(0.0, bench.deadline - time.monotonic())
        steps = max(10, int(min(REAL_SECONDS, 0.5 * left) / median(trial[2:])))
    recipe = recipe_of(bench, steps, len(token_bytes))
    model.initialize(recipe.seed)
    state, schedule = build_state(recipe, machine, model), recipe.make_schedule(recipe.train)
    start = time.perf_counter()
    losses = [take_step(state, recipe, machine, loader.batch(n), schedule(n))[1] for n in range(steps)]
    seconds = time.perf_counter() - start
    score = bits_per_byte(model, windows(val, context, rows=8), token_bytes, machine)
    yield figure("real run: steps", "steps", steps, f"{train.num_tokens:,} tokens to train on")
    yield figure("real run: speed, loading included", "tokens/s", steps * batch_tokens / seconds)
    yield figure("real run: loss of the first step", "nats", losses[0])
    yield figure("real run: loss of the last tenth", "nats", mean(losses[-max(1, steps // 10) :]))
    yield figure("real run: held-out text", "bits/byte", score.bpb, f"{score.bytes:,} bytes")


def corpora(bench: GpuBench) -> tuple[Corpus, Corpus, np.ndarray]:
    """Returns the training corpus, the held-out corpus, and the number of bytes of each token id."""
    assert bench.data is not None
    if is_tokens(bench.data):
        recipe = replace(recipe_of(bench, 1, 512), data=bench.data, text=TextRecipe(tokenizer=bench.tokenizer))
        tokenizer, train, val = open_tokens(recipe)
        return train, val, tokenizer.token_bytes()
    encoded = (np.frombuffer(text.encode("utf-8"), np.uint8) for text in read(bench.data))
    train = [np.concatenate([[BYTE_BOS], ids]).astype(np.int32) for ids in encoded]
    held_out = slice(HELD_OUT_EVERY // 2, None, HELD_OUT_EVERY)
    val = train[held_out]
    del train[held_out]
    if not val:
        raise ValueError(f"--data {bench.data} holds fewer than {HELD_OUT_EVERY} documents: give more text")
    val = val[: 1 + int(np.searchsorted(np.cumsum([len(ids) for ids in val]), HELD_OUT_BYTES))]
    token_bytes = (np.arange(BYTE_VOCABULARY) < BYTE_BOS).astype(np.int64)
    return Corpus.from_arrays(train), Corpus.from_arrays(val), token_bytes
