"""Benchmark of quality per minute: train for some minutes by the recipe's defaults, then score bits per byte.

See docs/benchmarks/README.md for what the minutes and the score include.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from quern.bench.data import Setup
from quern.bench.material import sizes_of
from quern.bench.measure import Figure, figure
from quern.data.loader import windows
from quern.eval.bits_per_byte import bits_per_byte
from quern.recipe import TrainRecipe
from quern.recipes.gpt import RECIPE
from quern.records import read_metrics
from quern.runs.load import load
from quern.runs.run_dir import RunDir
from quern.stages import pretrain
from quern.stages.open_data import data_of_run
from quern.stages.session import Session
from quern.text.documents import read
from quern.text.tokenizer import well_formed

WINDOW_TOKENS = 512
ALL_MEGABYTES = 1e6
"""More than any validation text has: all of it is scored."""


def quality(setup: Setup) -> Iterator[Figure]:
    """Trains a new run under `--out` and scores its last checkpoint. Raises RuntimeError if training fails."""
    machine, log, given = setup.machine, setup.log, setup.options
    assert given.train and given.val
    run_dir = RunDir(given.out, f"bench-quality-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}")
    text = replace(RECIPE.text, val_megabytes=ALL_MEGABYTES)
    recipe = replace(RECIPE, depth=given.depth, data=str(given.train), val=str(given.val), text=text, seed=setup.seed)
    recipe = replace(recipe, train=TrainRecipe(minutes=given.minutes))
    command = f"quern bench quality --train {given.train} --val {given.val}"
    command += f" --minutes {given.minutes:g} --depth {given.depth} --seed {setup.seed}"
    code = pretrain.run(recipe, Session(stage="pretrain", machine=machine, run_dir=run_dir, command=command, log=log))
    if code:
        raise RuntimeError(f"training ended with code {code}, so there is nothing to score: see {run_dir.folder}")
    loaded = load(run_dir, machine, log, "pretrain")
    val_corpus, rows = data_of_run(loaded.recipe, run_dir, log).val, loaded.recipe.micro_batch_rows
    batches = windows(val_corpus, WINDOW_TOKENS, rows=rows, multiple=WINDOW_TOKENS)
    score = bits_per_byte(loaded.model, batches, loaded.tokenizer.token_bytes(), machine)
    setup.settings.update(
        {"run": run_dir.run} | sizes_of(loaded.recipe),
        depth=given.depth,
        vocabulary=loaded.tokenizer.vocab_size,
        steps=loaded.step,
        validation_bytes_counted=score.bytes,
        validation_bytes_of_text=sum(len(well_formed(text).encode("utf-8")) for text, _ in read(given.val)),
        validation_tokens=score.tokens,
    )
    lines = read_metrics(run_dir.stage("pretrain") / "metrics.jsonl")
    spent, tokens = (max(line.get(key, 0) for line in lines) for key in ("seconds", "tokens"))
    yield figure("validation", "bits/byte", score.bpb, f"windows of {WINDOW_TOKENS}, {score.bytes:,} bytes")
    yield figure("validation", "nats/token", score.nats_per_token)
    yield figure("time in steps", "s", spent, f"{loaded.step:,} steps")
    yield figure("trained on", "tokens", tokens)
