"""Triton programs of recurrences. ``triton_recurrence`` launches them.

``steps`` defines the arrays of a plan: three numbers for each row or chunk, and for each
entry. ``sources`` and ``targets`` are the memory places of given and wanted states. A float32
product is made of three TF32 products, which err by about 2^-21 of each.

Letters: C rows of a chunk, B of them in a block; K, V sizes of keys and values, padded to powers of
two; W columns of values of a program; N rows of a convolution's program.
"""

from __future__ import annotations

import triton
import triton.language as tl

EXACT = tl.constexpr("tf32x3")
BLOCK = tl.constexpr(16)
"""B"""


@triton.jit
def walk_rows(
    out, after, kept, before, sources, targets, q, k, v, log_decay, beta, rows, entries, scale,
    before_g, before_h, before_k, q_t, q_h, k_t, k_h, v_t, v_h, decay_t, decay_h, beta_t, beta_h,
    HEADS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    K: tl.constexpr, W: tl.constexpr, DECAYS: tl.constexpr, DELTA: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Run the rows of an entry one by one for W columns of one head. In each row the state decays,
    the key's value is added (with ``DELTA`` its new part), and ``QUERIES`` queries read the state.
    ``DECAYS``: log decays of a head, 0, 1 or ``KEYS``. Unless ``LISTED``, entry n is the single row
    n, from state n to state n."""
    n, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    w, c = tl.program_id(2) * W + tl.arange(0, W), tl.arange(0, K)
    is_key, is_value = c < KEYS, w < VALUES
    held_KW = is_key[:, None] & is_value[None, :]
    place_KW = h * before_h + (c * before_k)[:, None] + w[None, :]
    own_KW = (h * KEYS + c)[:, None] * VALUES + w[None, :]
    size = HEADS * KEYS * VALUES
    begin, count = n, 1
    if LISTED:
        begin = tl.load(entries + 3 * n).to(tl.int64)
        count = tl.load(entries + 3 * n + 1)
    state_KW = tl.zeros((K, W), tl.float32)
    for number in range(count):
        row = begin + number
        source, target, keep = row, row, row
        if LISTED:
            source = tl.load(rows + row * 3).to(tl.int64)
            target, keep = tl.load(rows + row * 3 + 1).to(tl.int64), tl.load(rows + row * 3 + 2).to(tl.int64)
        if source >= 0:
            from_KW = before + tl.load(sources + source) * before_g + place_KW
            state_KW = tl.load(from_KW, mask=held_KW, other=0.0).to(tl.float32)
        if LISTED:  # noqa: SIM102
            if source < -1:
                # Other threads of the program may have written the state that this thread reads.
                tl.debug_barrier()
                state_KW = tl.load(kept - (source + 2) * size + own_KW, mask=held_KW, other=0.0)
        if DECAYS == 1:
            state_KW = state_KW * tl.exp(tl.load(log_decay + row * decay_t + h * decay_h).to(tl.float32))
        if DECAYS > 1:
            g_K = tl.load(log_decay + row * decay_t + h * decay_h + c, mask=is_key, other=0.0).to(tl.float32)
            state_KW = state_KW * tl.exp(g_K)[:, None]
        k_K = tl.load(k + row * k_t + h * k_h + c, mask=is_key, other=0.0).to(tl.float32)
        u_W = tl.load(v + row * v_t + h * v_h + w, mask=is_value, other=0.0).to(tl.float32)
        if DELTA:
            u_W = (u_W - tl.sum(k_K[:, None] * state_KW, 0)) * tl.load(beta + row * beta_t + h * beta_h).to(tl.float32)
        state_KW = state_KW + k_K[:, None] * u_W[None, :]
        for r in tl.static_range(QUERIES):
            head = h * QUERIES + r
            q_K = tl.load(q + row * q_t + head * q_h + c, mask=is_key, other=0.0).to(tl.float32)
            found_W = tl.sum(q_K[:, None] * state_KW, 0) * scale
            tl.store(out + (row * HEADS * QUERIES + head) * VALUES + w, found_W, mask=is_value)
        if target >= 0:
            tl.store(after + tl.load(targets + target) * size + own_KW, state_KW, mask=held_KW)
        if LISTED:  # noqa: SIM102
            if keep >= 0:
                tl.store(kept + keep * size + own_KW, state_KW, mask=held_KW)


@triton.jit
def weighed_by_column(x_CK, k_CK, g_CK, score_CC, C: tl.constexpr, K: tl.constexpr, LEVELS: tl.constexpr):
    """Add to the scores each row of x times the same and earlier rows of k, with decay by column.
    No weight is a quotient, so none overflows: a block of 2 m rows is halved, and a right row's
    reading of a left row decays from the left row to the middle, and from there to the right row.
    """
    i = tl.arange(0, C)
    score_CC += tl.where(i[:, None] == i[None, :], tl.sum(x_CK * k_CK, 1)[:, None], 0.0)
    until_CK, since_CK = tl.zeros((C, K), tl.float32), g_CK  # within the block of a row
    for level in tl.static_range(LEVELS):
        right = (i >> level) % 2 == 1
        left_CK = tl.where(right[:, None], 0.0, k_CK * tl.exp(until_CK))
        right_CK = tl.where(right[:, None], x_CK * tl.exp(since_CK), 0.0)
        block = i >> (level + 1)
        square_CC = tl.dot(right_CK, tl.trans(left_CK), input_precision=EXACT)
        score_CC += tl.where(block[:, None] == block[None, :], square_CC, 0.0)
        left_BK = block_sums(tl.where(right[:, None], 0.0, g_CK), C, K, 2 << level)
        right_BK = block_sums(tl.where(right[:, None], g_CK, 0.0), C, K, 2 << level)
        since_CK += tl.where(right[:, None], left_BK, 0.0)
        until_CK += tl.where(right[:, None], 0.0, right_BK)
    return score_CC


@triton.jit
def block_sums(x_CK, C: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr):
    """Return, for each row, the sum over its block of rows."""
    sums_NK = tl.sum(tl.reshape(x_CK, (C // ROWS, ROWS, K)), 1)
    return tl.reshape(tl.broadcast_to(sums_NK[:, None, :], (C // ROWS, ROWS, K)), (C, K))


@triton.jit
def decays_within(log_decay, decay_t, row_C, live_C, C: tl.constexpr):
    """Return ``[i, j]``: the product of a head's decays from row j + 1 to row i; 0 above the
    diagonal. A difference of longer sums would be inexact, or NaN."""
    i = tl.arange(0, C)
    g_C = tl.load(log_decay + row_C * decay_t, mask=live_C, other=0.0).to(tl.float32)
    left_CC = tl.exp(tl.cumsum(tl.where(i[:, None] > i[None, :], g_C[:, None], 0.0), 0))
    return tl.where(i[:, None] >= i[None, :], left_CC, 0.0)


@triton.jit
def chunk_scores(
    x, x_t, k, k_t, log_decay, decay_t, row_C, live_C,
    KEYS: tl.constexpr, K: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, DECAYS: tl.constexpr,
):  # fmt: skip
    """Return the products of each row of x with each row of k, weakened by the decays between them;
    0 for later rows. x and k are float32."""
    i = tl.arange(0, C)
    score_CC = tl.zeros((C, C), tl.float32)
    for start in range(0, KEYS, K):
        c = start + tl.arange(0, K)
        held_CK = live_C[:, None] & (c < KEYS)[None, :]
        x_CK = tl.load(x + row_C[:, None] * x_t + c[None, :], mask=held_CK, other=0.0)
        k_CK = tl.load(k + row_C[:, None] * k_t + c[None, :], mask=held_CK, other=0.0)
        if DECAYS > 1:
            g_CK = tl.load(log_decay + row_C[:, None] * decay_t + c[None, :], mask=held_CK, other=0.0).to(tl.float32)
            score_CC = weighed_by_column(x_CK, k_CK, g_CK, score_CC, C, K, LEVELS)
        else:
            score_CC = tl.dot(x_CK, tl.trans(k_CK), score_CC, input_precision=EXACT)
    if DECAYS == 0:
        score_CC = tl.where(i[:, None] >= i[None, :], score_CC, 0.0)
    if DECAYS == 1:
        score_CC = score_CC * decays_within(log_decay, decay_t, row_C, live_C, C)
    return score_CC


@triton.jit
def inverse_of(lower_CC, C: tl.constexpr, LEVELS: tl.constexpr):
    """Return ``(I + lower)^-1`` of a strictly lower triangular matrix. Blocks of B rows by
    substitution, then pairs of blocks: ``[[a, 0], [s, b]]`` has the inverse ``[[a', 0], [-b' s a',
    b']]``. Powers of ``lower`` could be far larger than its inverse."""
    i, b, n = tl.arange(0, C), tl.arange(0, BLOCK), tl.arange(0, C // BLOCK)
    same = (n[:, None] == n[None, :])[:, None, :, None]
    blocks = tl.sum(tl.where(same, tl.reshape(lower_CC, (C // BLOCK, BLOCK, C // BLOCK, BLOCK)), 0.0), 2)
    inverse = tl.broadcast_to((b[:, None] == b[None, :])[None, :, :], (C // BLOCK, BLOCK, BLOCK)).to(tl.float32)
    for row in range(1, BLOCK):
        is_row = (b == row)[None, :, None]
        factors_NB = tl.sum(tl.where(is_row, blocks, 0.0), 1)
        known_NB = tl.sum(factors_NB[:, :, None] * inverse, 1)
        inverse -= tl.where(is_row, known_NB[:, None, :], 0.0)
    inverse_CC = tl.reshape(tl.where(same, inverse[:, :, None, :], 0.0), (C, C))
    for level in range(4, LEVELS):
        side, block = (i >> level) % 2, i >> (level + 1)
        is_square = (side[:, None] > side[None, :]) & (block[:, None] == block[None, :])
        square_CC = tl.where(is_square, lower_CC, 0.0)
        read_CC = tl.dot(square_CC, inverse_CC, input_precision=EXACT)
        inverse_CC = tl.dot(-inverse_CC, read_CC, inverse_CC, input_precision=EXACT)
    return inverse_CC


@triton.jit
def weigh_chunks(
    inverses, since, until, k, log_decay, beta, chunks, k_t, k_h, decay_t, decay_h, beta_t, beta_h,
    HEADS: tl.constexpr, KEYS: tl.constexpr, K: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
    DECAYS: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """Prepare a chunk of one head: the share of the earlier state left at each row (``since``), the
    share of each row left at the end (``until``), and the matrix from the new parts of the values
    to the delta rule's u (``inverses``). K columns of keys at a time."""
    chunk, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    first, count = tl.load(chunks + chunk * 3).to(tl.int64), tl.load(chunks + chunk * 3 + 1)
    i = tl.arange(0, C)
    live_C, row_C = i < count, first + i
    own_decay, own_k = log_decay + h * decay_h, k + h * k_h
    if DECAYS == 1:
        to_C = row_C * HEADS + h
        g_C = tl.load(own_decay + row_C * decay_t, mask=live_C, other=0.0).to(tl.float32)
        tl.store(since + to_C, tl.exp(tl.cumsum(g_C, 0)), mask=live_C)
        next_C = tl.load(own_decay + (row_C + 1) * decay_t, mask=i + 1 < count, other=0.0).to(tl.float32)
        tl.store(until + to_C, tl.exp(tl.cumsum(next_C, 0, reverse=True)), mask=live_C)
    if DECAYS > 1:
        for start in range(0, KEYS, K):
            c = start + tl.arange(0, K)
            held_CK = live_C[:, None] & (c < KEYS)[None, :]
            from_CK = own_decay + row_C[:, None] * decay_t + c[None, :]
            to_CK = (row_C[:, None] * HEADS + h) * KEYS + c[None, :]
            g_CK = tl.load(from_CK, mask=held_CK, other=0.0).to(tl.float32)
            tl.store(since + to_CK, tl.exp(tl.cumsum(g_CK, 0)), mask=held_CK)
            next_CK = tl.load(from_CK + decay_t, mask=held_CK & (i + 1 < count)[:, None], other=0.0).to(tl.float32)
            tl.store(until + to_CK, tl.exp(tl.cumsum(next_CK, 0, reverse=True)), mask=held_CK)
    if DELTA:
        score_CC = chunk_scores(own_k, k_t, own_k, k_t, own_decay, decay_t, row_C, live_C, KEYS, K, C, LEVELS, DECAYS)
        beta_C = tl.load(beta + row_C * beta_t + h * beta_h, mask=live_C, other=0.0).to(tl.float32)
        inverse_CC = inverse_of(tl.where(i[:, None] > i[None, :], score_CC * beta_C[:, None], 0.0), C, LEVELS)
        to_CC = inverses + (chunk * HEADS + h) * C * C + i[:, None] * C + i[None, :]
        tl.store(to_CC, inverse_CC * beta_C[None, :])


@triton.jit
def pass_chunks(
    after, held, changes, before, sources, targets, k, v, inverses, since, until, chunks, entries,
    before_g, before_h, before_k, k_t, k_h, v_t, v_h,
    HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, K: tl.constexpr, W: tl.constexpr,
    C: tl.constexpr, BLOCKS: tl.constexpr, DECAYS: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """Pass W columns of the state of one head through the chunks of an entry. Writes the state
    before each chunk (``held``), the wanted states after chunks, and the delta rule's u
    (``changes``). The state is in ``BLOCKS`` blocks of K rows, so that registers suffice."""
    n, h = tl.program_id(0), tl.program_id(1).to(tl.int64)
    w, c, i = tl.program_id(2) * W + tl.arange(0, W), tl.arange(0, K), tl.arange(0, C)
    is_value = w < VALUES
    given = tl.load(sources + tl.load(entries + 3 * n + 2))
    states = ()
    for block in tl.static_range(BLOCKS):
        key = block * K + c
        held_KW = (key < KEYS)[:, None] & is_value[None, :]
        from_KW = before + given * before_g + h * before_h + (key * before_k)[:, None] + w[None, :]
        states = states + (tl.load(from_KW, mask=held_KW, other=0.0).to(tl.float32),)  # noqa: RUF005
    begin = tl.load(entries + 3 * n).to(tl.int64)
    for number in range(tl.load(entries + 3 * n + 1)):
        chunk = begin + number
        first, count = tl.load(chunks + chunk * 3).to(tl.int64), tl.load(chunks + chunk * 3 + 1)
        target = tl.load(chunks + chunk * 3 + 2)
        row_C, live_C, last = first + i, i < count, first + count - 1
        held_CW = live_C[:, None] & is_value[None, :]
        u_CW = tl.load(v + row_C[:, None] * v_t + h * v_h + w[None, :], mask=held_CW, other=0.0)
        if DELTA:
            read_CW = tl.zeros((C, W), tl.float32)
            for block in tl.static_range(BLOCKS):
                key = block * K + c
                held_CK = live_C[:, None] & (key < KEYS)[None, :]
                from_CK = k + row_C[:, None] * k_t + h * k_h + key[None, :]
                k_CK = tl.load(from_CK, mask=held_CK, other=0.0)
                if DECAYS > 1:
                    place_CK = (row_C[:, None] * HEADS + h) * KEYS + key[None, :]
                    k_CK = k_CK * tl.load(since + place_CK, mask=held_CK, other=0.0)
                read_CW = tl.dot(k_CK, states[block], read_CW, input_precision=EXACT)
            if DECAYS == 1:
                read_CW = read_CW * tl.load(since + row_C * HEADS + h, mask=live_C, other=0.0)[:, None]
            inverse_CC = tl.load(inverses + (chunk * HEADS + h) * C * C + i[:, None] * C + i[None, :])
            u_CW = tl.dot(inverse_CC, u_CW - read_CW, input_precision=EXACT)
            tl.store(changes + (row_C[:, None] * HEADS + h) * VALUES + w[None, :], u_CW, mask=held_CW)
        if DECAYS == 1:
            u_CW = u_CW * tl.load(until + row_C * HEADS + h, mask=live_C, other=0.0)[:, None]
        written = ()
        for block in tl.static_range(BLOCKS):
            key, state_KW = block * K + c, states[block]
            held_CK, held_KW = live_C[:, None] & (key < KEYS)[None, :], (key < KEYS)[:, None] & is_value[None, :]
            own_KW = (h * KEYS + key)[:, None] * VALUES + w[None, :]
            tl.store(held + chunk * HEADS * KEYS * VALUES + own_KW, state_KW, mask=held_KW)
            k_CK = tl.load(k + row_C[:, None] * k_t + h * k_h + key[None, :], mask=held_CK, other=0.0)
            if DECAYS == 1:
                state_KW = state_KW * tl.load(since + last * HEADS + h)
            if DECAYS > 1:
                place_CK = (row_C[:, None] * HEADS + h) * KEYS + key[None, :]
                k_CK = k_CK * tl.load(until + place_CK, mask=held_CK, other=0.0)
                left_K = tl.load(since + (last * HEADS + h) * KEYS + key, mask=key < KEYS, other=0.0)
                state_KW = state_KW * left_K[:, None]
            state_KW = tl.dot(tl.trans(k_CK), u_CW, state_KW, input_precision=EXACT)
            if target >= 0:
                place = tl.load(targets + target)
                tl.store(after + place * HEADS * KEYS * VALUES + own_KW, state_KW, mask=held_KW)
            written = written + (state_KW,)  # noqa: RUF005
        states = written


@triton.jit
def read_chunks(
    out, held, q, k, u, log_decay, since, chunks, scale, q_t, q_h, k_t, k_h, u_t, u_h, decay_t, decay_h,
    HEADS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    K: tl.constexpr, W: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, DECAYS: tl.constexpr,
):  # fmt: skip
    """Compute W columns of the output of one query head in a chunk: its reading of the state
    before, and of the rows' writes. K columns of keys at a time."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    first, count = tl.load(chunks + chunk * 3).to(tl.int64), tl.load(chunks + chunk * 3 + 1)
    w, i = tl.program_id(2) * W + tl.arange(0, W), tl.arange(0, C)
    h = head // QUERIES
    row_C, live_C, is_value = first + i, i < count, w < VALUES
    held_CW = live_C[:, None] & is_value[None, :]
    own_q, own_k, own_decay = q + head * q_h, k + h * k_h, log_decay + h * decay_h
    found_CW = tl.zeros((C, W), tl.float32)
    for start in range(0, KEYS, K):
        c = start + tl.arange(0, K)
        held_CK, held_KW = live_C[:, None] & (c < KEYS)[None, :], (c < KEYS)[:, None] & is_value[None, :]
        q_CK = tl.load(own_q + row_C[:, None] * q_t + c[None, :], mask=held_CK, other=0.0)
        if DECAYS > 1:
            place_CK = (row_C[:, None] * HEADS + h) * KEYS + c[None, :]
            q_CK = q_CK * tl.load(since + place_CK, mask=held_CK, other=0.0)
        from_KW = held + ((chunk * HEADS + h) * KEYS + c)[:, None] * VALUES + w[None, :]
        state_KW = tl.load(from_KW, mask=held_KW, other=0.0)
        found_CW = tl.dot(q_CK, state_KW, found_CW, input_precision=EXACT)
    if DECAYS == 1:
        found_CW = found_CW * tl.load(since + row_C * HEADS + h, mask=live_C, other=0.0)[:, None]
    score_CC = chunk_scores(own_q, q_t, own_k, k_t, own_decay, decay_t, row_C, live_C, KEYS, K, C, LEVELS, DECAYS)
    u_CW = tl.load(u + row_C[:, None] * u_t + h * u_h + w[None, :], mask=held_CW, other=0.0)
    found_CW = tl.dot(score_CC, u_CW, found_CW, input_precision=EXACT) * scale
    tl.store(out + (row_C[:, None] * HEADS * QUERIES + head) * VALUES + w[None, :], found_CW, mask=held_CW)


@triton.jit
def convolve_rows(
    out, after, before, sources, targets, x, weight, bias, places, wanted, rows, given, x_t, before_g, before_w,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, BIAS: tl.constexpr, LISTED: tl.constexpr,
    N: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Convolve N rows in W channels, and write the states after ``wanted`` rows. ``places [TAPS,
    rows]`` addresses the inputs: first the rows of the given states, then those of x. Unless
    ``LISTED``, row n is a single row from state n to state n."""
    n = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    c = tl.program_id(1) * W + tl.arange(0, W)
    is_row, held_W = n < rows, (c < CHANNELS)[None, :]
    held = given * (TAPS - 1)
    target_N = n
    if LISTED:
        target_N = tl.load(wanted + n, mask=is_row, other=-1).to(tl.int64)
    is_wanted = is_row & (target_N >= 0)
    target_N = tl.load(targets + target_N, mask=is_wanted, other=0)
    sum_NW = tl.zeros((N, W), tl.float32)
    for tap in tl.static_range(TAPS):
        if LISTED:
            place_N = tl.load(places + tap * rows + n, mask=is_row, other=0).to(tl.int64)
        elif tap < TAPS - 1:
            place_N = n * (TAPS - 1) + tap
        else:
            place_N = held + n
        from_x = x + (place_N - held)[:, None] * x_t + c[None, :]
        input_NW = tl.load(from_x, mask=(is_row & (place_N >= held))[:, None] & held_W, other=0.0).to(tl.float32)
        if tap < TAPS - 1:
            is_old = is_row & (place_N < held)
            source_N = tl.load(sources + place_N // (TAPS - 1), mask=is_old, other=0)
            place = source_N * before_g + place_N % (TAPS - 1) * before_w
            from_NW = before + place[:, None] + c[None, :]
            old_NW = tl.load(from_NW, mask=is_old[:, None] & held_W, other=0.0).to(tl.float32)
            input_NW = tl.where((place_N >= held)[:, None], input_NW, old_NW)
        weight_W = tl.load(weight + c * TAPS + tap, mask=c < CHANNELS, other=0.0).to(tl.float32)
        sum_NW += input_NW * weight_W[None, :]
        if tap > 0:
            to = after + (target_N * (TAPS - 1) + tap - 1)[:, None] * CHANNELS + c[None, :]
            tl.store(to, input_NW, mask=is_wanted[:, None] & held_W)
    if BIAS:
        sum_NW += tl.load(bias + c, mask=c < CHANNELS, other=0.0).to(tl.float32)[None, :]
    tl.store(out + n[:, None] * CHANNELS + c[None, :], sum_NW, mask=is_row[:, None] & held_W)
