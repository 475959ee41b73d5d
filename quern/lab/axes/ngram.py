"""Bits per byte of n-gram models that count a run's own training tokens: what a trained model must beat to be of use.

Interpolated Witten-Bell smoothing (Witten and Bell 1991; Chen and Goodman 1998, section 2.6):

    P(w | h) = (count(h w) + distinct(h) · P(w | h')) / (count(h) + distinct(h))

where h' is h without its first token and distinct(h) is the number of tokens that follow h. Below the unigram is the
uniform distribution over the vocabulary. A context does not reach beyond the BOS of its document or the start of its
row, as in training. Nothing is tuned.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from quern.data.batch import Batch

ORDER = 3


def ngram_bits(train: Iterable[Batch], val: Iterable[Batch], token_bytes: np.ndarray, bos: int) -> dict[int, float]:
    """Bits per byte of the unigram, bigram and trigram.

    Args:
        train: The batches of the run. Each target that counts is counted with the tokens before it.
        val: The validation batches. As in `bits_per_byte`, a target counts if its token has at least one byte.
        token_bytes: The number of bytes of each token id, (vocabulary,).
        bos: The id that begins each document.

    Returns:
        Bits per byte by order, 1 to `ORDER`.

    Raises:
        ValueError: There is no target to count or to score.
    """
    V = len(token_bytes)
    seen, scored = (np.concatenate([_grams(batch, bos, V) for batch in batches], 1) for batches in (train, val))
    sizes = np.asarray(token_bytes, np.int64)[scored[-1]]
    scored, num_bytes = scored[:, sizes > 0], int(sizes.sum())
    if not seen.size or not num_bytes:
        raise ValueError("n-grams need targets to count and to score: hand in more training and validation text")
    bits, p = {}, np.full(scored.shape[1], 1 / V)
    for order in range(1, ORDER + 1):
        grams, counts = np.unique(_packed(seen[-order:], V), return_counts=True)
        contexts, first, distinct = np.unique(grams // (V + 1), return_index=True, return_counts=True)
        totals, wanted = np.add.reduceat(counts, first), _packed(scored[-order:], V)
        followers = _look_up(contexts, distinct, wanted // (V + 1))
        total = _look_up(contexts, totals, wanted // (V + 1)) + followers
        known = _look_up(grams, counts, wanted) + followers * p
        p = np.divide(known, total, out=p, where=total > 0)
        bits[order] = float(-np.log2(p).sum() / num_bytes)
    return bits


def _grams(batch: Batch, bos: int, V: int) -> np.ndarray:
    """The targets that count, last, and the tokens before them, (ORDER, N); V stands for "before the beginning"."""
    rows = [batch.tokens]
    for _ in range(ORDER - 2):
        before = np.pad(rows[0][:, :-1], ((0, 0), (1, 0)), constant_values=V)
        rows.insert(0, np.where((rows[0] == bos) | (rows[0] == V), V, before))
    return np.stack([row[batch.mask] for row in (*rows, batch.targets)])


def _packed(columns: np.ndarray, V: int) -> np.ndarray:
    """One int64 for each column of ids (order, N), in the order of the ids."""
    if (V + 1) ** len(columns) > 1 << 63:
        raise ValueError(f"a vocabulary of {V:,} is too large for n-grams of order {len(columns)}: use a smaller one")
    packed = np.zeros(columns.shape[1], np.int64)
    for ids in columns:
        packed = packed * (V + 1) + ids
    return packed


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The values of the wanted keys, 0 for those that are missing. keys: sorted."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)
