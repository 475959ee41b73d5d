"""Flash attention in Triton: device code only. `flash_launch.py` imports it, and Triton with it.

fp32 accumulation; exponentials to base 2, with log2(e) in the scale.

Forward, an online softmax over tiles of keys: one program computes BLOCK_M queries of one head. It walks over the keys
that they can see in tiles of BLOCK_N, in up to three runs: tiles that the start of a document or window cuts through
(masked), tiles that every query sees (no mask is computed), tiles on the diagonal (masked). Tiles that no query sees
are never visited. What a query sees is an interval of positions, since documents follow each other: `low … itself`.

Backward, D, then dQ, then dK with dV: probabilities are recomputed from the scores and the saved log-sum-exp. One
program sums each output tile, in a fixed order and without atomics, so that two runs give the same bits: dQ by a
program that walks over the keys of its queries, dK and dV by a program that walks over the queries of its keys, head by
head of the group that shares them. This costs seven matrix products, where one kernel with atomics would need five.

Sources: Dao 2023, FlashAttention-2 (arXiv 2307.08691), its algorithm 2 split in two; the online softmax is Milakov &
Gimelshein 2018 (arXiv 1805.02867). Ours differs in that documents and windows are intervals: no mask is stored, no
document id is read in a loop.
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
    """The bounds of the runs over the keys of queries start … start + BLOCK_M: three multiples of BLOCK_N and the end.

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


# Backward ---------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["T"])
def statistics_kernel(
    y, grad, lse, lse_log2, sums, y_strides, grad_strides, H, T, padded, E: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Statistics of each query for both kernels below, (B, H, padded) fp32 and zero from T on: D = rowsum(dO ∘ O) →
    sums, and the log-sum-exp to base 2 → lse_log2. Grid: tiles of queries × B · H; BLOCK_M divides padded."""
    blocks = padded // BLOCK_M
    pair = tl.program_id(0) // blocks
    batch, head = pair // H, pair % H
    start = tl.program_id(0) % blocks * BLOCK_M
    y_tile = load_tile(y, y_strides, batch, start, head, T, E, BLOCK_M, False, True).to(tl.float32)
    grad_tile = load_tile(grad, grad_strides, batch, start, head, T, E, BLOCK_M, False, True).to(tl.float32)
    rows = start + tl.arange(0, BLOCK_M)
    LOG2_E: tl.constexpr = 1.4426950408889634
    natural = tl.load(lse + tl.cast(pair, tl.int64) * T + rows, mask=rows < T, other=0.0)
    places = tl.cast(pair, tl.int64) * padded + rows
    tl.store(lse_log2 + places, natural * LOG2_E)
    tl.store(sums + places, tl.sum(y_tile * grad_tile, 1))


@triton.jit
def load_statistics(x, pair, start, padded, ROWS: tl.constexpr, TMA: tl.constexpr):
    """Entries start … of one head of a (B, H, padded) tensor → (ROWS,).

    With TMA x is a descriptor of the flat tensor: in a pipelined loop that reads through pointers, each thread would
    copy each of its entries separately.
    """
    if TMA:
        loaded = x.load([tl.cast(pair * padded + start, tl.int32)])
    else:
        loaded = tl.load(x + tl.cast(pair, tl.int64) * padded + start + tl.arange(0, ROWS))
    return loaded


@triton.jit
def query_gradient_run(
    acc, q, grad, k, v, lse_rows, row_sums, k_strides, v_strides, batch, kv_head, rows, low, begin, end, T, scale_log2,
    E: tl.constexpr, MASKED: tl.constexpr, BOUNDED: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """acc + dS · K over one run of keys; dS = P ∘ (dO · Vᵀ - D), not yet scaled."""
    for start in range(begin, end, BLOCK_N):
        k_tile = load_tile(k, k_strides, batch, start, kv_head, T, E, BLOCK_N, TMA, MASKED)
        v_tile = load_tile(v, v_strides, batch, start, kv_head, T, E, BLOCK_N, TMA, MASKED)
        scores = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION)
        p = tl.exp2(scores * scale_log2 - lse_rows[:, None])
        if MASKED:
            keys = start + tl.arange(0, BLOCK_N)
            seen = keys[None, :] <= rows[:, None]
            if BOUNDED:
                seen = seen & (keys[None, :] >= low[:, None])
            p = tl.where(seen, p, 0.0)
        dp = tl.dot(grad, tl.trans(v_tile), input_precision=PRECISION)
        ds = p * (dp - row_sums[:, None])
        acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["T", "window", "length_class"])
def query_gradient_kernel(
    q, k, v, grad, dq, lse_log2, sums, first, q_strides, k_strides, v_strides, grad_strides, dq_strides, H, T, padded,
    window, length_class, scale, scale_log2,
    GROUPS: tl.constexpr, E: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """dQ of BLOCK_M queries of one head; grid and arguments as the forward kernel's."""
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
    grad_tile = load_tile(grad, grad_strides, batch, start, head, T, E, BLOCK_M, TMA, True)
    lse_rows = load_statistics(lse_log2, pair, start, padded, BLOCK_M, False)
    row_sums = load_statistics(sums, pair, start, padded, BLOCK_M, False)
    acc = tl.zeros([BLOCK_M, E], dtype=tl.float32)
    for run in tl.static_range(3):
        if BOUNDED or run > 0:
            acc = query_gradient_run(
                acc, q_tile, grad_tile, k, v, lse_rows, row_sums, k_strides, v_strides, batch, kv_head, rows, low,
                edges[run], edges[run + 1], T, scale_log2, E, run != 1, BOUNDED, BLOCK_N, TMA, PRECISION,
            )  # fmt: skip
    store_tile(dq, acc * scale, dq_strides, batch, start, head, T, E, BLOCK_M)


@triton.jit
def key_gradients_run(
    dk, dv, k, v, q, grad, lse_log2, sums, q_strides, grad_strides, batch, head, pair, keys, high, begin, end, T,
    padded, scale_log2, E: tl.constexpr, MASKED: tl.constexpr, BLOCK_M: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dk + dSᵀ · Q (not yet scaled) and dv + Pᵀ · dO over one run of queries.

    Scores are computed transposed, (keys, queries), so that Pᵀ and dSᵀ enter their products from registers.
    """
    for start in range(begin, end, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        q_tile = load_tile(q, q_strides, batch, start, head, T, E, BLOCK_M, TMA, MASKED)
        grad_tile = load_tile(grad, grad_strides, batch, start, head, T, E, BLOCK_M, TMA, MASKED)
        lse_rows = load_statistics(lse_log2, pair, start, padded, BLOCK_M, TMA)
        row_sums = load_statistics(sums, pair, start, padded, BLOCK_M, TMA)
        scores = tl.dot(k, tl.trans(q_tile), input_precision=PRECISION)
        p = tl.exp2(scores * scale_log2 - lse_rows[None, :])
        if MASKED:
            seen = (rows[None, :] >= keys[:, None]) & (rows[None, :] <= high[:, None])
            p = tl.where(seen, p, 0.0)
        dv = tl.dot(p.to(grad_tile.dtype), grad_tile, dv, input_precision=PRECISION)
        dp = tl.dot(v, tl.trans(grad_tile), input_precision=PRECISION)
        ds = p * (dp - row_sums[None, :])
        dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["T", "window", "length_class"])
def key_gradients_kernel(
    q, k, v, grad, dk, dv, lse_log2, sums, last, q_strides, k_strides, v_strides, grad_strides, dk_strides, dv_strides,
    K, T, padded, window, length_class, scale, scale_log2,
    GROUPS: tl.constexpr, E: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """dK and dV of BLOCK_N keys of one kv-head, summed over its group's heads. Grid: tiles of keys × B · K.

    The first keys, which the most queries see, come first. last: (B, T), the end of each token's document, or None.
    """
    blocks = tl.cdiv(T, BLOCK_N)
    kv_pair = tl.program_id(0) // blocks
    batch, kv_head = kv_pair // K, kv_pair % K
    start = tl.program_id(0) % blocks * BLOCK_N
    keys = start + tl.arange(0, BLOCK_N)
    high = keys * 0 + (T - 1)  # the last query that sees each key
    if BOUNDED:
        clamped = tl.minimum(keys, T - 1)
        high = tl.minimum(clamped + window - 1, T - 1)
        if last is not None:
            high = tl.minimum(high, tl.load(last + tl.cast(batch, tl.int64) * T + clamped))

    # Queries in four multiples of BLOCK_M: masked to the second (the diagonal), unmasked to the third, masked to the
    # fourth (the end of a document, a window or the sequence).
    begin = start // BLOCK_M * BLOCK_M
    end = tl.cdiv(tl.max(high, 0) + 1, BLOCK_M) * BLOCK_M
    whole = tl.minimum(tl.cdiv(start + BLOCK_N - 1, BLOCK_M) * BLOCK_M, end)
    tail = tl.maximum((tl.min(high, 0) + 1) // BLOCK_M * BLOCK_M, whole)

    edges = (begin, whole, tail, end)

    k_tile = load_tile(k, k_strides, batch, start, kv_head, T, E, BLOCK_N, TMA, True)
    v_tile = load_tile(v, v_strides, batch, start, kv_head, T, E, BLOCK_N, TMA, True)
    dk_tile = tl.zeros([BLOCK_N, E], dtype=tl.float32)
    dv_tile = tl.zeros([BLOCK_N, E], dtype=tl.float32)
    for member in range(GROUPS):
        head = kv_head * GROUPS + member
        pair = kv_pair * GROUPS + member
        for run in tl.static_range(3):
            dk_tile, dv_tile = key_gradients_run(
                dk_tile, dv_tile, k_tile, v_tile, q, grad, lse_log2, sums, q_strides, grad_strides, batch, head, pair,
                keys, high, edges[run], edges[run + 1], T, padded, scale_log2, E, run != 1, BLOCK_M, TMA, PRECISION,
            )  # fmt: skip
    store_tile(dk, dk_tile * scale, dk_strides, batch, start, kv_head, T, E, BLOCK_N)
    store_tile(dv, dv_tile, dv_strides, batch, start, kv_head, T, E, BLOCK_N)
