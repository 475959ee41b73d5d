"""Benchmark of quality per minute: train for some minutes by the recipe's defaults, then score bits per byte.

docs/benchmarks/README.md says what the minutes and the score include.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from quern.bench.material import reference, sizes_of
from quern.bench.measure import Figure, Setup, figure
from quern.data.packing import windows
from quern.eval.bits_per_byte import bits_per_byte
from quern.recipe import Recipe, TrainRecipe
from quern.recipes.gpt import RECIPE
from quern.records import read_metrics
from quern.runs.load import load
from quern.runs.run_dir import RunDir
from quern.stages import pretrain
from quern.stages.prepare import data_of_run
from quern.stages.session import Session
from quern.text.documents import read
from quern.text.sources import files
from quern.text.tokenizer import well_formed

WINDOW_TOKENS, QUICK_MINUTES = 512, 0.005
ALL_MEGABYTES = 1e6  # more than any validation text has: all of it is scored


def quality(setup: Setup) -> Iterator[Figure]:
    """Trains a new run under `--out` on each text and scores its last checkpoint. Raises RuntimeError if that fails."""
    minutes, layers = (QUICK_MINUTES, 1) if setup.quick else (setup.minutes, setup.depth)
    depth: Any = {} if layers is None else {"depth": layers}
    micro: Any = {}
    if setup.on_gpu and not setup.quick:
        micro = {"micro_batch_tokens": reference(False, setup.seed, device="cuda").train.micro_batch_tokens}
    usual = replace(RECIPE, **depth, seed=setup.seed, train=TrainRecipe(minutes=minutes, **micro))
    asked = ("train.minutes", *depth)
    if setup.train and setup.val:
        text = replace(RECIPE.text, val_megabytes=ALL_MEGABYTES)
        recipe = replace(usual, data=str(setup.train), val=str(setup.val), text=text)
        yield from _trained(setup, recipe, asked, "validation")
        whole = sum(len(well_formed(text).encode("utf-8")) for text in read(files(setup.val)))
        setup.settings["validation_bytes_of_text"] = whole
    if setup.data:
        recipe = replace(usual, data=str(setup.data))
        yield from _trained(setup, recipe, asked, "text read once", "_once")


def _trained(setup: Setup, recipe: Recipe, asked: Collection[str], name: str, ending: str = "") -> Iterator[Figure]:
    """Trains a recipe and scores the run. asked: fields that are not fitted to the text; name: name of the text, for
    the figures; ending: end of the run's name and of the settings' names."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    run_dir = RunDir(setup.out, f"bench-quality-{stamp}{ending.replace('_', '-')}")
    session = Session(
        stage="pretrain", machine=setup.machine, run_dir=run_dir, command=setup.command, log=setup.log, named=asked
    )
    if code := pretrain.run(recipe, session):
        raise RuntimeError(f"training ended with code {code}, so there is nothing to score: see {run_dir.folder}")
    loaded = load(run_dir, setup.machine, setup.log, "pretrain")
    corpora, rows = data_of_run(loaded.recipe, run_dir, setup.log), loaded.recipe.micro_batch_rows
    batches = windows(corpora.val, WINDOW_TOKENS, rows=rows, multiple=WINDOW_TOKENS)
    score = bits_per_byte(loaded.model, batches, loaded.tokenizer.token_bytes(), setup.machine)
    settings = sizes_of(loaded.recipe) | {
        "run": run_dir.run,
        "vocabulary": loaded.tokenizer.vocab_size,
        "steps": loaded.step,
        "validation_bytes_counted": score.bytes,
        "validation_tokens": score.tokens,
    }
    setup.settings.update({key + ending: value for key, value in settings.items()})
    lines = read_metrics(run_dir.stage("pretrain") / "metrics.jsonl")
    spent, tokens, flops = (max(line.get(key, 0) for line in lines) for key in ("seconds", "tokens", "flops"))
    yield figure(name, "bits/byte", score.bpb, f"windows of {WINDOW_TOKENS}, {score.bytes:,} bytes")
    yield figure(name, "nats/token", score.nats_per_token)
    yield figure(f"{name}: time in steps", "s", spent, f"{loaded.step:,} steps")
    yield figure(f"{name}: FLOPs spent", "PFLOP", flops / 1e15, "products, visible attention and updates")
    yield figure(f"{name}: trained on", "tokens", tokens, f"{tokens / corpora.train.num_tokens:.2f} times the text")
