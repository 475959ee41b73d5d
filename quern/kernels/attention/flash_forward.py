"""Flash attention in Triton, forward: online softmax over tiles of keys. The backward kernels share some functions.

One program computes BLOCK_M queries of one head. It walks over the keys that they can see in tiles of BLOCK_N, in up
to three runs: tiles that the start of a document or window cuts through (masked), tiles that every query sees (no mask
is computed), tiles on the diagonal (masked). Tiles that no query sees are never visited. What a query sees is an
interval of positions, since documents follow each other: `low … itself`.

fp32 accumulation; exponentials to base 2, with log2(e) in the scale. This file holds device code only and imports
Triton; nothing imports it before a kernel is launched (`flash_launch.py`).

Sources: Dao 2023, FlashAttention-2 (arXiv 2307.08691); the online softmax is Milakov & Gimelshein 2018
(arXiv 1805.02867). Ours differs in that documents and windows are intervals: no mask is stored, no document id is read
in a loop.
"""

import triton
import triton.language as tl


@triton.jit
def load_tile(
    x, strides, batch, start, head, T, E: tl.constexpr, ROWS: tl.constexpr, TMA: tl.constexpr, CHECK: tl.constexpr
):
    """Tokens start … start + ROWS of one head → (ROWS, E); those from T on are zero if CHECK (or TMA).

    x: a pointer, or with TMA a descriptor of (B, T, all heads' columns); strides: of batch, token and head.
    """
    if TMA:
        column = tl.cast(head * strides[2], tl.int32)
        tile = x.load([tl.cast(batch, tl.int32), tl.cast(start, tl.int32), column]).reshape(ROWS, E)
    else:
        tokens = tl.arange(0, ROWS)
        base = x + tl.cast(batch, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[2]
        places = base + tl.cast(start, tl.int64) * strides[1] + tokens[:, None] * strides[1] + tl.arange(0, E)[None, :]
        tile = tl.load(places, mask=(start + tokens < T)[:, None], other=0.0) if CHECK else tl.load(places)
    return tile


@triton.jit
def store_tile(x, tile, strides, batch, start, head, T, E: tl.constexpr, ROWS: tl.constexpr):
    """Writes (ROWS, E) to tokens start … of one head, up to T."""
    tokens = tl.arange(0, ROWS)
    base = x + tl.cast(batch, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[2]
    places = base + tl.cast(start, tl.int64) * strides[1] + tokens[:, None] * strides[1] + tl.arange(0, E)[None, :]
    tl.store(places, tile.to(x.dtype.element_ty), mask=(start + tokens < T)[:, None])


@triton.jit
def lowest_keys(rows, first, batch, T, window):
    """The first key that each query sees. first: (B, T), the start of each token's document, or None.

    Queries from T on, which a last tile has, count as the last one: what they compute is not stored.
    """
    rows = tl.minimum(rows, T - 1)
    low = tl.maximum(rows - window + 1, 0)
    if first is not None:
        low = tl.maximum(low, tl.load(first + tl.cast(batch, tl.int64) * T + rows))
    return low


@triton.jit
def key_runs(low, start, T, BOUNDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The bounds of the runs over the keys of queries start … start + BLOCK_M: four multiples of BLOCK_N.

    Masked from the first to the second, unmasked to the third, masked to the fourth.
    """
    diagonal = start // BLOCK_N * BLOCK_N
    end = tl.minimum(start + BLOCK_M, T)
    if BOUNDED:
        begin = tl.min(low, 0) // BLOCK_N * BLOCK_N
        whole = tl.minimum(tl.cdiv(tl.max(low, 0), BLOCK_N) * BLOCK_N, diagonal)
    else:
        begin = 0
        whole = 0
    return begin, whole, diagonal, end


@triton.jit
def attend_run(
    acc, peak, total, q, k, v, k_strides, v_strides, batch, kv_head, rows, low, begin, end, T, scale_log2,
    E: tl.constexpr, MASKED: tl.constexpr, BOUNDED: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The online softmax over one run of keys: updates and returns (acc, peak, total).

    acc: the weighted sum of values; peak: the largest score, to base 2; total: the sum of exponentials below it.
    """
    for start in range(begin, end, BLOCK_N):
        k_tile = load_tile(k, k_strides, batch, start, kv_head, T, E, BLOCK_N, TMA, MASKED)
        scores = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION)
        if MASKED:
            keys = start + tl.arange(0, BLOCK_N)
            seen = keys[None, :] <= rows[:, None]
            if BOUNDED:
                seen = seen & (keys[None, :] >= low[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        raised = tl.maximum(peak, tl.max(scores, 1) * scale_log2)
        shift = raised
        if MASKED and BOUNDED:  # a query that has seen no key yet: its peak is -inf, and -inf - -inf is no number
            shift = tl.where(raised == float("-inf"), 0.0, raised)
        p = tl.exp2(scores * scale_log2 - shift[:, None])
        shrink = tl.exp2(peak - shift)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        v_tile = load_tile(v, v_strides, batch, start, kv_head, T, E, BLOCK_N, TMA, MASKED)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
        peak = raised
    return acc, peak, total


@triton.jit(do_not_specialize=["T", "window", "length_class"])
def forward_kernel(
    q, k, v, y, lse, first, q_strides, k_strides, v_strides, y_strides, H, T, window, length_class, scale_log2,
    GROUPS: tl.constexpr, E: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """y and the log-sum-exp of BLOCK_M queries of one head. Grid: tiles of queries × B · H, the longest rows first.

    lse: (B, H, T) fp32, natural; first: (B, T) or None; window: at most T, read where BOUNDED; length_class is for the
    tuner alone.
    """
    blocks = tl.cdiv(T, BLOCK_M)
    pair = tl.program_id(0) // blocks
    batch, head = pair // H, pair % H
    start = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M
    kv_head = head // GROUPS
    rows = start + tl.arange(0, BLOCK_M)
    low = rows
    if BOUNDED:
        low = lowest_keys(rows, first, batch, T, window)
    edges = key_runs(low, start, T, BOUNDED, BLOCK_M, BLOCK_N)

    q_tile = load_tile(q, q_strides, batch, start, head, T, E, BLOCK_M, TMA, True)
    acc = tl.zeros([BLOCK_M, E], dtype=tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    for run in tl.static_range(3):
        if BOUNDED or run > 0:
            acc, peak, total = attend_run(
                acc, peak, total, q_tile, k, v, k_strides, v_strides, batch, kv_head, rows, low, edges[run],
                edges[run + 1], T, scale_log2, E, run != 1, BOUNDED, BLOCK_N, TMA, PRECISION,
            )  # fmt: skip
    store_tile(y, acc / total[:, None], y_strides, batch, start, head, T, E, BLOCK_M)
    LN_2: tl.constexpr = 0.6931471805599453
    tl.store(lse + tl.cast(pair, tl.int64) * T + rows, (peak + tl.log2(total)) * LN_2, mask=rows < T)
