"""Bits per byte of a run's texts: the validation text and each of its kinds, and a sample of the training text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from quern.data.loader import windows
from quern.data.shards import Corpus
from quern.eval.bits_per_byte import BitsPerByte, bits_per_byte
from quern.eval.on_ranks import own_part
from quern.eval.score import Score
from quern.machine import Machine
from quern.mesh import ProcessGroup
from quern.model.base import LanguageModel
from quern.text.tokenizer import Tokenizer

VALIDATION, TRAIN = "validation", "train"


def text_scores(
    model: LanguageModel,
    tokenizer: Tokenizer,
    machine: Machine,
    val: Corpus,
    train: Corpus | None = None,
    *,
    kinds: Sequence[str] = (),
    context: int,
    rows: int,
    group: ProcessGroup | None = None,
) -> list[Score]:
    """Measures a model's texts. The validation text is read once, kind by kind, and its score is of their sum.

    Args:
        model: In evaluation mode.
        tokenizer: Its tokenizer.
        machine: The machine that computes.
        val: The validation text.
        train: Training text, as from `sample`; None: not measured.
        kinds: The kind of each document of `val`; "" has no score of its own. Empty: no kinds.
        context: The most targets of a window.
        rows: Windows in a batch.
        group: The ranks that measure some batches each; None is a single process.

    Returns:
        Scores named validation, train, and validation/KIND for each kind.
    """

    def measure(corpus: Corpus) -> BitsPerByte:
        batches = own_part(windows(corpus, context, rows=rows), group)
        return bits_per_byte(model, batches, tokenizer.token_bytes(), machine, group)

    names = np.array(kinds or [""] * val.num_documents, dtype=object)
    parts = {kind: measure(val.part(np.flatnonzero(names == kind))) for kind in dict.fromkeys(names)}
    nats = sum(part.nats_per_token * part.tokens for part in parts.values())
    tokens, size = (sum(getattr(part, name) for part in parts.values()) for name in ("tokens", "bytes"))
    found = {VALIDATION: BitsPerByte.of(nats, tokens, size)}
    if train is not None:
        found[TRAIN] = measure(train)
    found |= {f"{VALIDATION}/{kind}": parts[kind] for kind in sorted(parts) if kind}
    return [measured.score(name, tokenizer.vocab_size) for name, measured in found.items()]


def sample(corpus: Corpus, tokens: int) -> Corpus:
    """Documents from all over a corpus, always the same ones, of `tokens` tokens at most. The last one may be cut."""
    count = max(1, min(corpus.num_documents, corpus.num_documents * tokens // corpus.num_tokens))
    chosen = corpus.part(np.linspace(0, corpus.num_documents - 1, count).astype(np.int64))
    before = np.cumsum(chosen.lengths) - chosen.lengths
    lengths = np.clip(tokens - before, 0, chosen.lengths)
    kept = chosen.part(np.flatnonzero(lengths > 1))
    kept.lengths[:] = lengths[lengths > 1]
    return kept


def kinds_of_documents(corpus: Corpus, tokenizer: Tokenizer, known: Iterable[tuple[str, str]]) -> list[str]:
    """The kind of each document of a corpus; "" for one that is not among the known (kind, text)."""
    by_text = {text: kind for kind, text in known}
    texts = (tokenizer.decode(corpus.gather(number, 1).tolist()) for number in range(corpus.num_documents))
    return [by_text.get(text, "") for text in texts]
