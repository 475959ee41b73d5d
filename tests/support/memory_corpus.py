"""A corpus of documents in memory, and the documents of any corpus."""

from collections.abc import Sequence

import numpy as np

from quern.data.shards import Corpus, Part
from quern.text.tokenizer import Tokenizer


def memory_corpus(
    ids: Sequence[np.ndarray | Sequence[int]], masks: Sequence[np.ndarray | Sequence[bool]] | None = None
) -> Corpus:
    """Each document starts with the same BOS; `masks` is True at tokens to be learned."""
    lengths = np.array([len(document) for document in ids], dtype=np.int64)
    tokens = np.concatenate([np.asarray(document, dtype=np.int32) for document in ids])
    mask = None if masks is None else np.concatenate([np.asarray(m, dtype=bool) for m in masks])
    starts = np.cumsum(lengths) - lengths
    part = Part(len(tokens), len(starts), lambda: starts, lambda: (tokens, mask), mask is not None)
    return Corpus([part], int(ids[0][0]))


def ids_of(corpus: Corpus) -> list[list[int]]:
    """The tokens of every document."""
    return [corpus.gather(document).tolist() for document in range(corpus.num_documents)]


def texts_of(corpus: Corpus, tokenizer: Tokenizer) -> list[str]:
    """Every document read back: BOS first, then nothing but text."""
    found = ids_of(corpus)
    assert all(ids[0] == tokenizer.bos and tokenizer.bos not in ids[1:] for ids in found)
    return [tokenizer.decode(ids[1:]) for ids in found]
