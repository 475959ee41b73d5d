"""Opens the tokens that a run was made from, and refuses text that has changed since the run began."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from quern.data.shards import Corpus
from quern.data.token_file import prepared
from quern.recipe import Resolved
from quern.runs.origin import Origin, read_origin, require_same
from quern.runs.run_dir import STAGES, RunDir
from quern.stages.prepare import Prepared, prepare, text_fingerprint


def open_data(
    recipe: Resolved,
    run_dir: RunDir,
    origin: Origin,
    log: Callable[[str], None],
    *,
    named: bool = False,
    workers: int = 1,
) -> Prepared:
    """Opens the tokenizer and the shards that a stage began with; shards that are gone are made again.

    named: the user named the text in this command, so it must still be the same; else its shards are used, whatever the
    text is now. Raises ValueError if the tokenizer or the text is another one.
    """
    tokenizer = run_dir.tokenizer()
    require_same(origin, replace(origin, tokenizer=tokenizer.fingerprint), run_dir, "pretrain")
    folder = None if origin.shards is None else run_dir.out / origin.shards
    if folder is None or origin.tokens is None or not prepared(folder, origin.tokens):
        data = prepare(recipe, run_dir.out, log, tokenizer, workers)
        instead = "put it back as it was" if folder is None else "its token shards are gone: put it back as it was"
        require_same(origin, replace(origin, text=data.origin.text), run_dir, "pretrain", instead=instead)
        return data
    if named:
        instead = f"leave --data out (`quern pretrain --resume {run_dir.flags}`)"
        found = replace(origin, text=text_fingerprint(recipe, run_dir.out))
        require_same(origin, found, run_dir, "pretrain", instead=instead)
    log(f"tokens: {folder}, as the run began with them")
    train, val = (Corpus.open(folder, split, fingerprint=origin.tokens) for split in ("train", "val"))
    return Prepared(tokenizer, train, val, {}, origin)


def data_of_run(recipe: Resolved, run_dir: RunDir, log: Callable[[str], None], *stages: str) -> Prepared:
    """The run's text for evaluation: the shards that one of these stages (by default all) names, else its text."""
    for stage in stages or STAGES:
        origin = read_origin(run_dir.stage(stage))
        if origin is not None:
            return open_data(recipe, run_dir, origin, log)
    return prepare(recipe, run_dir.out, log, run_dir.tokenizer())
