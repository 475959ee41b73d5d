"""Benchmark of quality per minute: train for so many minutes by the recipe's own defaults, then score bits
per byte.

Minutes count the time in steps only: neither compilation nor validation, saving or preparing the text. The
measure: each validation document cut into consecutive windows of 512 tokens, each starting at BOS, every
byte counted once; the number of bytes counted is printed beside the size of the text itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from quern.bench.record import Measure, Outcome
from quern.data.loader import windows
from quern.eval.bits_per_byte import bits_per_byte
from quern.machine import Machine
from quern.model.gpt import GPT
from quern.optim.groups import table
from quern.optim.schedule import warmup_stable_decay
from quern.recipe import Recipe, TrainRecipe
from quern.records import read_metrics
from quern.runs.load import load
from quern.runs.run_dir import RunDir
from quern.stages import pretrain
from quern.stages.open_data import data_of_run
from quern.stages.session import Session
from quern.text.documents import read
from quern.text.tokenizer import well_formed

WINDOW_TOKENS = 512


def quality(
    machine: Machine,
    out: Path,
    *,
    train: Path,
    val: Path,
    minutes: float,
    depth: int,
    seed: int,
    log: Callable[[str], None],
) -> Outcome:
    """Trains a run of its own under `out`. Raises RuntimeError when training did not end well."""
    run_dir = RunDir(out, f"bench-quality-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}")
    recipe = Recipe(
        make_model=GPT,
        make_rules=table,
        make_schedule=warmup_stable_decay,
        depth=depth,
        data=str(train),
        val=str(val),
        seed=seed,
        train=TrainRecipe(minutes=minutes),
    )
    command = f"quern bench quality --train {train} --val {val} --minutes {minutes:g} --depth {depth} --seed {seed}"
    code = pretrain.run(recipe, Session(stage="pretrain", machine=machine, run_dir=run_dir, command=command, log=log))
    if code:
        raise RuntimeError(f"training ended with code {code}, so there is nothing to score: see {run_dir.folder}")
    loaded = load(run_dir, machine, log, "pretrain")
    prepared = data_of_run(loaded.recipe, run_dir, log)
    rows = loaded.recipe.micro_batch_rows
    batches = windows(prepared.val, WINDOW_TOKENS, rows=rows, multiple=WINDOW_TOKENS)
    score = bits_per_byte(loaded.model, batches, loaded.tokenizer.token_bytes(), machine)
    text_bytes = sum(len(well_formed(text).encode("utf-8")) for text, _ in read(val))
    lines = read_metrics(run_dir.stage("pretrain") / "metrics.jsonl")
    spent = max(line.get("seconds", 0.0) for line in lines)
    settings = {
        "run": run_dir.run,
        "depth": depth,
        "vocabulary": loaded.tokenizer.vocab_size,
        "context": loaded.recipe.model.context,
        "windows": loaded.recipe.model.windows,
        "batch_tokens": loaded.recipe.train.batch_tokens,
        "steps": loaded.step,
        "validation_bytes_counted": score.bytes,
        "validation_bytes_of_text": text_bytes,
        "validation_tokens": score.tokens,
    }
    tokens = max(line.get("tokens", 0) for line in lines)
    measures = [
        Measure("validation", "bits/byte", (score.bpb,), f"windows of {WINDOW_TOKENS}, {score.bytes:,} bytes"),
        Measure("validation", "nats/token", (score.nats_per_token,)),
        Measure("time in steps", "s", (spent,), f"{loaded.step:,} steps"),
        Measure("trained on", "tokens", (tokens,)),
    ]
    return Outcome(measures, settings)
