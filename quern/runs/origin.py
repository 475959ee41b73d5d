"""What a stage was made from: `origin.json`, written once when the stage begins and checked whenever it goes on.

It names the run's tokenizer, the content of the text, the token shards and the conversations by fingerprint. A stage
that is resumed uses the shards it began with. Text, conversations or a tokenizer that are no longer the same are
refused with both fingerprints: training would go on, and be wrong.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from quern.data.shards import Corpus
from quern.recipe import Recipe
from quern.runs.run_dir import RunDir
from quern.text.tokenizer import Tokenizer
from quern.train import checkpoint
from quern.train.manifest import CheckpointError, read_manifest

FILE = "origin.json"
SHOWN = 16
"""Digits of a fingerprint in messages."""


@dataclass(frozen=True)
class Origin:
    """Fingerprints (hex) and places of what a stage was made from; None where it has no such thing.

    tokenizer: of the run's tokenizer; text: of the content that was tokenized; tokens: of the shards; shards: their
    folder, relative to the output folder where it is inside it; conversations: of the token ids to fine-tune on;
    source: of the recipe's own Python file; base: the model that the first weights are of (run, None for the same run;
    stage, step, tokens).
    """

    tokenizer: str
    text: str | None = None
    tokens: str | None = None
    shards: str | None = None
    conversations: str | None = None
    source: str | None = None
    base: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def source_digest(source: str | None) -> str | None:
    """SHA-256 (hex) of a recipe file's text."""
    return None if source is None else hashlib.sha256(source.encode("utf-8")).hexdigest()


def read_origin(stage: Path) -> Origin | None:
    """The origin of the stage in this folder; None where nothing was trained with one, as after `quern import`.

    Where the file is missing, the newest checkpoint has it too.

    Raises:
        ValueError: The file is damaged.
    """
    path = stage / FILE
    if not path.exists():
        body = newest_meta(stage).get("origin")
        return Origin(**body) if body else None
    try:
        return Origin(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged ({error}): remove it, the run's checkpoints hold the same facts"
        ) from error


def newest_meta(stage: Path) -> dict[str, Any]:
    """The facts beside the state in the newest checkpoint of a stage; empty where there is none that can be read."""
    for step in reversed(checkpoint.steps(stage / "checkpoints")):
        with suppress(CheckpointError):
            return read_manifest(checkpoint.path_of(stage / "checkpoints", step))["meta"]
    return {}


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """The recipe with the full path of each file and folder that it names, so that it means the same elsewhere."""

    def full(name: str | None) -> str | None:
        return name if name is None or name == "tinyworld" or not Path(name).exists() else str(Path(name).absolute())

    text = replace(recipe.text, tokenizer=full(recipe.text.tokenizer))
    data, val, talks = full(recipe.data) or recipe.data, full(recipe.val), full(recipe.conversations)
    return replace(recipe, data=data, val=val, conversations=talks, text=text)


def require_tokenizer(run_dir: RunDir, tokenizer: Tokenizer, origin: Origin) -> None:
    """Raises ValueError where the run's tokenizer.json is not the one that a stage was trained with."""
    if tokenizer.fingerprint == origin.tokenizer:
        return
    raise ValueError(
        f"{run_dir.folder / 'tokenizer.json'} is another tokenizer ({tokenizer.fingerprint[:SHOWN]}) than the one that "
        f"run '{run_dir.run}' was trained with ({origin.tokenizer[:SHOWN]}): {run_dir.tokenizer_copy(origin.tokenizer)}"
    )


def refuse_second_tokenizer(run_dir: RunDir, tokenizer: Tokenizer) -> None:
    """Raises ValueError where models of the run, of any stage, were trained with another tokenizer."""
    path = run_dir.folder / "tokenizer.json"
    trained = sorted(path.parent.name for path in run_dir.folder.glob("*/checkpoints") if checkpoint.steps(path))
    if not trained or not path.exists():
        return
    known = run_dir.tokenizer().fingerprint
    if known != tokenizer.fingerprint:
        raise ValueError(
            f"run '{run_dir.run}' holds a model ({', '.join(trained)}) of another tokenizer ({known[:SHOWN]}, this "
            f"text gives {tokenizer.fingerprint[:SHOWN]}): name another run with --run"
        )


def require_same(meta: dict[str, Any], origin: Origin, path: Path) -> None:
    """Raises CheckpointError where a checkpoint was made from something else than the stage says.

    Args:
        meta: The checkpoint's own facts.
        origin: What the stage goes on with.
        path: Where the checkpoint is, for the message.
    """
    found = meta.get("origin", {})
    for name, what in (("tokenizer", "tokenizer"), ("tokens", "text"), ("conversations", "set of conversations")):
        before, now = found.get(name), getattr(origin, name)
        if before is not None and before != now:
            raise CheckpointError(
                f"{path} was trained with another {what} ({before[:SHOWN]}) than this run has now "
                f"({(now or 'none')[:SHOWN]}): put back the files of the run, or name another run with --run"
            )


def refuse_other_conversations(run_dir: RunDir, origin: Origin, found: str) -> None:
    """Raises ValueError where the conversations are not those that fine-tuning began with."""
    if origin.conversations is not None and origin.conversations != found:
        raise ValueError(
            f"the conversations have changed since run '{run_dir.run}' was fine-tuned on them (fingerprint "
            f"{origin.conversations[:SHOWN]}, now {found[:SHOWN]}): put them back as they were, or fine-tune again "
            f"under another name with `quern sft --from {run_dir.run} --run NAME`"
        )


def corpus_fingerprint(*corpora: Corpus) -> str:
    """SHA-256 (hex) over documents in memory: token ids, lengths and masks."""
    digest = hashlib.sha256()
    for corpus in corpora:
        digest.update(corpus.lengths.tobytes())
        for document in range(corpus.num_documents):
            digest.update(corpus.gather(document).tobytes())
        if corpus.masks is not None:
            digest.update(corpus.masks.tobytes())
    return digest.hexdigest()
