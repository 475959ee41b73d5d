"""The inputs of a stage: `origin.json`, written when the stage begins and checked when it is resumed.

The file names the tokenizer, the text, the token shards and the conversations by fingerprint. A resumed stage uses the
shards that it began with. If text, conversations or tokenizer have changed, the stage refuses to resume and names both
fingerprints, because training on other data would silently be wrong.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quern.data.batch import GROUP_SIZE, groups_of
from quern.data.shards import Corpus
from quern.flags.recipe_file import map_paths
from quern.recipe import BUILT_IN_CONVERSATIONS, Recipe
from quern.records import read_json, typed
from quern.runs.run_dir import RunDir
from quern.text.tokenizer import Tokenizer
from quern.train import manifest
from quern.train.manifest import CheckpointError, read_manifest

FILE = "origin.json"
HASHED_DOCUMENTS = 256
SHOWN = 16
"""Number of digits of a fingerprint in messages."""


@dataclass(frozen=True)
class Origin:
    """Fingerprints (hex) and locations of a stage's inputs; None for an input that the stage does not have.

    Attributes:
        tokenizer: Fingerprint of the run's tokenizer.
        text: Fingerprint of the tokenized text.
        tokens: Fingerprint of the token shards.
        shards: Folder of the shards, relative to the output folder if inside it.
        conversations: Fingerprint of the token ids for fine-tuning.
        source: SHA-256 of the recipe's Python file.
        base: The model that provided the initial weights: run (None for the same run), stage, step, tokens.
        rewards: Fingerprint of the files that questions and rewards of reinforcement learning are read from.
        group_size: Size of the groups in which documents are shuffled; None if all documents are one group.
    """

    tokenizer: str
    text: str | None = None
    tokens: str | None = None
    shards: str | None = None
    conversations: str | None = None
    source: str | None = None
    base: dict[str, Any] | None = None
    rewards: str | None = None
    group_size: int | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def source_digest(source: str | None) -> str | None:
    """SHA-256 (hex) of a recipe file's text."""
    return None if source is None else hashlib.sha256(source.encode("utf-8")).hexdigest()


def read_origin(stage: Path) -> Origin | None:
    """Reads origin.json of a stage folder, or its copy in the newest checkpoint if the file is missing.

    Returns:
        The origin; None for a stage without one, such as an imported model.

    Raises:
        ValueError: The file is damaged.
    """
    path = stage / FILE
    if not path.exists():
        body = newest_meta(stage).get("origin")
        return typed(body, Origin) if body else None
    return read_json(path, Origin, "remove it, the run's checkpoints hold the same facts")


def newest_meta(stage: Path) -> dict[str, Any]:
    """The metadata of the newest readable checkpoint of a stage; empty if there is none."""
    for step in reversed(manifest.steps(stage / "checkpoints")):
        with suppress(CheckpointError):
            return read_manifest(manifest.path_of(stage / "checkpoints", step))["meta"]
    return {}


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """The recipe with absolute paths, so that it is valid in every working directory."""

    def absolute(name: str) -> str:
        return str(Path(name).absolute()) if name not in BUILT_IN_CONVERSATIONS and Path(name).exists() else name

    return map_paths(recipe, absolute)


def require_tokenizer(run_dir: RunDir, tokenizer: Tokenizer, origin: Origin) -> None:
    """Raises ValueError if the run's tokenizer.json differs from the tokenizer that a stage was trained with."""
    if tokenizer.fingerprint == origin.tokenizer:
        return
    raise ValueError(
        f"{run_dir.folder / 'tokenizer.json'} is another tokenizer ({tokenizer.fingerprint[:SHOWN]}) than the one that "
        f"run '{run_dir.run}' was trained with ({origin.tokenizer[:SHOWN]}): {run_dir.tokenizer_copy(origin.tokenizer)}"
    )


def refuse_second_tokenizer(run_dir: RunDir, tokenizer: Tokenizer) -> None:
    """Raises ValueError if any stage of the run was trained with another tokenizer."""
    path = run_dir.folder / "tokenizer.json"
    trained = sorted(path.parent.name for path in run_dir.folder.glob("*/checkpoints") if manifest.steps(path))
    if not trained or not path.exists():
        return
    known = run_dir.tokenizer().fingerprint
    if known != tokenizer.fingerprint:
        raise ValueError(
            f"run '{run_dir.run}' holds a model ({', '.join(trained)}) of another tokenizer ({known[:SHOWN]}, this "
            f"text gives {tokenizer.fingerprint[:SHOWN]}): name another run with --run"
        )


def require_same(meta: dict[str, Any], origin: Origin, path: Path) -> None:
    """Raises CheckpointError if a checkpoint was trained on other inputs.

    Args:
        meta: The checkpoint's metadata.
        origin: The inputs of the resumed stage.
        path: The checkpoint, for the message.
    """
    found = typed(meta.get("origin", {}), dict[str, str | int | float | bool | dict[str, Any] | None])
    for name, what in (("tokenizer", "tokenizer"), ("tokens", "text"), ("conversations", "set of conversations")):
        before, now = found.get(name), getattr(origin, name)
        if before is not None and before != now:
            raise CheckpointError(
                f"{path} was trained with another {what} ({str(before)[:SHOWN]}) than this run has now "
                f"({(now or 'none')[:SHOWN]}): put back the files of the run, or name another run with --run"
            )


def group_size_of(corpus: Corpus) -> int | None:
    """The size of the groups in which documents are shuffled; None if all documents are one group."""
    return GROUP_SIZE if groups_of(corpus) > 1 else None


def refuse_other_order(run_dir: RunDir, origin: Origin, corpus: Corpus) -> None:
    """Raises ValueError if documents were shuffled in other groups when the run began: its batches would be others."""
    before, now = (
        f"in groups of size {size:,}" if size else "all together" for size in (origin.group_size, group_size_of(corpus))
    )
    if before != now:
        raise ValueError(
            f"run '{run_dir.run}' was begun by another version of quern, whose batches had another order (documents "
            f"shuffled {before}, now {now}): train on from its model with `quern pretrain --from {run_dir.run} "
            "--run NAME`"
        )


def refuse_other_conversations(run_dir: RunDir, origin: Origin, found: str) -> None:
    """Raises ValueError if the conversations differ from those that fine-tuning began with."""
    if origin.conversations is not None and origin.conversations != found:
        raise ValueError(
            f"the conversations have changed since run '{run_dir.run}' was fine-tuned on them (fingerprint "
            f"{origin.conversations[:SHOWN]}, now {found[:SHOWN]}): put them back as they were, or fine-tune again "
            f"under another name with `quern sft --from {run_dir.run} --run NAME`"
        )


def corpus_fingerprint(*corpora: Corpus) -> str:
    """SHA-256 (hex) of documents: lengths, token ids and masks. It reads some documents at a time."""
    digest = hashlib.sha256()
    for corpus in corpora:
        digest.update(corpus.lengths.tobytes())
        for mask in (False, True) if corpus.masked else (False,):
            for at in range(0, corpus.num_documents, HASHED_DOCUMENTS):
                starts, lengths = (values[at : at + HASHED_DOCUMENTS] for values in (corpus.starts, corpus.lengths))
                out = np.empty(int(lengths.sum()), np.bool_ if mask else np.int32)
                corpus.copy(out, np.cumsum(lengths) - lengths, starts, lengths, mask)
                digest.update(out.tobytes())
    return digest.hexdigest()
