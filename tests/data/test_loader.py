"""Packing against naive packers that follow each definition; the loader: rows, masks, refusals, windows, prefetch."""

import threading
from collections import Counter
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quern.bench.material import write_empty_shards
from quern.data.batch import prefetch
from quern.data.loader import Loader
from quern.data.packing import METHODS, Packing, pack, windows
from quern.data.shards import Corpus
from quern.process import start
from tests.support.batches import sized
from tests.support.memory_corpus import memory_corpus

LENGTHS = st.lists(st.integers(1, 40), max_size=80)


def rows_of(packing: Packing) -> list[list[tuple[int, int]]]:
    pairs = list(zip(packing.document.tolist(), packing.length.tolist(), strict=True))
    return [pairs[a:b] for a, b in pairwise(packing.row_offsets.tolist())]


Places = list[list[tuple[int, list[int]]]]
"""Rows of (document, places of its tokens in the row). Place 0 is BOS, which every segment repeats."""


def naive_best_fit(lengths: list[int], row_tokens: int, buffer: int, keep_tails: bool) -> Places:
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
        choose = max if fitting else min
        chosen = choose(fitting or waiting[:buffer], key=lambda i: (len(left[i]), -i))
        taken = left[chosen][:space]
        if fitting or not keep_tails:
            waiting.remove(chosen)
        left[chosen] = [0, *left[chosen][space:]]  # it waits on with BOS and what is left
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


def naive_stream(lengths: list[int], row_tokens: int) -> list[list[tuple[int, int]]]:
    """Rows of the documents end to end, each of which begins with the last token of the row before."""
    places = [index for index, length in enumerate(lengths) for _ in range(length)]
    rows = [places[at : at + row_tokens] for at in range(0, len(places) - 1, row_tokens - 1)]
    return [[(index, len(list(same))) for index, same in groupby(row)] for row in rows]


@given(LENGTHS, st.integers(2, 30), st.integers(1, 20))
def test_equals_the_naive_packer(lengths, row_tokens, buffer):
    best_fit = naive_best_fit(lengths, row_tokens, buffer, keep_tails=False)
    expected = {
        "best-fit": [[(i, len(places)) for i, places in row] for row in best_fit],
        "greedy-crop": naive_greedy(lengths, row_tokens, crop=True),
        "greedy-pad": naive_greedy(lengths, row_tokens, crop=False),
        "first-fit-decreasing": naive_first_fit_decreasing(lengths, row_tokens),
        "stream": naive_stream(lengths, row_tokens),
    }
    assert set(expected) == set(METHODS)
    for method, rows in expected.items():
        assert rows_of(pack(np.array(lengths, dtype=np.int64), row_tokens, method, buffer)) == rows, method


@given(LENGTHS, st.integers(2, 30), st.integers(1, 20))
def test_kept_tails_equal_the_naive_packer_and_lose_nothing(lengths, row_tokens, buffer):
    packing = pack(np.array(lengths, dtype=np.int64), row_tokens, "best-fit", buffer, keep_tails=True)
    rows = naive_best_fit(lengths, row_tokens, buffer, keep_tails=True)
    starts = iter(packing.start.tolist())
    found = [[(i, n, next(starts)) for i, n in row] for row in rows_of(packing)]
    assert [[(i, [0, *range(start + 1, start + n)]) for i, n, start in row] for row in found] == rows
    held = sorted((i, place) for row in rows for i, places in row for place in places if place)
    assert held == [(i, place) for i, n in enumerate(lengths) for place in range(1, min(n, row_tokens))]
    assert all(sum(len(places) for _, places in row) == row_tokens for row in rows[:-1])
    if all(n <= row_tokens for n in lengths):
        assert packing.report()["cropped_share"] == 0


# --- the loader ---

BOS = 0


def document(index: int, length: int) -> list[int]:
    """Each token identifies its document and its place: 1000 · (index + 1) + place."""
    return [BOS] + [1000 * (index + 1) + place for place in range(1, length)]


def corpus_of(lengths: list[int], masks: list[list[bool]] | None = None) -> Corpus:
    return memory_corpus([document(i, n) for i, n in enumerate(lengths)], masks)


def random_lengths(count: int, longest: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(2, longest, count).tolist()


def parts(row: list[int]) -> list[list[int]]:
    """The row split before each BOS."""
    starts = [i for i, token in enumerate(row) if token == BOS] + [len(row)]
    return [row[a:b] for a, b in pairwise(starts)]


def full_rows(loader: Loader) -> list[tuple[list[int], list[bool]]]:
    """The rows of the first epoch, context + 1 tokens each, with their masks. The loader has batches of one row."""
    batches = [loader.batch(step) for step in range(loader.steps_per_epoch)]
    return [([*b.tokens[0, :1].tolist(), *b.targets[0].tolist()], [False, *b.mask[0].tolist()]) for b in batches]


WITH_BOS = [method for method in METHODS if method != "stream"]
"""The packers of rows that begin with BOS, also with masks."""
LONG_AND_SHORT = [700] * 3 + [25, 26, 49, 50] + random_lengths(60, 40)  # rows of 25: many to cut, some just so


@pytest.mark.parametrize("packing", WITH_BOS)
def test_the_token_after_a_document_that_was_cut_is_no_target(packing):
    lengths, held_back = LONG_AND_SHORT, 0
    for row, mask in full_rows(sized(65536, 5)(corpus_of(lengths), 24, 1, seed=3, packing=packing)):
        assert row[0] == BOS
        at = 0
        for part in parts(row):
            assert (np.diff(part[1:]) == 1).all(), "consecutive tokens of one document"
            assert all(mask[at + 1 : at + len(part)])
            at += len(part)
            if at < len(row) and len(part) > 1 and any(row[at:]):
                ended = part[-1] % 1000 == lengths[part[-1] // 1000 - 1] - 1
                assert mask[at] == ended, "BOS is a target only where a document ended"
                held_back += not ended
    assert held_back > 0 or packing != "best-fit", "the case must occur"


@pytest.mark.parametrize("packing", WITH_BOS)
@pytest.mark.parametrize("too_long", ["split", "crop", "drop"])
def test_the_report_is_what_the_batches_hold(packing, too_long):
    """The expected counts come from the tokens of a whole epoch, which is one chunk here."""
    lengths = LONG_AND_SHORT
    loader = sized(65536, 5)(corpus_of(lengths), 24, 1, packing=packing, too_long=too_long)
    report = loader.report()
    rows_ = [row for row, _ in full_rows(loader)]
    content = sum(t != BOS for row in rows_ for t in row)
    long = [n for n in lengths if n > 25]
    assert report["documents_too_long"] == len(long)
    dropped = sum(n - 1 for n in long) if too_long == "drop" else 0
    total = sum(n - 1 for n in lengths)
    assert report["cropped_share"] == pytest.approx(1 - content / (total - dropped), abs=1e-12)
    assert report["rows"] == len(rows_)
    padded = round(report["padding_share"] * len(rows_) * 25)
    heads = len(lengths) - (len(long) if too_long == "drop" else 0)
    assert report["pieces"] == heads
    bos = sum(t == BOS for row in rows_ for t in row)
    assert report["added_bos_share"] * len(rows_) * 25 == pytest.approx(bos - padded - heads)
    assert report["utilisation"] + report["padding_share"] == pytest.approx(1)
    if packing in ("best-fit", "greedy-crop"):
        assert padded <= 24, "only the last row is padded"
    elif too_long != "split":
        assert report["added_bos_share"] == pytest.approx(0)
    if packing == "best-fit":
        assert (report["cropped_share"] == 0) == (too_long == "split")


def test_tokens_targets_and_mask_line_up():
    batch = Loader(corpus_of([4, 5]), 9, 3, packing="greedy-pad").batch(0)
    assert batch.tokens.dtype == batch.targets.dtype == np.int32 and batch.mask.dtype == bool
    assert batch.tokens.shape == batch.targets.shape == batch.mask.shape == (3, 9) and batch.weight is None
    for array in (batch.tokens, batch.targets, batch.mask):
        assert array.flags.c_contiguous
    for tokens, targets, mask in zip(batch.tokens.tolist(), batch.targets.tolist(), batch.mask, strict=True):
        both = [document(0, 4), document(1, 5)]
        assert [*tokens, targets[-1]] in ([*both[0], *both[1], BOS], [*both[1], *both[0], BOS])
        assert tokens[1:] == targets[:-1]
        assert mask.tolist() == [True] * 8 + [False], "the next document's BOS is a target, padding is none"


def test_a_corpus_smaller_than_a_batch_repeats():
    batch = Loader(corpus_of([5]), 8, 4).batch(2)
    assert batch.tokens[:, :5].tolist() == [document(0, 5)] * 4 and batch.mask.sum(axis=1).tolist() == [4] * 4


@pytest.mark.parametrize(("rank", "ranks"), [(2, 2), (-1, 2), (0, 3)])
def test_a_batch_has_a_row_for_each_rank(rank, ranks):
    with pytest.raises(ValueError, match="use fewer ranks"):
        Loader(corpus_of([5, 6]), 8, 2).batch(0, rank, ranks)


@pytest.mark.timeout(300)
def test_a_loader_of_a_million_documents_starts_resumes_and_stays_small(tmp_path: Path) -> None:
    """The bars are those of 10⁸ documents, docs/benchmarks/README.md: one group is in memory in both cases."""
    documents, mean_tokens, context, batch_rows = 1_000_000, 100, 2048, 32
    write_empty_shards(tmp_path, documents, mean_tokens, seed=0)
    order = {"folder": str(tmp_path), "context": context, "batch_rows": batch_rows, "seed": 0}
    with start("quern.bench.material", "loader", order) as process:
        answers = [process.ask(step) for step in (0, documents * mean_tokens // 2 // (context + 1) // batch_rows)]
    for found in answers:
        assert found["cpu_seconds"] < 10 and found.get("peak_bytes", 0) < 2e9 and found.get("own_bytes", 0) < 0.5e9


# --- masks: fine-tuning ---


def conversations(count: int, seed: int = 0, longest: int = 60) -> tuple[Corpus, list[int], list[list[bool]]]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, longest, count).tolist()
    masks = []
    for length in lengths:
        mask = rng.random(length) < rng.choice([0.0, 0.05, 0.5])
        mask[0] = False
        masks.append(mask.tolist())
    return corpus_of(lengths, masks), lengths, masks


@pytest.mark.parametrize("packing", WITH_BOS)
@pytest.mark.parametrize("too_long", ["split", "crop"])
def test_the_mask_follows_its_tokens(packing, too_long):
    corpus, _, masks = conversations(80, longest=90)
    loader = Loader(corpus, 32, 2, packing=packing, too_long=too_long)
    for step in range(60):
        batch = loader.batch(step)
        for target, counts in zip(batch.targets.reshape(-1).tolist(), batch.mask.reshape(-1).tolist(), strict=True):
            if target == BOS:
                assert not counts
            else:
                assert counts == masks[target // 1000 - 1][target % 1000]


@pytest.mark.parametrize("packing", WITH_BOS)
@pytest.mark.parametrize("too_long", ["split", "crop", "drop"])
def test_no_row_is_without_a_target(packing, too_long):
    """The mean over a batch, a micro-batch or a rank without targets would be NaN."""
    corpus, lengths, masks = conversations(200, seed=1)
    loader = sized(50)(corpus, 24, 6, packing=packing, too_long=too_long)
    for step in range(80):
        assert loader.batch(step).mask.any(axis=1).all()
        for rank in range(3):
            assert all(part.mask.any() for part in loader.batch(step, rank, 3).split(1))
    report = loader.report()
    long = [n > 25 for n in lengths]
    learns = [any(mask if too_long == "split" else mask[:25]) for mask in masks]
    if too_long == "drop":
        learns = [a and not b for a, b in zip(learns, long, strict=True)]
    assert report["documents"] == 200
    assert report["documents_without_target"] == learns.count(False) > 0
    assert report["documents_too_long"] == sum(long) > 0
    seen = {int(t) // 1000 - 1 for s in range(80) for t in loader.batch(s).targets.reshape(-1) if t != BOS}
    assert not any(long[i] for i in seen) if too_long == "drop" else any(long[i] for i in seen)
    assert all(learns[i] for i in seen)


@pytest.mark.parametrize("longest", [25, 90])
def test_padding_methods_learn_whole_conversations(longest):
    corpus, lengths, masks = conversations(100, seed=2, longest=longest)
    loader = Loader(corpus, 24, 1, packing="first-fit-decreasing")
    learnt: Counter[int] = Counter()
    for step in range(loader.steps_per_epoch):
        batch = loader.batch(step)
        learnt.update(batch.targets[batch.mask].tolist())
    expected = [1000 * (i + 1) + p for i, mask in enumerate(masks) for p, counts in enumerate(mask) if counts]
    assert learnt == Counter(expected), "every token to learn, exactly once an epoch"


def test_a_corpus_without_a_target_is_refused():
    masks = [[True] + [False] * 4, [False] * 8 + [True]]
    with pytest.raises(ValueError, match="nothing to learn: none of 2 documents"):
        Loader(corpus_of([5, 9], masks), 7, 2, too_long="crop")
    assert Loader(corpus_of([5, 9], masks), 7, 1).batch(0).targets.tolist() == [[2008] + [BOS] * 6]
    with pytest.raises(ValueError, match="2 are longer"):
        Loader(corpus_of([20, 30]), 7, 2, too_long="drop")


def test_rows_of_a_stream_are_cut_from_documents_end_to_end():
    loader = Loader(corpus_of(LONG_AND_SHORT), 24, 1, seed=3, packing="stream")
    rows = [row for row, mask in full_rows(loader) if all(mask[1:])]  # without the last one, which is padded
    total = sum(LONG_AND_SHORT)
    assert len(rows) == (total - 1) // 24 and loader.rows_per_epoch == -(-(total - 1) // 24)
    assert sum(row[0] != BOS for row in rows) > len(rows) / 2, "rows begin in mid-document"
    begins, ends = (Counter(row[at] for row in rows if row[at] != BOS) for at in (0, -1))
    assert (begins - ends).total() <= 1 >= (ends - begins).total(), "a row begins with the end of another one"
    for before, token in (pair for row in rows for pair in pairwise(row)):
        assert token in (BOS, before + 1) or before == BOS and token % 1000 == 1, "whole documents, end to end"
    report = loader.report()
    assert (report["documents"], report["cropped_share"], report["added_bos_share"]) == (len(LONG_AND_SHORT), 0, 0)
    with pytest.raises(ValueError, match="learns every token: pack a corpus with masks by first-fit-decreasing"):
        Loader(corpus_of([3], [[False, True, True]]), 8, 1, packing="stream")


# --- validation windows ---


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 17), st.integers(1, 5), st.integers(1, 9))
def test_windows_count_every_token_once(lengths, context, rows_, multiple):
    if max(lengths) == 1:
        with pytest.raises(ValueError, match="nothing to evaluate"):
            list(windows(corpus_of(lengths), context, rows_, multiple))
        return
    counted: Counter[int] = Counter()
    widths = []
    for batch in windows(corpus_of(lengths), context, rows_, multiple):
        assert len(batch.tokens) == rows_ and batch.mask.any()
        widths.append(batch.tokens.shape[1])
        assert widths[-1] <= context and (widths[-1] % multiple == 0 or widths[-1] == context)
        assert (batch.tokens[:, 0] == BOS).all()
        for tokens, targets, mask in zip(batch.tokens, batch.targets, batch.mask, strict=True):
            n = int(mask.sum())
            assert mask[:n].all() and tokens[1:n].tolist() == targets[: max(0, n - 1)].tolist()
            assert (np.diff(targets[:n]) == 1).all(), "consecutive tokens of one document"
            assert n == 0 or (targets[0] % 1000 - 1) % context == 0, "cut at multiples of the context"
            counted.update(targets[:n].tolist())
    assert widths == sorted(widths, reverse=True)
    assert counted == Counter(t for i, n in enumerate(lengths) for t in document(i, n)[1:])


def test_windows_honour_masks():
    masks = [[False, True, False, True, True], [False, False, True]]
    learnt = [int(t) for b in windows(corpus_of([5, 3], masks), 2, 2) for t in b.targets[b.mask]]
    assert sorted(learnt) == [1001, 1003, 1004, 2002]


# --- prefetch ---


def prefetching() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("prefetch")]


def test_prefetch_equals_the_plain_loop():
    loader = Loader(corpus_of(random_lengths(50, 30)), 16, 4)
    for rank in range(2):
        ahead = list(prefetch(loader, 3, 12, rank, 2))
        plain = [loader.batch(step, rank, 2) for step in range(3, 12)]
        assert [b.tokens.tolist() for b in ahead] == [b.tokens.tolist() for b in plain]
    assert not prefetching()


@pytest.mark.timeout(30)
def test_a_consumer_that_leaves_early_stops_the_thread():
    batches = prefetch(Loader(corpus_of([9, 9]), 8, 2), 0, None)
    next(batches)
    assert prefetching()
    batches.close()
    assert not prefetching()
