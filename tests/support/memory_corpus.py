"""A corpus of documents in memory."""

from collections.abc import Sequence

import numpy as np

from quern.data.shards import Corpus, Part


def memory_corpus(
    ids: Sequence[np.ndarray | Sequence[int]], masks: Sequence[np.ndarray | Sequence[bool]] | None = None
) -> Corpus:
    """Each document starts with the same BOS; `masks` is True at tokens to be learned."""
    lengths = np.array([len(document) for document in ids], dtype=np.int64)
    tokens = np.concatenate([np.asarray(document, dtype=np.int32) for document in ids])
    mask = None if masks is None else np.concatenate([np.asarray(m, dtype=bool) for m in masks])
    return Corpus([Part.of_arrays(tokens, np.cumsum(lengths) - lengths, mask)], int(ids[0][0]))
