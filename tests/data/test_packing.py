"""Packing, compared with naive packers that follow each definition, one document at a time."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quern.data.packing import METHODS, Packing, pack

LENGTHS = st.lists(st.integers(1, 40), max_size=80)


def rows_of(packing: Packing) -> list[list[tuple[int, int]]]:
    pairs = list(zip(packing.document.tolist(), packing.length.tolist(), strict=True))
    ends = packing.row_offsets.tolist()
    return [pairs[a:b] for a, b in zip(ends, ends[1:], strict=False)]


def naive_best_fit(lengths: list[int], row_tokens: int, buffer: int) -> list[list[tuple[int, int]]]:
    waiting = list(range(len(lengths)))
    rows: list[list[tuple[int, int]]] = []
    space = 0
    while waiting:
        if space == 0:
            rows.append([])
            space = row_tokens
        size = {i: min(lengths[i], row_tokens) for i in waiting[:buffer]}
        fitting = [i for i in size if size[i] <= space]
        chosen = max(fitting, key=lambda i: (size[i], -i)) if fitting else min(size, key=lambda i: (size[i], -i))
        taken = min(size[chosen], space)
        rows[-1].append((chosen, taken))
        space -= taken
        waiting.remove(chosen)
    return rows


def naive_keep_tails(lengths: list[int], row_tokens: int, buffer: int) -> list[list[tuple[int, list[int]]]]:
    """Rows of (document, places of its tokens in the row). Place 0 is BOS, which every segment repeats."""
    left = [list(range(min(n, row_tokens))) for n in lengths]
    waiting = list(range(len(lengths)))
    rows: list[list[tuple[int, list[int]]]] = []
    space = 0
    while waiting:
        if space == 0:
            rows.append([])
            space = row_tokens
        fitting = [i for i in waiting[:buffer] if len(left[i]) <= space]
        if fitting:
            chosen = max(fitting, key=lambda i: (len(left[i]), -i))
            waiting.remove(chosen)
        else:  # cut it, and let it wait on with BOS and what is left
            chosen = min(waiting[:buffer], key=lambda i: (len(left[i]), -i))
        taken = left[chosen][:space]
        left[chosen] = [0, *left[chosen][space:]]
        rows[-1].append((chosen, taken))
        space -= len(taken)
    return rows


def naive_greedy(lengths: list[int], row_tokens: int, crop: bool) -> list[list[tuple[int, int]]]:
    rows: list[list[tuple[int, int]]] = []
    space = 0
    for index, length in enumerate(lengths):
        length = min(length, row_tokens)
        if space == 0 or (not crop and length > space):
            rows.append([])
            space = row_tokens
        taken = min(length, space)
        rows[-1].append((index, taken))
        space -= taken
    return rows


def naive_first_fit_decreasing(lengths: list[int], row_tokens: int) -> list[list[tuple[int, int]]]:
    rows: list[list[tuple[int, int]]] = []
    space: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -min(lengths[i], row_tokens)):
        length = min(lengths[index], row_tokens)
        row = next((r for r, room in enumerate(space) if room >= length), None)
        if row is None:
            row = len(rows)
            rows.append([])
            space.append(row_tokens)
        rows[row].append((index, length))
        space[row] -= length
    return rows


@given(LENGTHS, st.integers(1, 30), st.integers(1, 20))
def test_equals_the_naive_packer(lengths, row_tokens, buffer):
    expected = {
        "best-fit": naive_best_fit(lengths, row_tokens, buffer),
        "greedy-crop": naive_greedy(lengths, row_tokens, crop=True),
        "greedy-pad": naive_greedy(lengths, row_tokens, crop=False),
        "first-fit-decreasing": naive_first_fit_decreasing(lengths, row_tokens),
    }
    assert set(expected) == set(METHODS)
    for method, rows in expected.items():
        assert rows_of(pack(np.array(lengths, dtype=np.int64), row_tokens, method, buffer)) == rows, method


def places_of(packing: Packing) -> list[list[tuple[int, list[int]]]]:
    starts = iter(packing.start.tolist())
    return [
        [(i, [0, *range(start + 1, start + n)]) for (i, n), start in zip(row, starts, strict=False)]
        for row in rows_of(packing)
    ]


@given(LENGTHS, st.integers(2, 30), st.integers(1, 20))
def test_kept_tails_equal_the_naive_packer_and_lose_nothing(lengths, row_tokens, buffer):
    packing = pack(np.array(lengths, dtype=np.int64), row_tokens, "best-fit", buffer, keep_tails=True)
    rows = naive_keep_tails(lengths, row_tokens, buffer)
    assert places_of(packing) == rows
    held = sorted((i, place) for row in rows for i, places in row for place in places if place)
    assert held == [(i, place) for i, n in enumerate(lengths) for place in range(1, min(n, row_tokens))]
    assert all(sum(len(places) for _, places in row) == row_tokens for row in rows[:-1])
    if all(n <= row_tokens for n in lengths):
        assert packing.report()["cropped_share"] == 0
