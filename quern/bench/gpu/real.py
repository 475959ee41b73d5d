"""Section of `quern bench gpu`: a minute of training on real text.

The model that training is measured on learns bytes of `--data`: a token is a byte, so no tokenizer is needed and bits
per byte is the loss over ln 2. Tokens that are prepared (.bin files, with `--tokenizer`) are taken as they are. Every
20th document is held out and scored at the end, through the same functions as a run's validation.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from quern.bench.gpu.setup import Bench
from quern.bench.gpu.train import recipe_of, step
from quern.bench.record import Measure
from quern.data.loader import Loader, windows
from quern.data.shards import Corpus
from quern.eval.bits_per_byte import bits_per_byte
from quern.optim.schedule import Multipliers
from quern.recipe import Recipe, TextRecipe
from quern.stages.prepare_tokens import is_tokens, open_tokens
from quern.text.documents import read
from quern.train.state import build_model, build_state

REAL_SECONDS = 60.0
BYTES, BYTE_BOS = 256, 256
HELD_OUT_EVERY, HELD_OUT_BYTES = 20, 500_000


def real(bench: Bench) -> Iterator[Measure]:
    """A run on real text: the loss at its start and end, speed, and bits per byte of what was held out."""
    if bench.data is None:
        bench.problems.append("no text to train on: give --data, a file or folder of text")
        return
    train, val, token_bytes, vocab_size = corpora(bench)
    machine = bench.machine
    recipe = recipe_of(bench, vocab_size, 1000)
    model = build_model(recipe, machine, recipe.seed)
    if machine.compile:
        model.compile(dynamic=False)
    context, batch_tokens = recipe.model.context, recipe.train.batch_tokens
    assert context and batch_tokens
    loader = Loader(train, context, batch_tokens // context, bench.seed)
    steps = _steps_that_fit(bench, recipe, model, loader)
    recipe = recipe_of(bench, vocab_size, steps)
    model.initialize(recipe.seed)
    state = build_state(recipe, machine, model)
    schedule = recipe.make_schedule(recipe.train)
    losses, start = [], time.perf_counter()
    for number in range(steps):
        losses.append(step(state, loader.batch(number), schedule(number), bench))
    seconds = time.perf_counter() - start
    tokens = steps * batch_tokens
    yield Measure("real run: steps", "steps", (float(steps),), f"{train.num_tokens:,} tokens to train on")
    yield Measure("real run: speed, loading included", "tokens/s", (tokens / seconds,))
    yield Measure("real run: loss of the first step", "nats", (losses[0],))
    yield Measure("real run: loss of the last tenth", "nats", (float(np.mean(losses[-max(1, steps // 10) :])),))
    batches = windows(val, context, rows=8)
    score = bits_per_byte(model, batches, token_bytes, machine)
    yield Measure("real run: held-out text", "bits/byte", (score.bpb,), f"{score.bytes:,} bytes")


def _steps_that_fit(bench: Bench, recipe: Recipe, model: Any, loader: Loader) -> int:
    """From the time of a few steps, which change the model: half of what is left, at most a minute."""
    state = build_state(recipe, bench.machine, model)
    seconds = []
    for number in range(3 if bench.quick else 8):
        start = time.perf_counter()
        step(state, loader.batch(number), Multipliers(), bench)
        seconds.append(time.perf_counter() - start)
    if bench.quick:
        return 3
    return max(10, int(min(REAL_SECONDS, 0.5 * bench.seconds_left) / float(np.median(seconds[2:]))))


def corpora(bench: Bench) -> tuple[Corpus, Corpus, np.ndarray, int]:
    """(training, held out, bytes of each token id, size of the vocabulary)."""
    assert bench.data is not None
    if is_tokens(bench.data):
        recipe = replace(recipe_of(bench, 512, 1), data=bench.data, text=TextRecipe(tokenizer=bench.tokenizer))
        tokenizer, train, val = open_tokens(recipe)
        return train, val, tokenizer.token_bytes(), tokenizer.vocab_size
    train, val, held = [], [], 0
    for number, (text, _) in enumerate(read(bench.data)):
        ids = np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int32)
        document = np.concatenate([np.array([BYTE_BOS], dtype=np.int32), ids])
        if number % HELD_OUT_EVERY == HELD_OUT_EVERY // 2 and held < HELD_OUT_BYTES:
            val.append(document)
            held += len(ids)
        else:
            train.append(document)
    if not val:
        raise ValueError(f"--data {bench.data} holds fewer than {HELD_OUT_EVERY} documents: give more text")
    # Rows beyond the 257 ids are never met; the size suits the hardware.
    token_bytes = np.zeros(512, dtype=np.int64)
    token_bytes[:BYTES] = 1
    return Corpus.from_arrays(train), Corpus.from_arrays(val), token_bytes, len(token_bytes)
