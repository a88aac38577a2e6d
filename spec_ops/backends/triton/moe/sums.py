"""What a program of each of the two kernels of `few.py` adds up over k."""

from __future__ import annotations

import triton
import triton.language as tl

from spec_ops.backends.triton.linear.float4_words import WORD_REST
from spec_ops.backends.triton.linear.operands import CHUNK as _CHUNK
from spec_ops.backends.triton.linear.words import word_rows
from spec_ops.backends.triton.moe.stored import added, block_scales

PART = tl.constexpr(_CHUNK)  # of k, that a line of rows has in shared memory


@triton.jit
def block_of_columns(
    weight, expert, first, block, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, CHUNKED: tl.constexpr,
    TRANSPOSED: tl.constexpr, BITS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """A block of the weight as stored, its inner dimension last: `[chunks, ROWS, CHUNK]`, or `[ROWS, BLOCK_K]`."""
    PACKED: tl.constexpr = 8 if CHUNKED and SCALED else 2 if BITS == 4 else 1
    if CHUNKED and SCALED and CHUNK > PART:
        # Whole lines, and zeros beyond k, which may be no multiple of a chunk.
        words = weight.load([expert, first, block * (BLOCK_K // 8)])
        return tl.permute(tl.reshape(words, [ROWS, BLOCK_K // CHUNK, CHUNK // 8]), (1, 0, 2))
    elif CHUNKED:
        CHUNKS: tl.constexpr = BLOCK_K // CHUNK
        return tl.reshape(weight.load([expert, block * CHUNKS, first, 0]), [CHUNKS, ROWS, CHUNK // PACKED])
    elif TRANSPOSED:
        return tl.permute(tl.reshape(weight.load([expert, block * BLOCK_K, first]), [BLOCK_K, ROWS]), (1, 0))
    else:
        return tl.reshape(weight.load([expert, first, block * (BLOCK_K // PACKED)]), [ROWS, BLOCK_K // PACKED])


@triton.jit
def block_of_rows(
    rows, first, block, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, CHUNKED: tl.constexpr, SCALED: tl.constexpr,
    ORDERED: tl.constexpr,
):  # fmt: skip
    """A block of the tokens' rows, its inner dimension first; `ORDERED`: as in `word_rows`."""
    if CHUNKED and SCALED:
        parts = rows.load([block * (BLOCK_K // PART), first, 0])
        M: tl.constexpr = parts.shape[1]
        parts = tl.reshape(parts, [BLOCK_K // CHUNK, CHUNK // PART, M, PART])
        return word_rows(tl.reshape(tl.permute(parts, (0, 2, 1, 3)), [BLOCK_K // CHUNK, M, CHUNK]), ORDERED)
    elif CHUNKED:
        return tl.permute(rows.load([block * (BLOCK_K // CHUNK), first, 0]), (0, 2, 1))
    else:
        return tl.permute(rows.load([first, block * BLOCK_K]), (1, 0))


@triton.jit
def zero_sums(ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, CHUNKED: tl.constexpr):
    if CHUNKED:
        return tl.zeros([BLOCK_K // CHUNK, ROWS, BLOCK_M], tl.float32)
    else:
        return tl.zeros([ROWS, BLOCK_M], tl.float32)


@triton.jit
def gate_up_sums(
    x, weight, scale, scale_expert, scale_row, scale_column, scale_up, expert, block_n, hidden, inner,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr, TRANSPOSED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, CHUNKED: tl.constexpr, STAGES: tl.constexpr, BITS: tl.constexpr,
    INT4: tl.constexpr, SCALED: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Products of all of k with an expert's columns of block `block_n`, those of the up projection the second, unless both
    come side by side."""
    # A gate and an up projection side by side come as one block.
    PAIR: tl.constexpr = GATED and not INTERLEAVED
    ROWS: tl.constexpr = 2 * BLOCK_N if GATED and INTERLEAVED else BLOCK_N
    first = block_n * ROWS
    acc = zero_sums(ROWS, BLOCK_M, BLOCK_K, 32 if BITS == 4 and not SCALED else CHUNK, CHUNKED)
    other = acc
    s = 0
    t = 0
    PARTS: tl.constexpr = BLOCK_K // CHUNK if CHUNKED else 1
    row = first + tl.arange(0, ROWS)
    count = inner * (ROWS // BLOCK_N)
    if SCALED:
        scale_up = scale_up // 2 * 2  # as strides in `block_scales`
    if BITS < 16:
        # Scales are asked for a block ahead: Triton's pipeline has the operands of products alone.
        s = block_scales(
            scale, expert, scale_expert, scale_row, scale_column, row, count, 0, hidden, True,
            PARTS, BLOCK_K, BITS, INT4, SCALE_ROWS, SCALE_COLUMNS, SCALED,
        )  # fmt: skip
        if PAIR:
            t = block_scales(
                scale + scale_up, expert, scale_expert, scale_row, scale_column, row, count, 0, hidden, True,
                PARTS, BLOCK_K, BITS, INT4, SCALE_ROWS, SCALE_COLUMNS, SCALED,
            )  # fmt: skip
    for block in tl.range(0, tl.cdiv(hidden, BLOCK_K), num_stages=STAGES):
        columns = block_of_columns(weight, expert, first, block, ROWS, BLOCK_K, CHUNK, CHUNKED, TRANSPOSED, BITS, SCALED)
        if PAIR:
            ups = block_of_columns(
                weight, expert, inner + first, block, ROWS, BLOCK_K, CHUNK, CHUNKED, TRANSPOSED, BITS, SCALED
            )
        rows = block_of_rows(x, 0, block, BLOCK_K, CHUNK, CHUNKED, SCALED, False)
        acc = added(acc, columns, rows, s, BITS, INT4, SCALED, EXACT)
        if PAIR:
            other = added(other, ups, rows, t, BITS, INT4, SCALED, EXACT)
        if BITS < 16:
            s = block_scales(
                scale, expert, scale_expert, scale_row, scale_column, row, count, block + 1, hidden, True,
                PARTS, BLOCK_K, BITS, INT4, SCALE_ROWS, SCALE_COLUMNS, SCALED,
            )  # fmt: skip
            if PAIR:
                t = block_scales(
                    scale + scale_up, expert, scale_expert, scale_row, scale_column, row, count, block + 1, hidden, True,
                    PARTS, BLOCK_K, BITS, INT4, SCALE_ROWS, SCALE_COLUMNS, SCALED,
                )  # fmt: skip
    if CHUNKED:
        acc = tl.sum(acc, 0)
        other = tl.sum(other, 0)
        if SCALED and not EXACT:
            acc *= WORD_REST
            other *= WORD_REST
    return acc, other


@triton.jit
def down_sums(
    h, weight, scale, scale_expert, scale_row, scale_column, table, tile, split, begin, total, n, hidden, inner,
    TRANSPOSED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKED: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, BITS: tl.constexpr,
    INT4: tl.constexpr, SCALED: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Products with the columns `n` of block `tile`, over the share from block `begin` on of all experts' inner dimensions."""
    acc = zero_sums(BLOCK_N, BLOCK_M, BLOCK_K, 32 if BITS == 4 and not SCALED else CHUNK, CHUNKED)
    expert = tl.load(table + 1 + begin // BLOCKS)
    s = 0
    if BITS < 16:
        PARTS: tl.constexpr = BLOCK_K // CHUNK if CHUNKED else 1
        s = block_scales(
            scale, expert, scale_expert, scale_row, scale_column, n, hidden, begin % BLOCKS, inner, begin < total,
            PARTS, BLOCK_K, BITS, INT4, SCALE_ROWS, SCALE_COLUMNS, SCALED,
        )  # fmt: skip
    for i in tl.range(begin, (split + 1) * total // SPLITS, num_stages=STAGES):
        block = i % BLOCKS
        rows = block_of_rows(h, i // BLOCKS * BLOCK_M, block, BLOCK_K, CHUNK, CHUNKED, SCALED, True)
        columns = block_of_columns(
            weight, expert, tile * BLOCK_N, block, BLOCK_N, BLOCK_K, CHUNK, CHUNKED, TRANSPOSED, BITS, SCALED
        )
        acc = added(acc, columns, rows, s, BITS, INT4, SCALED, EXACT)
        # One iteration ahead: a load that another load's address depends on halves what Triton keeps in flight.
        expert = tl.load(table + 1 + (i + 1) // BLOCKS)
        if BITS < 16:
            s = block_scales(
                scale, expert, scale_expert, scale_row, scale_column, n, hidden, (i + 1) % BLOCKS, inner, i + 1 < total,
                PARTS, BLOCK_K, BITS, INT4, SCALE_ROWS, SCALE_COLUMNS, SCALED,
            )  # fmt: skip
    if CHUNKED:
        acc = tl.sum(acc, 0)
        if SCALED and not EXACT:
            acc *= WORD_REST
    return acc
