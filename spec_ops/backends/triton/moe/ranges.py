"""The first kernel of `few.py`, in a variant whose programs each go through a range of tiles, one after the other.

A tile is some columns of one expert, over all of k. Where a program has a single tile, it loads nothing while it looks for its
expert and while it writes its results, and the last wave of programs leaves most of the GPU idle. Here one loop goes over the
blocks of all tiles of a program, so that the next tile's blocks are loaded while a tile ends. There are as many programs as the
GPU holds at once, and their numbers of tiles differ by one at most.
"""

from __future__ import annotations

import triton
import triton.language as tl

from spec_ops.backends.triton.linear.float4_words import WORD_REST, any_not_finite
from spec_ops.backends.triton.moe.activation import load_bias, store_activated
from spec_ops.backends.triton.moe.stored import added, block_scales
from spec_ops.backends.triton.moe.sums import block_of_columns, block_of_rows, gate_up_sums, zero_sums
from spec_ops.backends.triton.runtime.launch import await_predecessors


@triton.jit
def _magnitude(sums):
    """Bits of magnitudes, as integers: those of infinity and NaN are greater than those of any finite number."""
    return sums.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit(do_not_specialize=["tokens"])
def ranged_gate_up_kernel(
    x, weight, scale, scale_expert, scale_row, scale_column, scale_up, ids, weights, bias, squares, eps, h, table, tokens,
    experts, hidden, inner, limit, alpha, beta,
    TOP_K: tl.constexpr, TOP_K_PAD: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, TRANSPOSED: tl.constexpr,
    ACTIVATION: tl.constexpr, PAIRS_PAD: tl.constexpr, EXPERTS_PAD: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, CHUNKED: tl.constexpr, STAGES: tl.constexpr,
    BITS: tl.constexpr, INT4: tl.constexpr, SCALED: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    SUMS: tl.constexpr, SUMS_PAD: tl.constexpr, AGAIN: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_N: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """As `few_gate_up_kernel`, for numbers that are scaled in chunks of k. `BLOCKS`: blocks of k; `BLOCKS_N`: tiles of an
    expert's columns. There are at least as many programs as touched experts, so a program's tiles are of at most two."""
    await_predecessors(PDL)
    tl.static_assert(SCALED and CHUNKED)
    PAIR: tl.constexpr = GATED and not INTERLEAVED
    ROWS: tl.constexpr = 2 * BLOCK_N if GATED and INTERLEAVED else BLOCK_N
    PARTS: tl.constexpr = BLOCK_K // CHUNK
    m = tl.arange(0, BLOCK_M)
    slot = tl.arange(0, TOP_K_PAD)
    at = m[:, None] * TOP_K + slot[None, :]
    there = (m < tokens)[:, None] & (slot < TOP_K)[None, :]
    chosen = tl.load(ids + at, mask=there, other=-1)
    share = tl.load(weights + at, mask=there, other=0.0).to(tl.float32)
    rstd = None
    if squares is not None:
        place = tl.arange(0, SUMS_PAD)
        mask = (m < tokens)[:, None] & (place < SUMS)[None, :]
        sums = tl.load(squares + m[:, None] * SUMS + place[None, :], mask=mask, other=0.0)
    pair = tl.arange(0, PAIRS_PAD)
    expert_of_pair = tl.load(ids + pair, mask=pair < tokens * TOP_K, other=-1)
    known = (expert_of_pair >= 0) & (expert_of_pair < experts)  # of 64 bits: the last 32 of others may be an expert's
    counts = tl.histogram(tl.where(known, expert_of_pair, 0).to(tl.int32), EXPERTS_PAD, mask=known)
    touched = counts > 0
    ranks = tl.cumsum(touched.to(tl.int32), 0) - 1
    count = tl.sum(touched.to(tl.int32), 0)
    number = tl.arange(0, EXPERTS_PAD)
    if tl.program_id(0) == 0:
        tl.store(table, count)
        tl.store(table + 1 + ranks, number, mask=touched)
    begin = tl.program_id(0) * count * BLOCKS_N // tl.num_programs(0)
    end = (tl.program_id(0) + 1) * count * BLOCKS_N // tl.num_programs(0)
    # The first expert of the range and the one after it, in one sum.
    rank_first = begin // BLOCKS_N
    both = tl.where(ranks == rank_first, number, 0) + tl.where(ranks == rank_first + 1, number << 16, 0)
    both = tl.sum(tl.where(touched, both, 0), 0)
    expert_first = both & 0xFFFF
    expert_second = both >> 16
    if squares is not None:
        rstd = tl.rsqrt(tl.sum(sums, 1) / hidden + eps)[None, :]
    scale_up = scale_up // 2 * 2  # as strides in `block_scales`
    acc = zero_sums(ROWS, BLOCK_M, BLOCK_K, CHUNK, CHUNKED)
    other = zero_sums(ROWS, BLOCK_M, BLOCK_K, CHUNK, CHUNKED)
    worst = tl.zeros([ROWS, BLOCK_M], tl.int32)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_N)
    total = inner * (ROWS // BLOCK_N)
    # Scales are loaded a block ahead by hand: Triton pipelines only operands of products. Biases are loaded a tile ahead.
    first = begin % BLOCKS_N
    s = block_scales(
        scale, expert_first, scale_expert, scale_row, scale_column, first * ROWS + row, total, 0, hidden, begin < end,
        PARTS, BLOCK_K, BITS, INT4, SCALE_ROWS, SCALE_COLUMNS, SCALED,
    )  # fmt: skip
    t = s
    if PAIR:
        t = block_scales(
            scale + scale_up, expert_first, scale_expert, scale_row, scale_column, first * ROWS + row, total, 0, hidden,
            begin < end, PARTS, BLOCK_K, BITS, INT4, SCALE_ROWS, SCALE_COLUMNS, SCALED,
        )  # fmt: skip
    gate_bias = None
    up_bias = None
    if bias is not None:
        gate_bias = load_bias(bias, expert_first, first * BLOCK_N + column, inner, GATED, INTERLEAVED, 0)
        if GATED:
            up_bias = load_bias(bias, expert_first, first * BLOCK_N + column, inner, GATED, INTERLEAVED, 1)
    for i in tl.range(0, (end - begin) * BLOCKS, num_stages=STAGES):
        block = i % BLOCKS
        tile = begin + i // BLOCKS
        rank = tile // BLOCKS_N
        block_n = tile % BLOCKS_N
        expert = tl.where(rank == rank_first, expert_first, expert_second)
        rows = block_of_rows(x, 0, block, BLOCK_K, CHUNK, CHUNKED, SCALED, False)
        columns = block_of_columns(
            weight, expert, block_n * ROWS, block, ROWS, BLOCK_K, CHUNK, CHUNKED, TRANSPOSED, BITS, SCALED
        )
        if PAIR:
            ups = block_of_columns(
                weight, expert, inner + block_n * ROWS, block, ROWS, BLOCK_K, CHUNK, CHUNKED, TRANSPOSED, BITS, SCALED
            )
        acc = added(acc, columns, rows, s, BITS, INT4, SCALED, not AGAIN)
        if PAIR:
            other = added(other, ups, rows, t, BITS, INT4, SCALED, not AGAIN)
        ahead = begin + (i + 1) // BLOCKS
        first = ahead % BLOCKS_N
        expert_ahead = tl.where(ahead // BLOCKS_N == rank_first, expert_first, expert_second)
        s = block_scales(
            scale, expert_ahead, scale_expert, scale_row, scale_column, first * ROWS + row, total, (i + 1) % BLOCKS, hidden,
            ahead < end, PARTS, BLOCK_K, BITS, INT4, SCALE_ROWS, SCALE_COLUMNS, SCALED,
        )  # fmt: skip
        if PAIR:
            t = block_scales(
                scale + scale_up, expert_ahead, scale_expert, scale_row, scale_column, first * ROWS + row, total,
                (i + 1) % BLOCKS, hidden, ahead < end, PARTS, BLOCK_K, BITS, INT4, SCALE_ROWS, SCALE_COLUMNS, SCALED,
            )  # fmt: skip
        if block == BLOCKS - 1:
            gates = tl.sum(acc, 0)
            both_ups = tl.sum(other, 0) if PAIR else gates
            if AGAIN:
                gates *= WORD_REST
                both_ups *= WORD_REST
                worst = tl.maximum(worst, tl.maximum(_magnitude(gates), _magnitude(both_ups)))
            store_activated(
                gates, both_ups, gate_bias, up_bias, rstd, chosen == expert, share, rank, block_n * BLOCK_N + column, h, inner,
                limit, alpha, beta, GATED, INTERLEAVED, ACTIVATION, BLOCK_M, BLOCK_N, True,
            )  # fmt: skip
            acc = tl.zeros_like(acc)
            if PAIR:
                other = tl.zeros_like(other)
            if bias is not None:
                gate_bias = load_bias(bias, expert_ahead, first * BLOCK_N + column, inner, GATED, INTERLEAVED, 0)
                if GATED:
                    up_bias = load_bias(bias, expert_ahead, first * BLOCK_N + column, inner, GATED, INTERLEAVED, 1)
    again = any_not_finite(worst.to(tl.float32, bitcast=True)) if AGAIN else False
    if again:
        for tile in tl.range(begin, end, num_stages=1):
            rank = tile // BLOCKS_N
            block_n = tile % BLOCKS_N
            expert = tl.where(rank == rank_first, expert_first, expert_second)
            exact, exact_ups = gate_up_sums(
                x, weight, scale, scale_expert, scale_row, scale_column, scale_up, expert, block_n, hidden, inner,
                GATED, INTERLEAVED, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, CHUNK, CHUNKED, 1, BITS, INT4, SCALED,
                SCALE_ROWS, SCALE_COLUMNS, True,
            )  # fmt: skip
            n = block_n * BLOCK_N + column
            exact_gate_bias = None
            exact_up_bias = None
            if bias is not None:
                exact_gate_bias = load_bias(bias, expert, n, inner, GATED, INTERLEAVED, 0)
                if GATED:
                    exact_up_bias = load_bias(bias, expert, n, inner, GATED, INTERLEAVED, 1)
            store_activated(
                exact, exact_ups, exact_gate_bias, exact_up_bias, rstd, chosen == expert, share, rank, n, h, inner, limit,
                alpha, beta, GATED, INTERLEAVED, ACTIVATION, BLOCK_M, BLOCK_N, True,
            )  # fmt: skip
