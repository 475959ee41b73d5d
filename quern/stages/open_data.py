"""Opens the tokens that a run was made from, and refuses text that has changed since the run began."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quern.data.shards import Corpus
from quern.data.token_file import prepared
from quern.recipe import Recipe
from quern.runs.origin import SHOWN, Origin, group_size_of, read_origin, require_tokenizer, source_digest
from quern.runs.run_dir import STAGES, RunDir
from quern.stages.prepare import Prepared, prepare, text_fingerprint


def make_origin(
    run_dir: RunDir,
    data: Prepared,
    source: str | None,
    base: dict[str, Any] | None = None,
) -> Origin:
    """The origin of a pretraining stage.

    Args:
        run_dir: The run.
        data: Its prepared text.
        source: The recipe's own Python file, as text.
        base: What the first weights come from, where they are not random.
    """
    folder = data.folder
    if folder is not None and folder.is_relative_to(run_dir.out):
        folder = folder.relative_to(run_dir.out)
    return Origin(
        tokenizer=data.tokenizer.fingerprint,
        text=data.text,
        tokens=data.tokens,
        shards=None if folder is None else str(folder),
        source=source_digest(source),
        base=base,
        group_size=group_size_of(data.train),
    )


def open_data(
    recipe: Recipe,
    run_dir: RunDir,
    origin: Origin,
    log: Callable[[str], None],
    *,
    named: bool = False,
    workers: int = 1,
) -> Prepared:
    """Opens the tokenizer and the shards that a stage began with.

    Args:
        recipe: The run's recipe, resolved.
        run_dir: The run.
        origin: What the stage was made from.
        log: Takes lines for the user.
        named: The user named the text in this command, so it must still be the same. Otherwise text that has changed
            is mentioned, and the shards are used.
        workers: Processes that encode text, where shards are missing.

    Raises:
        ValueError: The tokenizer or the text is another one; the message holds both fingerprints and what to do.
    """
    tokenizer = run_dir.tokenizer()
    require_tokenizer(run_dir, tokenizer, origin)
    folder = None if origin.shards is None else run_dir.out / origin.shards
    if folder is None or origin.tokens is None or not prepared(folder, origin.tokens):
        data = prepare(recipe, run_dir.out, log, tokenizer, workers)
        if origin.text is not None and data.text != origin.text:
            why = None if folder is None else "its token shards are gone"
            raise ValueError(_other_text(recipe, run_dir, origin, data.text, why))
        return data
    if named:
        found = text_fingerprint(recipe, run_dir.out)
        if found != origin.text:
            raise ValueError(_other_text(recipe, run_dir, origin, found, None))
    log(f"tokens: {folder}, as the run began with them")
    train, val = (Corpus.open(folder, split, fingerprint=origin.tokens) for split in ("train", "val"))
    return Prepared(tokenizer, train, val, {}, origin.text or "", origin.tokens, folder)


def data_of_run(recipe: Recipe, run_dir: RunDir, log: Callable[[str], None], *stages: str) -> Prepared:
    """The run's text for evaluation: the shards that one of these stages (by default all) names, else its text."""
    for stage in stages or STAGES:
        origin = read_origin(run_dir.stage(stage))
        if origin is not None:
            return open_data(recipe, run_dir, origin, log)
    return prepare(recipe, run_dir.out, log, run_dir.tokenizer())


def _other_text(recipe: Recipe, run_dir: RunDir, origin: Origin, found: str, why: str | None) -> str:
    begun, now = (origin.text or "")[:SHOWN], found[:SHOWN]
    with_shards = (
        f"continue with the text as it was, by leaving --data out (`quern pretrain --resume {run_dir.flags}`); or "
    )
    return (
        f"the text at {recipe.data} has changed since run '{run_dir.run}' began (fingerprint {begun}, now {now})"
        f"{f', and {why}' if why else ''}: {'put it back as it was; or ' if why else with_shards}"
        f"train on the new text under another name, from this run's model (`quern pretrain --from {run_dir.run} --run "
        f"NAME --data {recipe.data}`) or from the beginning (`quern run --run NAME --data {recipe.data}`)"
    )
